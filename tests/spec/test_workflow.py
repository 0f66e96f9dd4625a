"""Workflows <-> JSON, and what their specs refuse."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.etl.ops import (
    Bucketize,
    Categorify,
    Clip,
    Cross,
    DifferenceLag,
    DropLowCardinality,
    Explode,
    FillMissing,
    GivenIds,
    HashBucket,
    History,
    JoinGroupby,
    JoinTable,
    KeepRows,
    LambdaOp,
    ListSlice,
    LogOp,
    Normalize,
    NormalizeMinMax,
    Pad,
    Rename,
    SplitText,
    TargetEncoding,
)
from terarec.spec import (
    LabelSpec,
    SourceColumn,
    SourceSpec,
    SplitByFiles,
    SplitByFraction,
    SplitByHash,
    SplitByTime,
    SplitByUser,
    WorkflowSpec,
    from_data,
    to_data,
)
from tests.errors import at

names = st.text(min_size=1, max_size=5)
columns = st.lists(names, min_size=1, max_size=3, unique=True).map(tuple)
finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(1, 1000)
steps = st.one_of(
    st.builds(FillMissing, columns=columns, value=finite | names, indicator=st.booleans()),
    st.builds(FillMissing, columns=columns, median=st.just(True)),
    st.builds(Clip, columns=columns, low=st.none() | st.floats(-9, 0), high=st.floats(0, 9)),
    st.builds(LogOp, columns=columns, shift=st.none() | finite),
    st.builds(Normalize, columns=columns),
    st.builds(NormalizeMinMax, columns=columns),
    st.builds(Bucketize, columns=columns, intervals=st.integers(2, 99)),
    st.builds(
        Bucketize,
        columns=columns,
        boundaries=st.lists(finite, min_size=1, max_size=4, unique=True).map(sorted).map(tuple),
    ),
    st.builds(
        Categorify,
        columns=columns,
        min_count=counts,
        max_size=st.none() | counts,
        hash_buckets=counts,
        joint=st.booleans(),
    ),
    st.builds(HashBucket, columns=columns, buckets=counts, seed=st.integers(0, 2**63 - 1)),
    st.builds(GivenIds, columns=st.just(("a", "b")), rows=st.tuples(st.none() | counts, counts), max_length=counts),
    st.builds(Cross, columns=st.lists(names, min_size=2, max_size=4, unique=True).map(tuple), output=names),
    st.builds(TargetEncoding, columns=columns, target=names, folds=st.integers(2, 9), smoothing=st.floats(0, 99)),
    st.builds(DropLowCardinality, columns=columns, min_distinct=st.integers(2, 9)),
    st.builds(JoinGroupby, columns=columns),
    st.builds(DifferenceLag, columns=columns, group=names, order=names, lag=counts),
    st.builds(History, columns=columns, group=names, order=names, max_length=counts),
    st.builds(JoinTable, table=st.just("side"), on=st.just("key"), columns=st.just(("a", "b"))),
    st.builds(ListSlice, columns=columns, start=st.integers(-9, -3), stop=st.none() | st.integers(-2, 5)),
    st.builds(Pad, columns=columns, length=counts, value=finite | names),
    st.builds(Explode, columns=columns),
    st.builds(Rename, names=st.dictionaries(names, names, min_size=1, max_size=1)),
    st.builds(LambdaOp, columns=columns, outputs=columns, function=st.just("a.b:c"), output_type=st.just("text")),
    st.just(SplitText(columns=("a",), separator=",", outputs=("b", "c"), types=("integer", "text"))),
    st.builds(KeepRows, column=names, values=columns),
    st.builds(KeepRows, column=names, at_least=finite, at_most=st.none() | finite),
)
shares = st.floats(0.01, 0.49)
splits = st.one_of(
    st.none(),
    st.builds(SplitByFraction, valid=shares, test=shares),
    st.builds(SplitByHash, valid=shares, test=shares, seed=counts),
    st.builds(SplitByUser, column=names, valid=shares, test=shares),
    st.builds(SplitByTime, column=names, valid_from=finite),
    st.builds(SplitByTime, column=names, valid=shares, test=shares),
    st.builds(SplitByFiles, valid=counts, test=counts),
)


def source(*columns: SourceColumn, **fields: object) -> SourceSpec:
    return SourceSpec(format="delimited", columns=columns or (SourceColumn(name="a", type="number"),), **fields)


@given(st.lists(steps, max_size=4), splits)
def test_a_workflow_comes_back_from_json(step_list: list[object], split: object) -> None:
    spec = WorkflowSpec(
        name="shop",
        source=source(SourceColumn(name="t", type="time", format="%Y-%m-%d"), header=True, delimiter=","),
        tables={"side": source()},
        steps=tuple(step_list),
        split=split,
        labels=(LabelSpec(name="y", column="bought", at_least=3.0),),
        dense=("d",),
        keys=("k",),
        weight="w",
        metadata=("t",),
    )
    data = json.loads(json.dumps(to_data(spec)))
    assert from_data(WorkflowSpec, data) == spec


def test_a_shift_to_learn_is_not_the_default_one() -> None:
    assert to_data(LogOp(columns=("a",), shift=None)) == {
        "kind": "log_op",
        "columns": ["a"],
        "outputs": [],
        "shift": None,
    }


def beside(**columns: object) -> WorkflowSpec:
    """A workflow with a weight or metadata."""
    kinds = {"t": "integer", "user": "text", "tags": "text", "h": "hex32"}
    found = (
        SourceColumn(name=name, type=kind, separator="|" if name == "tags" else None)  # type: ignore[arg-type]
        for name, kind in kinds.items()
    )
    labels = (LabelSpec(name="y"),)
    return WorkflowSpec(name="w", source=source(*found), labels=labels, dense=("a",), **columns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: FillMissing(columns=()), r"columns: got \[\], expected a tuple of at least one"),
        (lambda: FillMissing(columns=("a",)), "expected exactly one"),
        (lambda: FillMissing(columns=("a",), value=1.0, median=True), "expected exactly one"),
        (lambda: FillMissing(columns=("a",), value=""), "FillMissing.value: got ''"),
        (lambda: Clip(columns=("a",)), "got neither low nor high"),
        (lambda: Clip(columns=("a",), low=2.0, high=1.0), "at most high, 1.0"),
        (lambda: Clip(columns=("a", "b"), low=0.0, outputs=("c",)), "2 names, one for each"),
        (lambda: LogOp(columns=("a",), shift=float("nan")), "LogOp.shift: got nan"),
        (lambda: Bucketize(columns=("a",)), "exactly one of boundaries and intervals"),
        (lambda: Bucketize(columns=("a",), boundaries=(2.0, 1.0)), "rising numbers"),
        (lambda: Categorify(columns="abc"), "got 'abc', expected a tuple"),
        (lambda: HashBucket(columns=("a",), buckets=0), "buckets: got 0, expected a 64-bit integer >= 1"),
        (lambda: GivenIds(columns=("a", "b"), rows=(3,)), "expected 2 numbers, one for each of columns"),
        (lambda: GivenIds(columns=("a", "b"), rows=(None, 0)), "an integer >= 1 or None for each"),
        (lambda: Cross(columns=("a",), output="b"), "at least two"),
        (lambda: TargetEncoding(columns=("a",), target="y", folds=1), "an integer >= 2"),
        (lambda: JoinGroupby(columns=("a",), statistics=("mean",)), "expected columns exactly where"),
        (lambda: JoinGroupby(columns=("a",), statistics=("modus",)), "some of 'count'"),
        (lambda: History(columns=("a",), group="u", order="t", max_length=0), "max_length: got 0"),
        (lambda: JoinTable(table="t", on="k", columns=("k",)), "other than 'k'"),
        (lambda: ListSlice(columns=("a",), start=3, stop=3), "a position above start, 3"),
        (lambda: Pad(columns=("a",), length=2, value=float("inf")), "value: got inf"),
        (lambda: Rename(names={}), "old names with their new names"),
        (lambda: Rename(names={"a": "c", "b": "c"}), "'c' occurs twice"),
        (lambda: LambdaOp(columns=("a",), outputs=("b",), function="f", output_type="text"), "package.module:name"),
        (lambda: SplitText(columns=("a",), separator=",", outputs=("b",), types=()), "for each of outputs"),
        (lambda: KeepRows(column="a"), "either values"),
        (lambda: SplitByFraction(valid=0.0), "a sum between 0 and 1"),
        (lambda: SplitByTime(column="t"), "either thresholds"),
        (lambda: SplitByTime(column="t", valid_from=2.0, test_from=1.0), "a time after valid_from"),
        (lambda: SplitByFiles(valid=0), "got 0 files"),
        (lambda: SourceColumn(name="t", type="time", format="%x"), "the directives %Y"),
        (lambda: SourceColumn(name="t", type="text", format="%Y"), "type is 'text'"),
        (lambda: source(delimiter=""), "got '', expected ASCII characters, at least one"),
        (lambda: source(delimiter=':"'), "none of them a quote"),
        (lambda: source(encoding="cp1252"), "one of 'utf-8', 'latin-1'"),
        (lambda: SourceSpec(format="parquet", columns=source().columns, encoding="latin-1"), "the format is 'parquet'"),
        (lambda: HashBucket(columns=("a",), buckets=2, seed=-1), "seed: got -1, expected a 64-bit integer >= 0"),
        (lambda: HashBucket(columns=("a",), buckets=2**63), "expected a 64-bit integer >= 1"),
        (lambda: SplitByHash(valid=0.1, seed=2**63), "expected a 64-bit integer >= 0"),
        (lambda: source(SourceColumn(name="a", type="text", separator="\t")), "holds the delimiter"),
        (lambda: LabelSpec(name="y", positives=("a",), at_least=1.0), "at most one"),
        (lambda: WorkflowSpec(name="w", source=source(), labels=(), dense=("a",)), "got no label"),
        (lambda: WorkflowSpec(name="w", source=source(), labels=(LabelSpec(name="a"),)), "got no dense"),
        (lambda: WorkflowSpec(name="w", source=source(), labels=(LabelSpec(name="a"),), dense=("a",)), "occurs twice"),
        (
            lambda: WorkflowSpec(
                name="w",
                source=source(),
                labels=(LabelSpec(name="y"),),
                dense=("a",),
                steps=(JoinTable(table="t", on="k", columns=("a",)),),
            ),
            r"steps\[0\].table: got 't', expected one of tables: none",
        ),
        (lambda: beside(weight="a"), "the name 'a' occurs twice"),
        (lambda: beside(metadata=("t", "t")), "metadata: the name 't' occurs twice"),
        (
            lambda: beside(metadata=("usr",)),
            r"metadata: got 'usr' \(did you mean 'user'\?\), expected a column of the source: t, user, tags, h",
        ),
        (lambda: beside(metadata=("tags",)), "metadata: column 'tags' holds lists of text, expected one text"),
        (lambda: beside(metadata=("h",)), "metadata: column 'h' holds hex32, expected one text, integer, number or"),
    ],
)
def test_a_wrong_field_is_named_with_what_is_accepted(make: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make()  # type: ignore[operator]


def test_a_mistake_in_a_file_has_its_path() -> None:
    data = {
        "name": "w",
        "source": {"format": "delimited", "columns": [{"name": "a", "type": "number"}]},
        "steps": [{"kind": "clip", "columns": ["a"], "low": 2, "high": 1}],
        "labels": [{"name": "y"}],
        "dense": ["a"],
    }
    with pytest.raises(ConfigError, check=at("workflow.json: $.steps[0].low")):
        from_data(WorkflowSpec, data, "workflow.json: $")


@pytest.mark.parametrize(
    ("start", "stop", "longest"),
    [(0, 5, 5), (2, 5, 3), (-3, None, 3), (-3, -1, 2), (0, None, None), (-3, 2, 2), (0, -1, None)],
)
def test_the_longest_slice(start: int, stop: int | None, longest: int | None) -> None:
    step = ListSlice(columns=("a",), start=start, stop=stop)
    lengths = [len(list(range(n))[start:stop]) for n in range(20)]
    assert step.max_length == longest
    assert longest is None or max(lengths) == longest


def test_names_of_what_comes_out() -> None:
    assert FillMissing(columns=("a", "b"), value=0.0, indicator=True).writes == ("a", "b", "a_missing", "b_missing")
    step = JoinGroupby(columns=("u", "v"), values=("x",), statistics=("count", "mean", "max"))
    assert step.writes == ("u_count", "u_x_mean", "u_x_max", "v_count", "v_x_mean", "v_x_max")
    assert step.serving_reads == ("u", "v")
    assert TargetEncoding(columns=("u",), target="y").serving_reads == ("u",)
    assert History(columns=("item",), group="u", order="t", max_length=3, outputs=("seen",)).serving_reads == ("seen",)
