# SPDX-License-Identifier: Apache-2.0
"""Workflows <-> JSON, and what their specs reject."""

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


def with_columns(**columns: object) -> WorkflowSpec:
    """A workflow with a weight or metadata."""
    kinds = {"t": "integer", "user": "text", "tags": "text", "h": "hex32"}
    found = (
        SourceColumn(name=name, type=kind, separator="|" if name == "tags" else None)  # type: ignore[arg-type]
        for name, kind in kinds.items()
    )
    labels = (LabelSpec(name="y"),)
    return WorkflowSpec(name="w", source=source(*found), labels=labels, dense=("a",), **columns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: FillMissing(columns=()), ("FillMissing.columns",)),
        (lambda: FillMissing(columns=("a",)), ("FillMissing",)),
        (lambda: FillMissing(columns=("a",), value=1.0, median=True), ("FillMissing",)),
        (lambda: FillMissing(columns=("a",), value=""), ("FillMissing.value",)),
        (lambda: Clip(columns=("a",)), ("Clip",)),
        (lambda: Clip(columns=("a",), low=2.0, high=1.0), ("Clip.low",)),
        (lambda: Clip(columns=("a", "b"), low=0.0, outputs=("c",)), ("Clip.outputs",)),
        (lambda: LogOp(columns=("a",), shift=float("nan")), ("LogOp.shift",)),
        (lambda: Bucketize(columns=("a",)), ("Bucketize",)),
        (lambda: Bucketize(columns=("a",), boundaries=(2.0, 1.0)), ("Bucketize.boundaries",)),
        (lambda: Categorify(columns="abc"), ("Categorify.columns",)),
        (lambda: HashBucket(columns=("a",), buckets=0), ("HashBucket.buckets", "got 0")),
        (
            lambda: GivenIds(columns=("a", "b"), rows=(3,)),
            ("GivenIds.rows", "expected 2 numbers, one for each of columns"),
        ),
        (lambda: GivenIds(columns=("a", "b"), rows=(None, 0)), ("GivenIds.rows", "an integer >= 1 or None for each")),
        (lambda: Cross(columns=("a",), output="b"), ("Cross.columns",)),
        (lambda: TargetEncoding(columns=("a",), target="y", folds=1), ("TargetEncoding.folds",)),
        (lambda: JoinGroupby(columns=("a",), statistics=("mean",)), ("JoinGroupby.values",)),
        (lambda: JoinGroupby(columns=("a",), statistics=("modus",)), ("JoinGroupby.statistics",)),
        (lambda: History(columns=("a",), group="u", order="t", max_length=0), ("History.max_length",)),
        (lambda: JoinTable(table="t", on="k", columns=("k",)), ("JoinTable.columns",)),
        (lambda: ListSlice(columns=("a",), start=3, stop=3), ("ListSlice.stop",)),
        (lambda: Pad(columns=("a",), length=2, value=float("inf")), ("Pad.value",)),
        (lambda: Rename(names={}), ("Rename.names", "old names with their new names")),
        (lambda: Rename(names={"a": "c", "b": "c"}), ("Rename.names", "'c' occurs twice")),
        (lambda: LambdaOp(columns=("a",), outputs=("b",), function="f", output_type="text"), ("LambdaOp.function",)),
        (lambda: SplitText(columns=("a",), separator=",", outputs=("b",), types=()), ("SplitText.types",)),
        (lambda: KeepRows(column="a"), ("KeepRows",)),
        (lambda: SplitByFraction(valid=0.0), ("SplitByFraction",)),
        (lambda: SplitByTime(column="t"), ("SplitByTime",)),
        (lambda: SplitByTime(column="t", valid_from=2.0, test_from=1.0), ("SplitByTime.test_from",)),
        (lambda: SplitByTime(column="t", test_from=1.0, train_from=1.0), ("SplitByTime.train_from",)),
        (lambda: SplitByTime(column="t", test=0.1, train_from=1.0), ("SplitByTime.train_from",)),
        (lambda: SplitByFiles(valid=0), ("SplitByFiles",)),
        (lambda: SourceColumn(name="t", type="time", format="%x"), ("SourceColumn.format", "the directives %Y")),
        (lambda: SourceColumn(name="t", type="text", format="%Y"), ("SourceColumn.format", "type is 'text'")),
        (lambda: source(delimiter=""), ("SourceSpec.delimiter", "got ''")),
        (lambda: source(delimiter=':"'), ("SourceSpec.delimiter", "none of them a quote")),
        (lambda: source(encoding="cp1252"), ("SourceSpec.encoding", "one of 'utf-8', 'latin-1'")),
        (
            lambda: SourceSpec(format="parquet", columns=source().columns, encoding="latin-1"),
            ("SourceSpec.encoding", "the format is 'parquet'"),
        ),
        (lambda: HashBucket(columns=("a",), buckets=2, seed=-1), ("HashBucket.seed",)),
        (lambda: HashBucket(columns=("a",), buckets=2**63), ("HashBucket.buckets", "expected a 64-bit integer >= 1")),
        (lambda: SplitByHash(valid=0.1, seed=2**63), ("SplitByHash.seed",)),
        (lambda: source(SourceColumn(name="a", type="text", separator="\t")), ("SourceSpec.columns",)),
        (lambda: LabelSpec(name="y", positives=("a",), at_least=1.0), ("LabelSpec",)),
        (lambda: WorkflowSpec(name="w", source=source(), labels=(), dense=("a",)), ("WorkflowSpec.labels",)),
        (
            lambda: WorkflowSpec(name="w", source=source(), labels=(LabelSpec(name="a"),)),
            ("WorkflowSpec", "got no dense"),
        ),
        (
            lambda: WorkflowSpec(name="w", source=source(), labels=(LabelSpec(name="a"),), dense=("a",)),
            ("WorkflowSpec", "occurs twice"),
        ),
        (
            lambda: WorkflowSpec(
                name="w",
                source=source(),
                labels=(LabelSpec(name="y"),),
                dense=("a",),
                steps=(JoinTable(table="t", on="k", columns=("a",)),),
            ),
            ("WorkflowSpec.steps[0].table",),
        ),
        (lambda: with_columns(weight="a"), ("WorkflowSpec", "the name 'a' occurs twice")),
        # Finding Q: the data set refused them when all of its rows had been prepared.
        (lambda: with_columns(categorical=("a/b",)), ("WorkflowSpec.categorical", "got 'a/b'")),
        (lambda: with_columns(keys=("..",)), ("WorkflowSpec.keys", "got '..'")),
        (lambda: with_columns(weight="a\nb"), ("WorkflowSpec.weight", "got 'a\\nb'")),
        (lambda: with_columns(categorical=("\u540d" * 70,)), ("WorkflowSpec.categorical", "at most 200 bytes")),
        (lambda: with_columns(metadata=("t", "t")), ("WorkflowSpec.metadata", "the name 't' occurs twice")),
        (
            lambda: with_columns(metadata=("usr",)),
            ("WorkflowSpec.metadata", "got 'usr' (did you mean 'user'?)"),
        ),
        (lambda: with_columns(metadata=("tags",)), ("WorkflowSpec.metadata", "column 'tags' holds lists of text")),
        (lambda: with_columns(metadata=("h",)), ("WorkflowSpec.metadata", "column 'h' holds hex32")),
    ],
)
def test_a_wrong_field_is_named_with_what_is_accepted(make: object, place: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, check=at(*place)):
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
