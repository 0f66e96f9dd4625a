"""Every parameter of every table does what its row says."""

import pytest

import terarec.hugectr as hugectr
from terarec.errors import ConfigError, TerarecError
from terarec.hugectr.enums import Error_t
from terarec.hugectr.errors import IllegalCallError, WrongInputError
from terarec.hugectr.tables.contents import RECORDS, TABLES
from terarec.hugectr.tables.solver import RELEASES
from terarec.hugectr.tables.table import REQUIRED, Status
from tests.hugectr.calls import CALLS, calls, records

ROWS = [(table, call, row) for table, call in calls() for row in table.rows]
IDS = [f"{table.name}.{row.name}-{number}" for number, (table, _, row) in enumerate(ROWS)]


@pytest.mark.parametrize(("record", "form", "call"), records(), ids=lambda value: getattr(value, "name", ""))
def test_a_call_with_the_least_gives_every_default(record, form, call):
    if form is record.FORMS[0] or call:
        assert record.form_of((), call) is form
    made = form.read((), call)
    assert [name for name, value in made.items() if value is REQUIRED] == []
    assert {row.name: made[row.name] for row in form.rows if row.name not in call} == {
        row.name: row.default for row in form.rows if row.name not in call
    }


@pytest.mark.parametrize(("record", "form", "call"), records(), ids=lambda value: getattr(value, "name", ""))
def test_every_argument_is_an_attribute(record, form, call):
    if record.form_of((), call) is form:
        made = record(**call)
        assert all(
            getattr(made, row.name) == form.read((), call)[row.name] or row.name in form.derive(made.values())
            for row in form.rows
        )
        assert made == record(**call)
        assert hash(made) == hash(record(**call))
        # Whatever the form, an object has what the newest form has.
        assert {row.name for row in record.FORMS[0].rows} - set(made.values()) <= {"label_dim", "label_name"}


@pytest.mark.parametrize(("table", "call", "row"), ROWS, ids=IDS)
def test_a_value_of_another_kind_is_refused_in_one_line(table, call, row):
    with pytest.raises(WrongInputError) as caught:
        table.read((), {**call, row.name: object()})
    assert str(caught.value).startswith(f"{table.name}: {row.name}: got <object object")
    assert "expected" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("table", "call", "row"), ROWS, ids=IDS)
def test_what_the_row_says_is_complete(table, call, row):
    assert row.meaning
    assert RELEASES.index(row.since) <= RELEASES.index(row.until)
    assert bool(row.why) == (row.status is not Status.SUPPORTED)
    if row.default is not REQUIRED:
        assert row.accept(table.name, row.default) == row.default


OTHER_VALUES = [
    True,
    False,
    3,
    2.5,
    "other",
    ["other"],
    [3],
    {},
    *[enum for kind in hugectr.enums.ENUMS for enum in kind],
]


def other_values(row):
    """Values of the row's kind that are not its default."""
    found = []
    for value in OTHER_VALUES:
        try:
            read = row.kind.read(value)
        except (ValueError, TypeError):
            continue
        if read != row.default:
            found.append(value)
    return found


REFUSING = [(table, call, row) for table, call, row in ROWS if row.status is Status.REFUSED]


@pytest.mark.parametrize(("table", "call", "row"), REFUSING, ids=lambda value: getattr(value, "name", ""))
def test_a_refused_parameter_raises_with_its_reason(table, call, row):
    values = other_values(row)
    if not values:  # the kind knows the default alone
        values = ["other"]
    for value in values:
        with pytest.raises(WrongInputError, match=row.name):
            table.read((), {**call, row.name: value})


IGNORED = [
    (table, call, row) for table, call, row in ROWS if row.status is Status.IGNORED and row.default is not REQUIRED
]


@pytest.mark.parametrize(("table", "call", "row"), IGNORED, ids=lambda value: getattr(value, "name", ""))
def test_an_ignored_parameter_changes_nothing_but_itself(table, call, row):
    plain = table.read((), call)
    for value in other_values(row):
        if not (row.name == "enable_tf32_compute" and table.read((), call)["use_mixed_precision"]):
            assert {**table.read((), {**call, row.name: value}), row.name: plain[row.name]} == plain


