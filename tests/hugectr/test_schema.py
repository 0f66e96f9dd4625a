# SPDX-License-Identifier: Apache-2.0
"""Every parameter of every schema does what the TOML files say; objects and calls validate by them."""

import inspect
from pathlib import Path

import numpy as np
import pytest

import terarec.hugectr as hugectr
from terarec.errors import ConfigError, TerarecError
from terarec.hugectr import objects
from terarec.hugectr.data import DataSource, file_url
from terarec.hugectr.enums import Error_t
from terarec.hugectr.errors import IllegalCallError, WrongInputError
from terarec.hugectr.hps_torch import LookupLayer
from terarec.hugectr.inference.hps import HPS
from terarec.hugectr.inference.session import InferenceModel, InferenceSession
from terarec.hugectr.inference.shared_tables import LoadedParameterServer
from terarec.hugectr.readers import DataReader
from terarec.hugectr.schema.record import Record
from terarec.hugectr.schema.table import REQUIRED, Status, forms, names
from terarec.hugectr.tools import DataGenerator
from terarec.hugectr.training_cache import TrainingCache
from tests.errors import at
from tests.hugectr.generate import names_stub, page, stub
from tests.hugectr.typed_script import MISTAKES, described, unknown_name, unknown_session

SLOTS = hugectr.DataReaderSparseParam("keys", 1, True, 2)
OLD_SLOTS = hugectr.DataReaderSparseParam(hugectr.DataReaderSparse_t.Distributed, 30, 1, 2)
TABLE = hugectr.EmbeddingTableConfig("items", 10, 4)
DENSE = {"dense_dim": 3, "dense_name": "dense"}
EMBEDDING = {
    "embedding_type": hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
    "embedding_vec_size": 8,
    "combiner": "sum",
    "sparse_embedding_name": "vectors",
    "bottom_name": "keys",
}

SERVED = {
    "model_name": "dcn",
    "max_batchsize": 64,
    "hit_rate_threshold": 0.5,
    "dense_model_file": "dcn_dense_100.model",
    "sparse_model_files": ["dcn0_sparse_100.model"],
    "device_id": 0,
    "use_gpu_embedding_cache": True,
    "cache_size_percentage": 0.2,
    "i64_input_key": True,
}

FILES = {
    "num_batches": 2,
    "source": "list.txt",
    "data_reader_type": hugectr.DataReaderType_t.Norm,
    "check_type": hugectr.Check_t.Sum,
}

