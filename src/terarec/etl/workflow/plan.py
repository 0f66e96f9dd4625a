"""In which passes the steps of a workflow are fitted and done. Phases are described in docs/workflows.md."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from terarec.errors import ConfigError
from terarec.etl.columns import ColumnType
from terarec.etl.ops import ColumnTypes, Operator
from terarec.etl.ops.base import operators
from terarec.etl.workflow.judging import Judging, judging
from terarec.etl.workflow.results import check_results, results_read
from terarec.spec import SourceSpec, SplitByTime, SplitByUser, WorkflowSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One reading of the rows.

    Attributes:
        reads: columns of the source that the pass needs.
        row_steps: steps to do to a block as it comes from the source, before its rows are split.
        grouped: grouped steps whose outputs the pass needs, made beforehand.
        steps: steps to do after the split, in order; those of `grouped` are among them.
        observes: steps whose statistics look at the block that stands right before each of them.
        metadata: columns of the source that are handed on as they were read.
    """

    reads: tuple[str, ...]
    row_steps: tuple[int, ...]
    grouped: tuple[int, ...]
    steps: tuple[int, ...]
    observes: tuple[int, ...] = ()
    metadata: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The order of a workflow's work. Steps are named by their positions.

    Attributes:
        spec: the workflow.
        codes: of the steps.
        types: the columns before each step, and at the end those after the last.
        row_steps: the first steps, up to the last one that changes which rows there are or makes the column that
            splits them; done before the rows are split.
        grouped_steps: those that look at other rows.
        table_steps: those fitted on a side table, before all other fitting.
        fit_phases: the steps that are fitted in one pass over the training part, pass after pass.
        judging: what every pass looks at before rows are split.
    """

    spec: WorkflowSpec
    codes: tuple[Operator, ...]
    types: tuple[ColumnTypes, ...]
    row_steps: tuple[int, ...]
    grouped_steps: tuple[int, ...]
    table_steps: tuple[int, ...]
    fit_phases: tuple[tuple[int, ...], ...]
    judging: Judging

    def row_pass(self) -> Pass:
        """The pass that counts and splits rows."""
        return self._pass((), ())

    def grouped_pass(self) -> Pass:
        """The pass that gathers what the grouped steps read: ``steps`` are those before the last of them."""
        last = self.grouped_steps[-1] if self.grouped_steps else 0
        reads = {name for step in self.grouped_steps for name in self.codes[step].reads}
        wanted = self._pass(sorted(reads), (), stop=last)
        return Pass(reads=wanted.reads, row_steps=wanted.row_steps, grouped=(), steps=wanted.steps)

    def fit_pass(self, phase: int) -> Pass:
        """The pass that fits the steps ``fit_phases[phase]``."""
        return self._pass((), self.fit_phases[phase])

    def transform_pass(self) -> Pass:
        """The pass that makes the data set."""
        return self._pass(results_read(self.spec), (), metadata=self.spec.metadata)

    def _pass(
        self,
        results: Collection[str],
        observes: Sequence[int],
        stop: int | None = None,
        metadata: tuple[str, ...] = (),
    ) -> Pass:
        """Walks back from `results`, after step `stop` - 1, and keeps the steps that they depend on."""
        needed = set(results)
        steps: list[int] = []
        rows = len(self.row_steps)
        for step in reversed(range(len(self.codes) if stop is None else stop)):
            if step == rows - 1:
                needed |= _split_columns(self.spec) | self.judging.reads
            code = self.codes[step]
            if needed & set(code.writes) or code.stage == "rows":
                steps.append(step)
                needed = (needed - set(code.writes)) | set(code.reads)
            if step in observes:
                needed |= set(code.reads)
        if not rows:
            needed |= _split_columns(self.spec) | self.judging.reads
        needed |= set(metadata)
        grouped = tuple(step for step in self.grouped_steps if step in steps)
        return Pass(
            reads=tuple(column.name for column in self.spec.source.columns if column.name in needed),
            row_steps=tuple(step for step in self.row_steps if step in steps),
            grouped=grouped,
            steps=tuple(step for step in reversed(steps) if step >= rows),
            observes=tuple(observes),
            metadata=metadata,
        )


def plan(spec: WorkflowSpec) -> Plan:
    """Check how the steps of `spec` fit together, and order them.

    Raises:
        ConfigError: a step reads a column that is not there or of another type, or stands where it cannot; results
            of other types. The message names the step.
    """
    codes: list[Operator] = []
    types: list[ColumnTypes] = [source_types(spec.source)]
    for position, code in enumerate(operators(spec.steps)):
        try:
            types.append(_types_after(spec, code, types[-1]))
        except ConfigError as error:
            raise ConfigError(f"steps[{position}] {type(code).__name__}: {error}") from None
        codes.append(code)
    check_results(spec, types[-1])
    rows = _num_row_steps(spec, codes, types)
    _check_order(spec, codes, rows)
    return Plan(
        spec=spec,
        codes=tuple(codes),
        types=tuple(types),
        row_steps=tuple(range(rows)),
        grouped_steps=tuple(step for step, code in enumerate(codes) if code.stage == "grouped"),
        table_steps=tuple(step for step, code in enumerate(codes) if code.side_table is not None),
        fit_phases=_fit_phases(codes),
        judging=judging(spec, codes, rows, types[rows]),
    )


def source_types(source: SourceSpec) -> ColumnTypes:
    """The types of the columns that a source gives."""
    return {
        column.name: ColumnType("integer" if column.type == "time" else column.type, column.separator is not None)
        for column in source.columns
    }


def _types_after(spec: WorkflowSpec, code: Operator, types: ColumnTypes) -> ColumnTypes:
    for name in code.reads:
        if name not in types:
            raise ConfigError(f"column {name!r} does not exist here; there are {', '.join(map(repr, types))}")
    made = code.output_types({**types, **side_types(spec, code, types)})
    kept = {name: found for name, found in types.items() if name not in code.removes}
    return {**kept, **made}


def side_types(spec: WorkflowSpec, code: Operator, types: ColumnTypes) -> ColumnTypes:
    """Types of what a step takes of its side table."""
    if code.side_table is None:
        return {}
    side = source_types(spec.tables[code.side_table])
    for name in code.side_columns:
        if name not in side:
            there = ", ".join(map(repr, side))
            raise ConfigError(f"column {name!r} does not exist in table {code.side_table!r}; there are {there}")
    for name in code.reads:
        if side[name].is_list or side[name].kind != types[name].kind:
            raise ConfigError(
                f"column {name!r} holds {types[name]}, and {side[name]} in table {code.side_table!r}; expected one "
                "kind, and one value a row of the table"
            )
    return {name: side[name] for name in code.side_columns if name not in code.reads}


def _split_columns(spec: WorkflowSpec) -> set[str]:
    return {spec.split.column} if isinstance(spec.split, SplitByUser | SplitByTime) else set()


def _num_row_steps(spec: WorkflowSpec, codes: Sequence[Operator], types: Sequence[ColumnTypes]) -> int:
    """How many of the first steps are done before the rows are split."""
    rows = max((step + 1 for step, code in enumerate(codes) if code.stage == "rows"), default=0)
    for name in _split_columns(spec):
        makes = [stop for stop in range(rows, len(types)) if name in types[stop]]
        if not makes:
            raise ConfigError(f"split: column {name!r} does not exist; there are {', '.join(map(repr, types[-1]))}")
        rows = makes[0]
        found = types[rows][name]
        accepted = ("text", "integer", "hex32") if isinstance(spec.split, SplitByUser) else ("integer", "number")
        if found.is_list or found.kind not in accepted:
            raise ConfigError(f"split: column {name!r} holds {found}, expected one {' or '.join(accepted)} a row")
    return rows


def _check_order(spec: WorkflowSpec, codes: Sequence[Operator], rows: int) -> None:
    """Raise if a step that learns or looks at other rows stands before the rows are what they will be."""
    exploding = [step for step, code in enumerate(codes) if code.explodes]
    if len(exploding) > 1:  # row ids have room for the items of one step
        first, second = (f"steps[{step}] {type(codes[step]).__name__}" for step in exploding[:2])
        raise ConfigError(f"{second}: makes several rows of one, as {first} does; expected one such step")
    last_grouped = max((step for step, code in enumerate(codes) if code.stage == "grouped"), default=-1)
    for step, code in enumerate(codes):
        kind = type(spec.steps[step]).__name__
        learns = code.stage == "fitted" and code.side_table is None
        if step < rows and (learns or code.stage == "grouped"):
            raise ConfigError(
                f"steps[{step}] {kind}: stands before steps[{rows - 1}], after which the rows are chosen and split; "
                "expected it after that"
            )
        if step < last_grouped and learns:
            after = type(spec.steps[last_grouped]).__name__
            raise ConfigError(
                f"steps[{step}] {kind}: learns, and stands before steps[{last_grouped}] {after}, which looks at other "
                "rows; expected it after that"
            )


def _fit_phases(codes: Sequence[Operator]) -> tuple[tuple[int, ...], ...]:
    """Steps by the number of passes that their inputs need first."""
    passes: dict[str, int] = {}
    phases: dict[int, list[int]] = {}
    for step, code in enumerate(codes):
        before = max((passes.get(name, 0) for name in code.reads), default=0)
        if code.stage == "fitted" and code.side_table is None:
            phases.setdefault(before, []).append(step)
            before += 1
        passes.update(dict.fromkeys(code.writes, before))
    return tuple(tuple(phases[phase]) for phase in sorted(phases))