@pytest.mark.parametrize(("table", "call"), calls(), ids=lambda value: getattr(value, "name", ""))
def test_unknown_missing_and_repeated_parameters_are_named(table, call):
    with pytest.raises(WrongInputError, match="unknown parameter 'no_such'"):
        table.read((), {**call, "no_such": 1})
    for name in call:
        if {row.name: row.default for row in table.rows}[name] is REQUIRED:
            with pytest.raises(WrongInputError, match=f"no value for .*{name}"):
                table.read((), {key: value for key, value in call.items() if key != name})
    with pytest.raises(WrongInputError, match="positional values"):
        table.read((None,) * (len(table.rows) + 1), {})


ALIASES = [(table, call, row, alias) for table, call, row in ROWS for alias in row.aliases]


@pytest.mark.parametrize(("table", "call", "row", "alias"), ALIASES, ids=lambda value: getattr(value, "name", value))
def test_every_name_of_a_parameter_gives_its_value(table, call, row, alias):
    value = call.get(row.name, row.default)
    rest = {name: other for name, other in call.items() if name != row.name}
    assert table.read((), {**rest, alias: value}) == table.read((), {**rest, row.name: value})


def test_a_misspelt_parameter_is_guessed():
    with pytest.raises(WrongInputError, match="did you mean 'batchsize'"):
        hugectr.CreateSolver(batchsiz=3)


def test_a_parameter_by_place_and_by_name_is_refused():
    with pytest.raises(WrongInputError, match="model_name twice"):
        hugectr.CreateSolver("name", model_name="name")


def test_errors_have_the_meaning_of_error_t_and_of_the_builtin():
    with pytest.raises(WrongInputError) as caught:
        hugectr.CreateSolver(batchsize=-1)
    assert caught.value.error is Error_t.WrongInput
    assert isinstance(caught.value, TerarecError | ConfigError | RuntimeError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"use_mixed_precision": True, "enable_tf32_compute": True}, "expected one of them at most"),
        ({"batchsize": 10, "vvgpu": [[0, 1, 2]]}, "multiple of the 3 devices"),
        ({"batchsize": 9, "vvgpu": [[0, 1, 2]]}, "batchsize_eval: got 2048"),
        ({"vvgpu": [[]]}, "at least one device"),
        ({"decay_start": 5, "decay_steps": 0}, "decay_steps: got 0"),
        ({"decay_power": 0.5}, "decay_power: got 0.5, expected a finite number >= 1"),
        ({"train_intra_iteration_overlap": True, "repeat_dataset": False}, "no overlap in epochs"),
        ({"metrics_spec": {"AUC": 1.0}}, "metrics_spec"),
        ({"batchsize": True}, "expected an integer >= 1"),
        ({"kafka_brockers": "host:9092"}, "get_incremental_model hands them out"),
    ],
)
def test_solvers_that_cannot_be(values, problem):
    with pytest.raises(WrongInputError, match=problem):
        hugectr.CreateSolver(**values)


def test_the_first_place_is_the_seed_up_to_3_2():
    assert (hugectr.CreateSolver(7).seed, hugectr.CreateSolver(7).model_name) == (7, "")
    assert hugectr.CreateSolver("dcn", 7).seed == 7


def test_other_values_that_cannot_be():
    with pytest.raises(WrongInputError, match="LazyGlobal with SGD"):
        hugectr.CreateOptimizer(hugectr.Optimizer_t.SGD, hugectr.Update_t.LazyGlobal)
    with pytest.raises(WrongInputError, match="num_samples: got 0"):
        hugectr.DataReaderParams(hugectr.DataReaderType_t.Raw, ["a"], [], "b")
    with pytest.raises(WrongInputError, match="keyset: got 1 files"):
        hugectr.DataReaderParams(hugectr.DataReaderType_t.Norm, ["a", "b"], ["k"], "b")
    with pytest.raises(WrongInputError, match="3 numbers, expected one, or one for each of the 2 slots"):
        hugectr.DataReaderSparseParam("keys", [1, 2, 3], True, 2)


def test_lists_cannot_be_changed_from_outside():
    solver = hugectr.CreateSolver()
    solver.vvgpu[0].append(1)
    solver.metrics_spec.clear()
    assert solver.vvgpu == [[0]]
    assert solver.metrics_spec == {hugectr.MetricsType.AUC: 1.0}
    with pytest.raises(IllegalCallError, match="frozen"):
        solver.batchsize = 3


def test_a_data_source_may_be_set():
    source = hugectr.data.DataSourceParams(hugectr.FileSystemType_t.S3, "us-east-1", 9000)
    source.server = "eu-west-1"
    assert source.server == "eu-west-1"
    with pytest.raises(WrongInputError, match=r"port: got 'x'"):
        source.port = "x"
    with pytest.raises(AttributeError, match="no 'bucket'"):
        source.bucket = "x"