# By name of the callable: one call for each of its forms, in their order.
CALLS = {
    "CreateSolver": [{}, {}],
    "CreateOptimizer": [{}, {}],
    "optimizer.CreateOptimizer": [{}],
    "DataReaderParams": [
        {"data_reader_type": hugectr.DataReaderType_t.Parquet, "source": "train.txt", "eval_source": "val.txt"}
    ],
    "AsyncParam": [
        {"num_threads": 1, "num_batches_per_thread": 4},
        {"num_threads": 1, "num_batches_per_thread": 4, "io_block_size": 512},
    ],
    "data.DataSourceParams": [{}, {"use_hdfs": False}],
    "Input": [
        {"label_dim": 1, "label_name": "label", **DENSE, "data_reader_sparse_param_array": [SLOTS]},
        {
            "label_dims": [1, 1],
            "label_names": ["a", "b"],
            "label_weights": [0.5, 0.5],
            **DENSE,
            "data_reader_sparse_param_array": [SLOTS],
        },
        {"label_dims": [1, 1], "label_names": ["a", "b"], **DENSE, "data_reader_sparse_param_array": [SLOTS]},
        {
            "label_dim": 1,
            "label_name": "label",
            **DENSE,
            "data_reader_sparse_param_array": [OLD_SLOTS],
            "sparse_names": ["keys"],
        },
        {
            "data_reader_type": hugectr.DataReaderType_t.Norm,
            "source": "train.txt",
            "eval_source": "val.txt",
            "check_type": hugectr.Check_t.Sum,
            "label_dim": 1,
            "label_name": "label",
            **DENSE,
            "data_reader_sparse_param_array": [OLD_SLOTS],
            "sparse_names": ["keys"],
        },
    ],
    "DataReaderSparseParam": [
        {"top_name": "keys", "nnz_per_slot": 1, "is_fixed_length": True, "slot_num": 2},
        {"type": hugectr.DataReaderSparse_t.Localized, "max_feature_num": 30, "max_nnz": 1, "slot_num": 2},
        {"sparse_name": "keys", "nnz_per_slot": [1, 2], "is_fixed_length": False, "slot_num": 2},
    ],
    "SparseEmbedding": [
        {**EMBEDDING, "workspace_size_per_gpu_in_mb": 1},
        {**EMBEDDING, "combiner": 0, "max_vocabulary_size_per_gpu": 100},
    ],
    "HybridEmbeddingParam": [{}, {"use_train_precompute_indices": False}],
    "DenseLayer": [{"layer_type": hugectr.Layer_t.ReLU, "bottom_names": ["a"], "top_names": ["b"]}],
    "DenseLayerComputeConfig": [{}],
    "DenseLayerSwitchs": [{}],
    "GroupDenseLayer": [
        {"bottom_name_list": ["a"], "top_name_list": ["b", "c"], "num_outputs": [4, 2]},
        {"bottom_name": "a", "top_name_list": ["b", "c"], "num_outputs": [4, 2]},
    ],
    "EmbeddingTableConfig": [
        {"name": "items", "max_vocabulary_size": 10, "ev_size": 4},
        {"table_id": 0, "max_vocabulary_size": 10, "ev_size": 4, "max_sequence_len": 3},
        {"table_id": 0, "max_vocabulary_size": 10, "ev_size": 4},
    ],
    "EmbeddingTablePlaceHolder": [{"id_space": 0, "max_vocabulary_size": 10, "ev_size": 4}],
    "CreateETC": [{"ps_types": [hugectr.TrainPSType_t.Staged]}],
    "CreateHMemCache": [{"num_blocks": 2, "target_hit_rate": 0.4, "max_num_evict": 0}],
    "CreateMOS": [{"train_from_scratch": True}, {"ps_types": [hugectr.TrainPSType_t.Staged]}],
    "solver_parser_helper": [{}, {"eval_batches": 7}],
    "tools.DataGeneratorParams": [
        {
            "format": hugectr.DataReaderType_t.Norm,
            "label_dim": 1,
            "dense_dim": 3,
            "num_slot": 2,
            "i64_input_key": True,
            "source": "train.txt",
            "eval_source": "val.txt",
            "slot_size_array": [10, 20],
        }
    ],
    "EmbeddingCollectionConfig": [{}, {"output_layout": "feature_major"}],
    "EmbeddingCollectionConfig.embedding_lookup": [
        {"table_config": TABLE, "bottom_name": "keys", "top_name": "vectors", "combiner": "sum"}
    ],
    "EmbeddingCollectionConfig.shard": [{"shard_matrix": [["items"]], "shard_strategy": [("mp", ["items"])]}],
    "EmbeddingPlanner.embedding_lookup": [
        {"table_config": TABLE, "bottom_name": "keys", "top_name": "vectors", "combiner": "sum"}
    ],
    "EmbeddingPlanner.create_embedding_collection": [
        {"shard_matrix": [[1]], "emb_table_group_strategy": [[0]], "emb_table_placement_strategy": ["mp"]},
        {"plan_file": "plan.json"},
    ],
    "Model": [
        {
            "solver": hugectr.CreateSolver(),
            "reader_params": hugectr.DataReaderParams(hugectr.DataReaderType_t.Parquet, "a.txt", [], "b.txt"),
            "opt_params": hugectr.CreateOptimizer(),
        }
    ],
    "Model.add": [{"input": SLOTS}],
    "Model.fit": [{}],
    "Model.set_learning_rate": [{"lr": 0.1}],
    "Model.save_params_to_files": [{"prefix": "here"}],
    "Model.load_dense_weights": [{"dense_model_file": "a.model"}],
    "Model.load_dense_optimizer_states": [{"dense_opt_states_file": "a.model"}],
    "Model.load_sparse_weights": [{"sparse_embedding_files": ["a.model"]}],
    "Model.load_sparse_optimizer_states": [{"sparse_opt_states_files": {"a": "a.model"}}],
    "EmbeddingTrainingCache.update": [{"keyset_file": "a.keyset"}],
    "LearningRateScheduler": [{"base_lr": 0.1}],
    "Session": [{"solver_config": hugectr.solver_parser_helper(), "config_file": "conf.json"}],
    "VolatileDatabaseParams": [{}],
    "CPUMemoryDatabaseParams": [{}],
    "DistributedDatabaseParams": [{}],
    "PersistentDatabaseParams": [{}],
    "UpdateSourceParams": [{}],
    "InferenceParams": [SERVED],
    "ParameterServerConfig": [
        {
            "emb_table_name": {"dcn": ["items"]},
            "embedding_vec_size": {"dcn": [4]},
            "max_feature_num_per_sample_per_emb_table": {"dcn": [4]},
            "inference_params_array": [hugectr.inference.InferenceParams(**SERVED)],
        }
    ],
    "CreateParameterServer": [{"model_config_path": ["dcn.json"], "model_name": ["dcn"], "i64_input_key": True}],
    "CreateEmbeddingCache": [
        {
            "parameter_server": objects.ParameterServer(),
            "cuda_dev_id": 0,
            "use_gpu_embedding_cache": True,
            "cache_size_percentage": 0.2,
            "model_config_path": "dcn.json",
            "model_name": "dcn",
            "i64_input_key": True,
        }
    ],
    "ParameterServer": [{"framework_name": "Other", "model_config_path": [], "inference_params_array": []}],
    "ParameterServer.get_embedding_cache": [{"model_name": "dcn", "device_id": 0}],
    "InferenceSession": [
        {"model_config_path": "dcn.json", "inference_params": 0, "embedding_cache": objects.EmbeddingCache()}
    ],
    "CreateInferenceSession": [
        {"model_config_path": "dcn.json", "inference_params": hugectr.inference.InferenceParams(**SERVED)}
    ],
    "InferenceModel": [
        {"model_config_path": "dcn.json", "inference_params": hugectr.inference.InferenceParams(**SERVED)}
    ],
    "InferenceSession.predict": [FILES],
    "InferenceModel.predict": [FILES],
    "HPS": [{"ps_config": "ps.json"}],
    "HPS.lookup": [{"h_keys": [1, 2], "model_name": "dcn", "table_id": 0}],
    "HPS.lookup_fromdlpack": [
        {"keys": np.zeros(2, np.int64), "out_tensor": np.zeros((2, 4)), "model_name": "dcn", "table_id": 0}
    ],
    "hps_torch.LookupLayer": [
        {"ps_config_file": "ps.json", "model_name": "dcn", "table_id": 0, "emb_vec_size": 4},
    ],
    "ps.json": [{"models": []}],
    "ps.json.models": [
        {
            "deployed_device_list": [0],
            "default_value_for_each_table": [0.0],
            "maxnum_catfeature_query_per_table_per_sample": [26],
            "embedding_vecsize_per_table": [4],
        }
    ],
    "ps.json.volatile_db": [{}],
    "ps.json.persistent_db": [{}],
    "ps.json.update_source": [{}],
}


