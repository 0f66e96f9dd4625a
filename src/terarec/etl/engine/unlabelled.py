"""What of a workflow is done to rows that are only to be scored, and which raw columns that takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from terarec.etl.ops import Operator
from terarec.etl.source import find_files
from terarec.etl.source.delimited import split_header
from terarec.etl.source.text import read_text
from terarec.etl.workflow import Pass, Plan
from terarec.etl.workflow.judging import Judging
from terarec.spec import FieldError, SourceColumn, SourceSpec

_FIRST_BYTES = 1 << 16
"""Read of a file to see how many fields its lines have."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScoringPlan:
    """What rows go through that are only to be scored.

    Attributes:
        plan: of the workflow, without anything about labels and splits.
        work: the pass that makes what a model takes.
        explodes: whether a step cuts lists into rows.
    """

    plan: Plan
    work: Pass
    explodes: bool


def scoring_plan(plan: Plan, results: Sequence[str]) -> ScoringPlan:
    """What leads to the columns `results` of rows that no model learns from.

    Fitted steps do to rows what they do to records that are served, so nothing that they read in training alone is
    needed. Grouped steps look at the other rows that are scored.

    Args:
        plan: of a fitted workflow.
        results: columns after the last step.
    """
    needed = set(results)
    codes: list[Operator] = list(plan.codes)
    steps: list[int] = []
    grouped: list[int] = []
    for step in reversed(range(len(plan.codes))):
        code = plan.codes[step]
        made = needed & set(code.writes)
        if code.filters and not grouped:
            continue
        if code.stage != "rows" and not made:
            continue
        codes[step] = code.restricted_to(needed)
        needed -= set(codes[step].writes)
        needed |= set(codes[step].reads if code.stage in ("grouped", "rows") else codes[step].serving_reads)
        steps.append(step)
        grouped += [step] if code.stage == "grouped" else []
    rows = len(plan.row_steps)
    nothing = Judging(reads=frozenset(), steps=(), labels=(), dense=(), weight=None)
    unlabelled = dataclasses.replace(
        plan,
        spec=dataclasses.replace(plan.spec, split=None),
        codes=tuple(codes),
        grouped_steps=tuple(reversed(grouped)),
        judging=nothing,
    )
    work = Pass(
        reads=tuple(column.name for column in plan.spec.source.columns if column.name in needed),
        row_steps=tuple(step for step in reversed(steps) if step < rows),
        grouped=unlabelled.grouped_steps,
        steps=tuple(step for step in reversed(steps) if step >= rows),
    )
    explodes = any(plan.codes[step].explodes for step in steps)
    return ScoringPlan(plan=unlabelled, work=work, explodes=explodes)


def scoring_source(wanted: ScoringPlan, plan: Plan, paths: Sequence[str | Path], keep: Sequence[str]) -> SourceSpec:
    """How files are read of which only some columns matter.

    Args:
        wanted: what is done to the rows.
        plan: of the whole workflow.
        paths: the files.
        keep: columns to read besides.

    Raises:
        ConfigError: a column of `keep` that the source cannot give.
        DataNotFoundError, FormatError: as `terarec.etl.source.open_source`.
    """
    source = plan.spec.source
    has_names = source.format != "delimited" or source.header
    typed = {column.name: column for column in source.columns}
    for name in keep:
        if name not in typed and not (source.format == "delimited" and source.header):
            raise FieldError("", "keep", f"got {name!r}, expected columns of the workflow's source: {', '.join(typed)}")
    if has_names:
        names = dict.fromkeys((*wanted.work.reads, *keep))
        columns = [_read_as(typed.get(name), name, name in wanted.work.reads, source) for name in names]
        return dataclasses.replace(source, columns=tuple(columns))
    there = [column for column in source.columns if column.name not in _absent(wanted, plan, paths, keep)]
    columns = [_read_as(column, column.name, column.name in wanted.work.reads, source) for column in there]
    return dataclasses.replace(source, columns=tuple(columns))


def _read_as(column: SourceColumn | None, name: str, is_needed: bool, source: SourceSpec) -> SourceColumn:
    """A column of delimited text that no step reads may hold anything."""
    if column is None or (source.format == "delimited" and not is_needed):
        return SourceColumn(name=name, type="text")
    return column


def _absent(wanted: ScoringPlan, plan: Plan, paths: Sequence[str | Path], keep: Sequence[str]) -> frozenset[str]:
    """The columns of the labels, or these and those of the weight and metadata, that the files lack.

    Lines of files without a header do not name their fields: the number of fields in the first one tells.
    """
    source = plan.spec.source
    needed = {*wanted.work.reads, *keep}
    with_labels = scoring_plan(plan, [label.source for label in plan.spec.labels]).work.reads
    labels = frozenset(with_labels) - needed
    weight = () if plan.spec.weight is None else scoring_plan(plan, [plan.spec.weight]).work.reads
    unread = labels | (frozenset((*weight, *plan.spec.metadata)) - needed)
    file = find_files(paths)[0]
    text = next(read_text(file, _FIRST_BYTES)).text
    if source.encoding != "utf-8":
        text = text.decode(source.encoding).encode()
    line = next((line for line in text.split(b"\n") if line.removesuffix(b"\r")), b"")
    fields = len(split_header(file.path, line.removesuffix(b"\r"), source)) if line else 0
    return next((names for names in (labels, unread) if fields == len(source.columns) - len(names)), frozenset())