def test_paths_on_hdfs_are_urls():
    there = hugectr.data.DataSourceParams(hugectr.FileSystemType_t.HDFS, "name-node", 9000)
    assert there.url("/data/list.txt") == "hdfs://name-node:9000/data/list.txt"
    assert there.url("s3://bucket/list.txt") == "s3://bucket/list.txt"
    assert hugectr.data.DataSourceParams().url("data/list.txt") == "data/list.txt"
    assert hugectr.CreateSolver(data_source_params=there).data_source_params.url("/x") == "hdfs://name-node:9000/x"
    assert hugectr.data.DataSourceParams(use_hdfs=True, namenode="n").url("x") == "hdfs://n:9000/x"


def test_older_forms_give_the_newest_form_s_values():
    old = hugectr.DataReaderSparseParam(hugectr.DataReaderSparse_t.Localized, 30, 2, 3)
    assert (old.nnz_per_slot, old.is_fixed_length, old.slot_num) == ([2, 2, 2], False, 3)
    embedding = hugectr.SparseEmbedding(**CALLS["SparseEmbedding"][1])
    assert (embedding.combiner, embedding.workspace_size_per_gpu_in_mb) == ("sum", 0)
    given = hugectr.Input(**CALLS["Input"][4])
    assert [(slots.top_name, slots.slot_num) for slots in given.data_reader_sparse_param_array] == [("keys", 2)]
    assert (given.label_names, given.label_weights) == (["label"], [1.0])
    named = hugectr.Input(**CALLS["Input"][3])
    assert named.data_reader_sparse_param_array == given.data_reader_sparse_param_array
    nine = hugectr.AsyncParam(1, 4, 512, 2, 512, True, hugectr.Alignment_t.Non, multi_hot_reader=False)
    assert (nine.max_num_requests_per_thread, nine.multi_hot_reader) == (512, False)
    tasks = hugectr.Input([1, 1], ["a", "b"], 3, "dense", CALLS["Input"][2]["data_reader_sparse_param_array"])
    assert (tasks.label_dims, tasks.label_weights) == ([1, 1], [1.0, 1.0])
    weighted = hugectr.Input([1, 1], ["a", "b"], [2.0, 3.0], 3, "dense", tasks.data_reader_sparse_param_array)
    assert weighted.label_weights == [2.0, 3.0]
    seven = hugectr.AsyncParam(32, 4, 552960, 2, 512, True, hugectr.Alignment_t.Auto)
    assert (seven.io_block_size, seven.multi_hot_reader, seven.is_dense_float) == (552960, False, False)
    mixed = hugectr.AsyncParam(1, 16, io_block_size=512, shuffle=False, multi_hot_reader=True, is_dense_float=True)
    assert (mixed.io_block_size, mixed.multi_hot_reader, mixed.is_dense_float) == (512, True, True)
    assert hugectr.AsyncParam(1, 16, max_nr_request=32).max_num_requests_per_thread == 32
    adam = hugectr.CreateOptimizer(hugectr.Optimizer_t.Adam, hugectr.Update_t.Local, 0.25, 0.5)
    assert (adam.beta, adam.beta1, adam.beta2, adam.epsilon) == (0.0, 0.25, 0.5, 1e-7)
    ftrl = hugectr.CreateOptimizer(hugectr.Optimizer_t.Ftrl, hugectr.Update_t.Local, 0.25, 0.5)
    assert (ftrl.beta, ftrl.lambda1, ftrl.beta1) == (0.25, 0.5, 0.9)
    layer = hugectr.DenseLayer(hugectr.Layer_t.SequenceMask, ["a"], ["b"], max_sequence_len=9)
    assert (layer.max_sequence_len_from, layer.max_sequence_len_to) == (9, 9)


def test_a_keyword_of_python_is_a_parameter():
    layer = hugectr.DenseLayer(hugectr.Layer_t.BinaryCrossEntropyLoss, ["a", "b"], ["c"], **{"lambda": 0.25})
    assert getattr(layer, "lambda") == 0.25
    assert "keywords" in str(hugectr.DenseLayer.__signature__)


def test_every_class_is_told_of():
    assert {record.FORMS[0].name for record in RECORDS} <= {table.name for table in TABLES}