# By call, the least call of each form.
LEAST = {call: list(zip(versions, CALLS[call], strict=True)) for call, versions in forms().items()}
RECORDS = [cls for cls in vars(objects).values() if isinstance(cls, type) and issubclass(cls, Record) and cls.CALL]

OTHER_VALUES = [
    True,
    False,
    3,
    2.5,
    "other",
    ["other"],
    [3],
    {},
    *[member for enum in hugectr.enums.ENUMS for member in enum],
]


def other_values(parameter):
    """Values of the parameter's type that are not its default."""
    found = []
    for value in OTHER_VALUES:
        try:
            read = parameter.type.read(value)
        except (ValueError, TypeError):
            continue
        if read != parameter.default:
            found.append(value)
    return found


@pytest.mark.parametrize("call", LEAST)
def test_the_parameters_of_a_call(call):
    for form, least in LEAST[call]:
        made = form.read((), least)
        for one in form.parameters:
            if one.default is not REQUIRED:
                assert one.accept(call, one.default) == one.default
            if one.name not in least:
                assert made[one.name] == one.default
            check_faults(form, least, one)
            check_aliases(form, least, one)
            if one.status is Status.IGNORED and one.default is not REQUIRED:
                check_ignored(form, least, one)
            for value in (other_values(one) or ["other"]) if one.status is Status.REJECTED else []:
                with pytest.raises(WrongInputError) as caught:
                    form.read((), {**least, one.name: value})
                assert (caught.value.field, caught.value.received) == (one.name, value)
        check_unknown_arguments(form, least)


