# SPDX-License-Identifier: Apache-2.0
"""The plan of a workflow: in which passes its steps are fitted and run. Phases are described in docs/workflows.md."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from terarec.errors import ConfigError
from terarec.etl.columns import ColumnType
from terarec.etl.ops import Operator
from terarec.etl.ops.base import ColumnTypes, operators, value_of
from terarec.etl.ops.user_steps import runs_functions
from terarec.etl.times import has_parts
from terarec.spec import LabelSpec, LeaveOneOut, SourceSpec, SplitByTime, SplitByUser, WorkflowSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One pass over the rows.

    Attributes:
        reads: Columns of the source that the pass needs.
        row_steps: Steps to run on a block as it comes from the source, before its rows are split.
        grouped: Grouped steps whose outputs the pass needs, made beforehand.
        steps: Steps to run after the split, in order; those of `grouped` are among them.
        observes: Steps whose statistics observe the rows right before them.
        metadata: Columns of the source that are passed on as they were read.
        is_split: Whether the rows are split, and those that the split leaves out are dropped.
    """

    reads: tuple[str, ...]
    row_steps: tuple[int, ...]
    grouped: tuple[int, ...]
    steps: tuple[int, ...]
    observes: tuple[int, ...] = ()
    metadata: tuple[str, ...] = ()
    is_split: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class RowValidation:
    """Values that are validated right after the row steps, before anything is fitted to the rows.

    Attributes:
        row_steps: Row steps that every pass runs, whether or not it needs their outputs: they may reject rows.
        reads: Columns there that it needs.
        steps: Steps to run for it, in order: none of them is fitted to rows, or needs other ones.
        labels: Labels made by these steps, or by none.
        dense: Dense columns that are, too.
        weight: Column of sample weights, if it is, too.
    """

    row_steps: tuple[int, ...] = ()
    reads: frozenset[str] = frozenset()
    steps: tuple[int, ...] = ()
    labels: tuple[LabelSpec, ...] = ()
    dense: tuple[str, ...] = ()
    weight: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The order of a workflow's work. Steps are named by their positions.

    Attributes:
        spec: The workflow.
        operators: Its steps.
        types: Columns before each step, and at the end those after the last.
        row_steps: The first steps, up to the last one that changes which rows exist or makes the column that splits
            them; they run before the rows are split.
        grouped_steps: Steps that need other rows.
        table_steps: Steps fitted on a side table, before all other fitting.
        fit_phases: Steps that are fitted in one pass over the training part, pass after pass.
        validation: Validation in every pass, before rows are split.
    """

    spec: WorkflowSpec
    operators: tuple[Operator, ...]
    types: tuple[ColumnTypes, ...]
    row_steps: tuple[int, ...]
    grouped_steps: tuple[int, ...]
    table_steps: tuple[int, ...]
    fit_phases: tuple[tuple[int, ...], ...]
    validation: RowValidation

    def times_with_parts(self, step: int) -> frozenset[str]:
        """Return the columns before a step that have `Rows.nanoseconds`."""
        names = {column.name for column in self.spec.source.columns if has_parts(column)}
        for operator in self.operators[:step]:
            renamed = {new for old, new in operator.renames.items() if old in names}
            names = names.difference(operator.writes, operator.removes) | renamed
        return frozenset(names)

    def row_pass(self) -> Pass:
        """Return the pass that counts and splits rows."""
        return replace(self._pass((), ()), is_split=False)

    def grouped_pass(self) -> Pass:
        """Return the pass that gathers the inputs of grouped steps: ``steps`` are those before the last of them."""
        last = self.grouped_steps[-1] if self.grouped_steps else 0
        reads = {name for step in self.grouped_steps for name in self.operators[step].reads}
        needed = self._pass(reads, (), stop=last)
        return replace(needed, grouped=(), is_split=False)

    def fit_pass(self, phase: int) -> Pass:
        """Return the pass that fits the steps ``fit_phases[phase]``."""
        return self._pass((), self.fit_phases[phase])

    def transform_pass(self) -> Pass:
        """Return the pass that makes the data set."""
        return self._pass(results_read(self.spec), (), metadata=self.spec.metadata)

    def _pass(
        self,
        results: Collection[str],
        observes: Sequence[int],
        stop: int | None = None,
        metadata: tuple[str, ...] = (),
    ) -> Pass:
        """Return the pass of the steps that `results`, after step `stop` - 1, and the observed steps depend on."""
        steps: list[int] = []

        def reads(step: int, outputs: set[str]) -> Iterable[str]:
            operator = self.operators[step]
            if outputs or operator.stage == "rows" or step in self.validation.row_steps:
                steps.append(step)
                return operator.reads
            return operator.reads if step in observes else ()

        rows = len(self.row_steps)
        needed = columns_needed(self.operators, results, reads, first=rows, stop=stop)
        # Rows are validated and split here, between the row steps and the others.
        needed |= _split_columns(self.spec).keys() | self.validation.reads
        needed = columns_needed(self.operators, needed, reads, stop=rows) | set(metadata)
        return Pass(
            reads=tuple(column.name for column in self.spec.source.columns if column.name in needed),
            row_steps=tuple(step for step in self.row_steps if step in steps),
            grouped=tuple(step for step in self.grouped_steps if step in steps),
            steps=tuple(step for step in sorted(steps) if step >= rows),
            observes=tuple(observes),
            metadata=metadata,
        )


def columns_needed(
    operators: Sequence[Operator],
    results: Iterable[str],
    reads: Callable[[int, set[str]], Iterable[str] | None],
    *,
    first: int = 0,
    stop: int | None = None,
) -> set[str]:
    """Walk back from the columns `results` and return the columns that they depend on before step `first`.

    Args:
        operators: Steps of a workflow.
        results: Columns after step `stop` - 1, by default after the last one.
        reads: Function of a step and of those of its outputs that are needed; it returns the columns that the step
            needs for them, or None to leave the step out, as if the columns had been there before.
        first: First step to walk to.
        stop: Step after the last one to walk from.
    """
    needed = set(results)
    for step in reversed(range(first, len(operators) if stop is None else stop)):
        outputs = needed.intersection(operators[step].writes)
        inputs = reads(step, outputs)
        if inputs is not None:
            needed = (needed - outputs) | set(inputs)
    return needed


def producer(
    operators: Sequence[Operator],
    column: str,
    source_of: Callable[[Operator, str], str | None],
    steps: Iterable[int] | None = None,
) -> tuple[int | None, str]:
    """Walk back from a column to the step that makes its values.

    Args:
        operators: Steps of a workflow.
        column: Column after the last step.
        source_of: Function that returns the input whose values an output still holds, or None if the step computes new
            values.
        steps: Steps to look at; None for all.

    Returns:
        The step, None where the source has the values, and the name of the column there.
    """
    within = range(len(operators)) if steps is None else frozenset(steps)
    candidates: list[tuple[int, str]] = []

    def reads(step: int, outputs: set[str]) -> Iterable[str] | None:
        if not outputs or step not in within:
            return None
        (name,) = outputs
        source = source_of(operators[step], name)
        if source is None:
            candidates.append((step, name))
            return ()
        return (source,)

    left = columns_needed(operators, (column,), reads)
    return candidates[0] if candidates else (None, left.pop())


def plan(spec: WorkflowSpec) -> Plan:
    """Check how the steps of `spec` fit together, and order them.

    Raises:
        ConfigError: A step reads a column that does not exist or has another type, or comes where it cannot; results
            of other types. The message names the step.
    """
    steps = operators(spec.steps)
    types: list[ColumnTypes] = [source_types(spec.source)]
    for position, operator in enumerate(steps):
        try:
            types.append(_types_after(spec, operator, types[-1]))
            _check_cardinalities(operator, types[-2], types[-1])
        except ConfigError as error:
            raise ConfigError(f"steps[{position}] {type(operator).__name__}", error.where, error.problem) from None
    exploding = [step for step, operator in enumerate(steps) if operator.explodes]
    if len(exploding) > 1:  # row ids have room for the items of one step
        first, second = (f"steps[{step}] {type(steps[step]).__name__}" for step in exploding[:2])
        raise ConfigError(second, f"makes several rows of one, as {first} does; expected one such step")
    _check_results(spec, types[-1])
    rows = _num_row_steps(spec, steps, types)
    _check_order(steps, rows)
    return Plan(
        spec=spec,
        operators=steps,
        types=tuple(types),
        row_steps=tuple(range(rows)),
        grouped_steps=tuple(step for step, operator in enumerate(steps) if operator.stage == "grouped"),
        table_steps=tuple(step for step, operator in enumerate(steps) if operator.side_table is not None),
        fit_phases=_fit_phases(steps),
        validation=_row_validation(spec, steps, rows, types[rows]),
    )


def results_read(spec: WorkflowSpec) -> tuple[str, ...]:
    """Return the distinct columns that labels, dense, categorical and key columns and weights are made from."""
    labels = (label.source for label in spec.labels)
    weight = () if spec.weight is None else (spec.weight,)
    return tuple(dict.fromkeys((*labels, *spec.dense, *spec.categorical, *spec.keys, *weight)))


def source_types(source: SourceSpec) -> ColumnTypes:
    """Return the types of the columns of a source."""
    return {
        column.name: ColumnType("integer" if column.type == "time" else column.type, column.separator is not None)
        for column in source.columns
    }


def side_types(spec: WorkflowSpec, operator: Operator, types: ColumnTypes) -> ColumnTypes:
    """Return the types of the columns that a step takes from its side table."""
    if operator.side_table is None:
        return {}
    side = source_types(spec.tables[operator.side_table])
    for name in operator.side_columns:
        if name not in side:
            there = ", ".join(map(repr, side))
            raise ConfigError(f"column {name!r}", f"does not exist in table {operator.side_table!r}; there are {there}")
    for name in operator.reads:
        if side[name].is_list or side[name].kind != types[name].kind:
            raise ConfigError(
                f"column {name!r}",
                f"holds {types[name]}, and {side[name]} in table {operator.side_table!r}; expected one "
                "kind, and one value a row of the table",
            )
    return {name: side[name] for name in operator.side_columns if name not in operator.reads}


def check_times(spec: WorkflowSpec) -> None:
    """Raise if a dense column is a time as the source has it, or where a step needs such a time and gets none.

    float32 holds seconds since 1970 to 128 s only, so a step has to rescale them first, which works on float64.
    """
    steps = operators(spec.steps)

    def time_of(operator: Operator, name: str) -> str | None:
        return operator.input_of(name) if operator.keeps_integers else operator.origin(name)

    times = {column.name for column in spec.source.columns if column.type == "time"}
    for position, operator in enumerate(steps):
        for name in operator.reads_times:
            step, source = producer(steps[:position], name, lambda before, column: before.origin(column))
            if step is not None or source not in times:
                raise ConfigError(
                    f"steps[{position}] {type(operator).__name__}",
                    f"column {name!r} is not a time as the source has it, which a unit needs; expected one, or no unit",
                )
    for name in spec.dense:
        step, source = producer(steps, name, time_of)
        if step is None and source in times:
            raise ConfigError(
                "dense",
                f"column {name!r} is a time in seconds since 1970, which float32 rounds to 128 s; expected a "
                "step that rescales it before, such as Normalize, NormalizeMinMax, DifferenceLag or Bucketize",
            )


def _types_after(spec: WorkflowSpec, operator: Operator, types: ColumnTypes) -> ColumnTypes:
    for name in operator.reads:
        if name not in types:
            raise ConfigError(f"column {name!r}", f"does not exist here; there are {', '.join(map(repr, types))}")
    outputs = operator.output_types({**types, **side_types(spec, operator, types)})
    kept = {name: column_type for name, column_type in types.items() if name not in operator.removes}
    return {**kept, **outputs}


def _check_cardinalities(operator: Operator, before: ColumnTypes, after: ColumnTypes) -> None:
    """Raise if the base class is to know the number of ids that a step makes of its own."""
    if type(operator).cardinalities is Operator.cardinalities:
        known = {output for name, output in operator.pairs if before[name].kind == "id"}
        for name in ids_of(operator, after):
            if name not in known:
                raise ConfigError(f"column {name!r}", NO_CARDINALITY)


def ids_of(operator: Operator, types: ColumnTypes) -> tuple[str, ...]:
    """Return the outputs of a step that are ids, given the types after it."""
    return tuple(name for name in operator.writes if types[name].kind == "id")


NO_CARDINALITY = "holds ids, expected a number of ids from `cardinalities` for each output that does"
"""What is wrong with an output of ids."""


def _check_results(spec: WorkflowSpec, types: ColumnTypes) -> None:
    """Raise unless the columns after the last step have the types that the results of the workflow need."""
    for label in spec.labels:
        accepted = ("text", "integer", "hex32") if label.positives else ("number", "integer")
        _check_result(types, f"label {label.name!r}", label.source, accepted)
        for value in label.positives:
            value_of(types[label.source].kind, value, f"label {label.name!r}")
    for name in spec.dense:
        _check_result(types, "dense", name, ("number", "integer"))
    for name in spec.categorical:
        _check_result(types, "categorical", name, ("id",), lists=True)
    for name in spec.keys:
        _check_result(types, "keys", name, ("integer",), lists=True)
    if spec.weight is not None:
        _check_result(types, "weight", spec.weight, ("number", "integer"))
    results = {*spec.dense, *spec.categorical, *spec.keys}
    for position, step in enumerate(operators(spec.steps)):
        written = {name for later in spec.steps[position + 1 :] for name in later.writes}
        for name in step.may_drop:
            if name not in results or name in written:
                raise ConfigError(
                    f"steps[{position}] {type(step).__name__}",
                    f"column {name!r} is not among dense, categorical and "
                    "keys, or a later step makes it; expected columns that are results unchanged",
                )


def _check_result(types: ColumnTypes, role: str, name: str, accepted: Sequence[str], *, lists: bool = False) -> None:
    column_type = types.get(name)
    if column_type is None:
        there = ", ".join(map(repr, types))
        raise ConfigError(role, f"column {name!r} does not exist after the last step; there are {there}")
    if column_type.kind not in accepted or (column_type.is_list and not lists):
        expected = " or ".join(accepted) + ("" if lists else ", one a row")
        raise ConfigError(role, f"column {name!r} holds {column_type}, expected {expected}")
    if column_type.is_list and column_type.max_length is None:
        raise ConfigError(role, f"column {name!r} holds lists of any length, expected ListSlice or Pad before")


_USERS, _TIMES = ("text", "integer", "hex32"), ("integer", "number")


def _split_columns(spec: WorkflowSpec) -> Mapping[str, tuple[str, ...]]:
    """Return the columns that split the rows, and the kinds that they may have."""
    split = spec.split
    if isinstance(split, LeaveOneOut):
        return {split.column: _USERS, split.order: _TIMES}
    if isinstance(split, SplitByUser | SplitByTime):
        return {split.column: _USERS if isinstance(split, SplitByUser) else _TIMES}
    return {}


def _num_row_steps(spec: WorkflowSpec, steps: Sequence[Operator], types: Sequence[ColumnTypes]) -> int:
    """Return how many of the first steps run before the rows are split."""
    # Rows are split once it is known which there are, so that shares are those of the samples.
    rows = max((step + 1 for step, operator in enumerate(steps) if operator.stage == "rows"), default=0)
    columns = _split_columns(spec)
    if isinstance(spec.split, LeaveOneOut) and any(step.samples for step in steps):
        raise ConfigError("split", "leave_one_out counts the rows of a user, expected no step that draws further ones")
    makes = [stop for stop in range(rows, len(types)) if columns.keys() <= types[stop].keys()]
    if not makes:
        name = next(name for name in columns if name not in types[-1])
        raise ConfigError("split", f"column {name!r} does not exist; there are {', '.join(map(repr, types[-1]))}")
    rows = makes[0]
    for name, accepted in columns.items():
        column_type = types[rows][name]
        if column_type.is_list or column_type.kind not in accepted:
            raise ConfigError(
                "split", f"column {name!r} holds {column_type}, expected one {' or '.join(accepted)} a row"
            )
    return rows


def _check_order(steps: Sequence[Operator], rows: int) -> None:
    """Raise if a step that is fitted or needs other rows comes where its inputs are not made yet."""
    from_grouped: dict[str, int] = {}  # column -> grouped step that its values depend on
    last_grouped = max((step for step, operator in enumerate(steps) if operator.stage == "grouped"), default=-1)
    for step, operator in enumerate(steps):
        name = f"steps[{step}] {type(operator).__name__}"
        is_fitted = operator.stage == "fitted" and operator.side_table is None
        if step < rows and (is_fitted or operator.stage == "grouped"):
            raise ConfigError(
                name,
                f"comes before steps[{rows - 1}], after which the rows are chosen and split; expected a fitted "
                "or grouped step after that",
            )
        if step < last_grouped and is_fitted:
            after = type(steps[last_grouped]).__name__
            raise ConfigError(
                name,
                f"is fitted, and comes before steps[{last_grouped}] {after}, which needs other rows; expected "
                "it after that",
            )
        inputs = [read for read in operator.reads if read in from_grouped]
        if inputs and operator.stage == "grouped":
            # All grouped steps run in one pass, on what can be computed of a row alone.
            before = from_grouped[inputs[0]]
            raise ConfigError(
                f"{name}, column {inputs[0]!r}",
                f"depends on steps[{before}] {type(steps[before]).__name__}, and both need other rows; expected a "
                "column that no such step makes",
            )
        own = {new: old for old, new in (*operator.renames.items(), *operator.pairs)}
        depends = {made: [own[made]] if made in own else operator.reads for made in operator.writes}
        before_step = dict(from_grouped)
        for made, names in depends.items():
            from_grouped.pop(made, None)
            if operator.stage == "grouped":
                from_grouped[made] = step
            elif from_rows := [before_step[name] for name in names if name in before_step]:
                from_grouped[made] = from_rows[0]


def _fit_phases(steps: Sequence[Operator]) -> tuple[tuple[int, ...], ...]:
    """Return the fitted steps by the number of passes that their inputs need first."""
    passes: dict[str, int] = {}
    phases: dict[int, list[int]] = {}
    for step, operator in enumerate(steps):
        # A step that reads what another one is fitted for waits for the next pass.
        before = max((passes.get(name, 0) for name in operator.reads), default=0)
        if operator.stage == "fitted" and operator.side_table is None:
            # Steps of one phase share a pass over the rows.
            phases.setdefault(before, []).append(step)
            before += 1
        passes.update(dict.fromkeys(operator.writes, before))
    return tuple(tuple(phases[phase]) for phase in sorted(phases))


def _row_validation(
    spec: WorkflowSpec, steps: Sequence[Operator], rows: int, columns: Collection[str]
) -> RowValidation:
    """Return the columns that can be validated after the first `rows` steps, among `columns`."""
    known, known_steps = set(columns), set[int]()  # what needs nothing fitted to rows or grouped
    for step, operator in enumerate(steps[rows:], rows):
        # Side tables were read before any rows.
        needs_row = operator.stage == "stateless" or (operator.stage == "fitted" and operator.side_table is not None)
        if needs_row and known.issuperset(operator.reads):
            known_steps.add(step)
            known = (known - set(operator.removes)) | set(operator.writes)
        else:
            known -= {*operator.removes, *operator.writes}
    may_drop = {name for operator in steps for name in operator.may_drop}
    labels = tuple(label for label in spec.labels if label.source in known)
    dense = tuple(name for name in spec.dense if name in known - may_drop)
    weight = spec.weight if spec.weight in known else None
    # Two walks: the first finds the steps that run at all, the second those of them that validation needs.
    used: set[int] = set()
    chosen: list[int] = []

    def reads_of_used(step: int, outputs: set[str]) -> Iterable[str] | None:
        if not outputs and steps[step].stage == "stateless":
            return None  # a step that nothing uses never runs, and rejects nothing
        used.add(step)
        return steps[step].reads

    def rejects(step: int) -> bool:
        return step in used and (steps[step].may_reject or runs_functions(steps[step]))

    def reads_of_chosen(step: int, outputs: set[str]) -> Iterable[str] | None:
        if step not in known_steps or not (outputs or rejects(step)):
            return None
        chosen.append(step)
        return steps[step].reads

    needed = columns_needed(steps, results_read(spec), reads_of_used, first=rows)
    columns_needed(steps, needed | _split_columns(spec).keys(), reads_of_used, stop=rows)
    results = {*dense, *(label.source for label in labels), *(() if weight is None else (weight,))}
    reads = columns_needed(steps, results, reads_of_chosen, first=rows)
    return RowValidation(
        row_steps=tuple(filter(rejects, range(rows))),
        reads=frozenset(reads),
        steps=tuple(reversed(chosen)),
        labels=labels,
        dense=dense,
        weight=weight,
    )