def check_faults(form, least, one):
    with pytest.raises(WrongInputError) as caught:
        form.read((), {**least, one.name: object()})
    assert caught.value.field == one.name
    assert type(caught.value.received) is object
    assert str(caught.value).startswith(f"{form.name}: {one.name}: got <object object")
    assert "expected" in str(caught.value)
    assert "\n" not in str(caught.value)
    if one.default is REQUIRED:
        with pytest.raises(WrongInputError) as caught:
            form.read((), {name: value for name, value in least.items() if name != one.name})
        assert caught.value.field == one.name


def check_aliases(form, least, one):
    rest = {name: other for name, other in least.items() if name != one.name}
    value = least.get(one.name, one.default)
    for alias in one.aliases:
        assert form.read((), {**rest, alias: value}) == form.read((), {**rest, one.name: value})


def check_ignored(form, least, one):
    plain = form.read((), least)
    for value in other_values(one):
        if not (one.name == "enable_tf32_compute" and plain["use_mixed_precision"]):
            assert {**form.read((), {**least, one.name: value}), one.name: plain[one.name]} == plain


def check_unknown_arguments(form, least):
    with pytest.raises(WrongInputError, check=at(form.name, "unknown parameter 'no_such'")) as caught:
        form.read((), {**least, "no_such": 1})
    assert caught.value.field == "no_such"
    with pytest.raises(WrongInputError, check=at(form.name, "positional values")):
        form.read((None,) * (len(form.parameters) + 1), {})


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_argument_is_an_attribute(record):
    newest = {one.name for one in forms()[record.CALL][0].parameters}
    for number, (form, least) in enumerate(LEAST[record.CALL]):
        made = record(**least)
        read = form.read((), least)
        # A call with nothing but what has no default may fit a newer form as well.
        if number == 0 or form.fits((), least):
            assert all(
                getattr(made, one.name) == read[one.name] or one.name in form.derive(read) for one in form.parameters
            )
        assert made == record(**least)
        assert hash(made) == hash(record(**least))
        # Whatever the form, an object has what the newest form has.
        assert newest - set(made.values()) <= {"label_dim", "label_name"}


def test_every_call_of_a_class_has_one():
    assert {record.CALL for record in RECORDS} <= set(LEAST)


SIGNATURES = {
    "CreateInferenceSession": InferenceSession.of_graph,
    "InferenceModel": InferenceModel,
    "InferenceModel.predict": InferenceModel.evaluate,
    "InferenceSession": InferenceSession,
    "InferenceSession.predict": InferenceSession.evaluate,
    "HPS": HPS,
    "HPS.lookup": HPS.lookup,
    "HPS.lookup_fromdlpack": HPS.lookup_fromdlpack,
    "ParameterServer": LoadedParameterServer,
    "ParameterServer.get_embedding_cache": LoadedParameterServer.refresh_embedding_cache,
    "hps_torch.LookupLayer": LookupLayer,
    "LearningRateScheduler": hugectr.LearningRateScheduler,
    "Session": hugectr.Session,
    "Model": hugectr.Model,
    "EmbeddingTrainingCache.update": TrainingCache.update,
    **{name: getattr(hugectr.Model, name[6:]) for name in LEAST if name.startswith("Model.")},
    **{
        f"EmbeddingCollectionConfig.{name}": getattr(hugectr.EmbeddingCollectionConfig, name)
        for name in ("embedding_lookup", "shard")
    },
    "EmbeddingPlanner.embedding_lookup": hugectr.EmbeddingPlanner.embedding_lookup,
}


@pytest.mark.parametrize("call", SIGNATURES)
def test_a_method_has_the_signature_of_its_schema(call):
    parameters = dict(inspect.signature(SIGNATURES[call]).parameters)
    parameters.pop("self", None)
    (form,) = forms()[call]
    assert list(parameters) == [one.name for one in form.parameters]
    for one in form.parameters:
        default = parameters[one.name].default
        default = list(default) if isinstance(default, tuple) else default  # TOML has no tuples
        assert (REQUIRED if default is inspect.Parameter.empty else default) == one.default


def test_the_stubs_are_current():
    path = Path(objects.__file__).with_suffix(".pyi")
    assert path.read_text() == stub(), "run: python -m tests.hugectr.generate stub > " + str(path)
    path = Path(hugectr.__file__).with_suffix(".pyi")
    assert path.read_text() == names_stub(), "run: python -m tests.hugectr.generate names > " + str(path)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__.removeprefix("_"))
def test_what_mypy_reports_is_rejected(mistake):
    with pytest.raises(WrongInputError):
        mistake()


def test_what_mypy_accepts_is_accepted():
    assert described().solver.lr == 0.01
    with pytest.raises(AttributeError, match="CreateSolvers"):
        unknown_name()
    with pytest.raises(AttributeError, match="InferenceSessions"):
        unknown_session()


def test_a_misspelt_parameter_is_guessed():
    with pytest.raises(WrongInputError, check=at("CreateSolver", "did you mean 'batchsize'")):
        hugectr.CreateSolver(batchsiz=3)


def test_a_parameter_by_position_and_by_name_is_rejected():
    with pytest.raises(WrongInputError, check=at("CreateSolver", "model_name twice")):
        hugectr.CreateSolver("name", model_name="name")


def test_errors_have_the_meaning_of_error_t_and_of_the_builtin():
    with pytest.raises(WrongInputError) as caught:
        hugectr.CreateSolver(batchsize=-1)
    assert caught.value.error is Error_t.WrongInput
    assert isinstance(caught.value, TerarecError | ConfigError | RuntimeError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"use_mixed_precision": True, "enable_tf32_compute": True}, ("CreateSolver", "expected one of them at most")),
        ({"batchsize": 10, "vvgpu": [[0, 1, 2]]}, ("CreateSolver: batchsize", "multiple of the 3 devices")),
        ({"batchsize": 9, "vvgpu": [[0, 1, 2]]}, ("CreateSolver: batchsize_eval",)),
        ({"vvgpu": [[]]}, ("CreateSolver: vvgpu",)),
        ({"decay_start": 5, "decay_steps": 0}, ("CreateSolver: decay_steps",)),
        ({"decay_power": 0.5}, ("CreateSolver: decay_power",)),
        ({"train_intra_iteration_overlap": True, "repeat_dataset": False}, ("CreateSolver", "no overlap in epochs")),
        ({"metrics_spec": {"AUC": 1.0}}, ("CreateSolver: metrics_spec",)),
        ({"batchsize": True}, ("CreateSolver: batchsize", "expected an integer >= 1")),
    ],
)
def test_solvers_that_cannot_be(values, place):
    with pytest.raises(WrongInputError, check=at(*place)) as caught:
        hugectr.CreateSolver(**values)
    assert caught.value.field in ("", "batchsize_eval", *values)


def test_the_first_place_is_the_seed_up_to_3_2():
    assert (hugectr.CreateSolver(7).seed, hugectr.CreateSolver(7).model_name) == (7, "")
    assert hugectr.CreateSolver("dcn", 7).seed == 7


def test_other_values_that_cannot_be():
    with pytest.raises(WrongInputError, check=at("CreateOptimizer: update_type")):
        hugectr.CreateOptimizer(hugectr.Optimizer_t.SGD, hugectr.Update_t.LazyGlobal)
    with pytest.raises(WrongInputError, check=at("DataReaderParams: keyset")):
        hugectr.DataReaderParams(hugectr.DataReaderType_t.Norm, ["a", "b"], ["k"], "b")
    with pytest.raises(WrongInputError, check=at("DataReaderSparseParam: nnz_per_slot")):
        hugectr.DataReaderSparseParam("keys", [1, 2, 3], True, 2)


def test_lists_cannot_be_changed_from_outside():
    solver = hugectr.CreateSolver()
    solver.vvgpu[0].append(1)
    solver.metrics_spec.clear()
    assert solver.vvgpu == [[0]]
    assert solver.metrics_spec == {hugectr.MetricsType.AUC: 1.0}
    with pytest.raises(IllegalCallError, check=at("Solver.batchsize")):
        solver.batchsize = 3


def test_a_data_source_may_be_set():
    source = hugectr.data.DataSourceParams(hugectr.FileSystemType_t.S3, "us-east-1", 9000)
    source.server = "eu-west-1"
    assert source.server == "eu-west-1"
    with pytest.raises(WrongInputError, check=at("DataSourceParams: port")):
        source.port = "x"
    with pytest.raises(AttributeError, match="no 'bucket'"):
        source.bucket = "x"


def test_paths_on_hdfs_are_urls():
    there = hugectr.data.DataSourceParams(hugectr.FileSystemType_t.HDFS, "name-node", 9000)
    assert file_url(there, "/data/list.txt") == "hdfs://name-node:9000/data/list.txt"
    assert file_url(there, "s3://bucket/list.txt") == "s3://bucket/list.txt"
    assert file_url(hugectr.data.DataSourceParams(), "data/list.txt") == "data/list.txt"
    assert (
        file_url(hugectr.CreateSolver(data_source_params=there).data_source_params, "/x") == "hdfs://name-node:9000/x"
    )
    assert file_url(hugectr.data.DataSourceParams(use_hdfs=True, namenode="n"), "x") == "hdfs://n:9000/x"


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


# The owner, its call, and each list of names that some release has for what it takes.
RELEASED_NAMES = [
    (hugectr, "Model", ["solver_parser opt_params", "solver reader_params opt_params etc_params", "mos_params"]),
    (
        hugectr.Model,
        "add",
        ["input", "sparse_embedding", "dense_layer", "group_dense_layer", "embedding_collection", "ebc_config"],
    ),
    (hugectr.Model, "compile", ["loss_names loss_weights"]),
    (hugectr.Model, "fit", ["num_epochs max_iter display eval_interval snapshot snapshot_prefix data_source_params"]),
    (hugectr.Model, "graph_to_json", ["graph_config_file"]),
    (hugectr.Model, "construct_from_json", ["graph_config_file include_dense_network"]),
    (hugectr.Model, "freeze_embedding", ["embedding_name"]),
    (hugectr.Model, "unfreeze_embedding", ["embedding_name"]),
    (hugectr.Model, "set_learning_rate", ["lr"]),
    (hugectr.Model, "train", ["is_first_batch"]),
    (hugectr.Model, "eval", ["is_first_batch", "eval_batch"]),
    (hugectr.Model, "check_out_tensor", ["tensor_name tensor_type"]),
    (hugectr.Model, "export_predictions", ["output_prediction_file_name output_label_file_name"]),
    (hugectr.Model, "save_params_to_files", ["prefix iter data_source_params"]),
    (hugectr.Model, "load_dense_weights", ["dense_model_file data_source_params"]),
    (hugectr.Model, "load_dense_optimizer_states", ["dense_opt_states_file data_source_params"]),
    (hugectr.Model, "load_sparse_weights", ["sparse_embedding_files data_source_params", "sparse_embedding_files_map"]),
    (hugectr.Model, "load_sparse_optimizer_states", ["sparse_opt_states_files", "sparse_opt_states_files_map"]),
    (hugectr.Model, "embedding_dump", ["path table_names"]),
    (hugectr.Model, "embedding_load", ["path table_names"]),
    (TrainingCache, "update", ["keyset_file", "keyset_file_list"]),
    (TrainingCache, "store", ["snapshot_file_list"]),
    (DataReader, "set_source", ["file_name"]),
    (DataReader, "set_file_list_source", ["file_list"]),
    (hugectr.Session, "evaluation", ["export_predictions_out_file export_labels_out_file"]),
    (hugectr.Session, "init_params", ["model_file"]),
    (hugectr.Session, "download_params_to_files", ["prefix iter"]),
    (hugectr.Session, "set_learning_rate", ["lr"]),
    (hugectr, "get_learning_rate_scheduler", ["configure_file"]),
    (hugectr, "SolverParser", ["file"]),
    (DataGenerator, "__init__", ["data_generator_params"]),
    (DataSource, "__init__", ["data_source_params"]),
]


@pytest.mark.parametrize(
    ("owner", "call", "releases"), RELEASED_NAMES, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_call_takes_the_names_of_every_release(owner, call, releases):
    taken = set(inspect.signature(getattr(owner, call)).parameters)
    for name in (call, f"Model.{call}", f"EmbeddingTrainingCache.{call}"):
        taken |= {alias for form in forms().get(name, ()) for one in form.parameters for alias in one.aliases}
    assert {name for release in releases for name in release.split()} - taken == set()


PAGE = Path(__file__).parents[2] / "docs" / "hugectr-compat.md"


def test_the_page_is_current():
    assert PAGE.read_text() == page(), "run: python -m tests.hugectr.generate page > docs/hugectr-compat.md"


def found(name):
    thing = hugectr
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


@pytest.mark.parametrize("section", [section for section in names() if section != "Commands"])
def test_names_exist_or_are_rejected(section):
    for row in names()[section]:
        if row.status is not Status.REJECTED:
            assert found(row.name).__doc__, row.name
        elif row.name.startswith("Model."):
            with pytest.raises(IllegalCallError):
                found(row.name)(None)
        else:
            with pytest.raises(AttributeError, match=row.why if "." not in row.name else row.name.rpartition(".")[2]):
                found(row.name)
