"""Any CSV or TSV: descriptions of its columns, and the workflow for it. See docs/your-own-data.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from terarec.etl.ops import Bucketize, Categorify, FillMissing, LogOp, Normalize, Operator
from terarec.spec import LabelSpec, SourceColumn, SourceSpec, Split, WorkflowSpec, checks
from terarec.spec.workflow import SourceType


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvOptions:
    """Content of the columns of a table. Columns that are not named are left out.

    Attributes:
        label: Column of the target.
        positives: Label's values that mean 1, all others meaning 0; empty if the column holds numbers from 0 to 1.
        dense: Columns of numbers, standardized to mean 0 and deviation 1 of the training part; missing is the mean.
        log: Columns of numbers that count something: ln(x + shift), for long tails; missing is 0.
        categorical: Columns of texts that become ids.
        ids: Columns of integers, such as user ids, that become ids. Of a column x that is a number as well (in `dense`
            or `log`) the ids are in the column ``x_id``.
        buckets: Columns of numbers -> most intervals, of about equal counts; the interval of column x becomes
            an id in the column ``x_bucket``. x may be a number or an integer of the lists above as well.
        keys: Columns of integers that stay as they are, any int64: keys of dynamic tables.
        weight: Column of numbers >= 0, how much each row counts; None: all alike.
        metadata: Columns that the data set holds as they are, for reports and scores, such as user ids. They may be
            among the other lists as well; one that is in no other list is read as text.
        min_count: Values of categories that occur less often in the training part share one id.
        split: Rows for validation and test; None for none.
        delimiter: Text between the fields; white space around a field is dropped, and it may be quoted.
        names: Names of all columns, in order, for files without a header line; empty to take the first line's.
        missing: Fields that stand for a missing value, beside empty ones.
        name: Name of the data set.
    """

    label: str
    positives: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    buckets: Mapping[str, int] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    weight: str | None = None
    metadata: tuple[str, ...] = ()
    min_count: int = 1
    split: Split | None = None
    delimiter: str = ","
    names: tuple[str, ...] = ()
    missing: tuple[str, ...] = ("", "?")
    name: str = "csv"

    def __post_init__(self) -> None:
        checks.name(self)
        checks.positive_int(self, "min_count")
        for column in self.categorical:
            if column in self.integers or column in self.numbers:
                checks.reject(
                    self, "categorical", f"column {column!r} is also read as a number, expected it in ids (--ids)"
                )
        if not (self.categorical or self.integers or self.numbers):
            checks.reject(
                self,
                "",
                "got no column to learn from, expected dense, log, categorical, ids, buckets or keys "
                "(--dense, --log, --categorical, --ids, --buckets or --keys)",
            )
        if self.weight in (self.label, *self.categorical, *self.integers, *self.numbers):
            checks.reject(self, "weight", f"column {self.weight!r} is in another list as well, expected one of its own")
        for column, count in self.buckets.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 2:
                checks.reject(self, "buckets", f"got {count!r} for {column!r}, expected an integer >= 2")
        for column in self.columns if self.names else ():
            if column not in self.names:
                checks.reject(self, "names", f"got no column {column!r}, expected it among {', '.join(self.names)}")

    @property
    def numbers(self) -> tuple[str, ...]:
        """Columns that are read as numbers."""
        return (*self.dense, *self.log, *self.buckets)

    @property
    def integers(self) -> tuple[str, ...]:
        """Columns that are read as integers."""
        return (*self.ids, *self.keys)

    @property
    def columns(self) -> tuple[str, ...]:
        """The distinct columns to read from the files."""
        named = (self.label, *self.dense, *self.log, *self.categorical, *self.ids, *self.buckets, *self.keys)
        weight = () if self.weight is None else (self.weight,)
        return tuple(dict.fromkeys((*named, *weight, *self.metadata)))

    def id_name(self, column: str) -> str:
        """Return the column that holds the ids of the integers of `column`."""
        return f"{column}_id" if column in self.dense or column in self.log else column


def csv_workflow(options: CsvOptions) -> WorkflowSpec:
    """Return the workflow for a table.

    Raises:
        ConfigError: Two columns of the data set would have one name, or a delimiter that is none.
    """
    return WorkflowSpec(
        name=options.name,
        source=SourceSpec(
            format="delimited",
            delimiter=options.delimiter,
            header=not options.names,
            quote=True,
            trim=True,
            missing=options.missing,
            columns=tuple(
                SourceColumn(name=name, type=_type(options, name)) for name in options.names or options.columns
            ),
        ),
        steps=_steps(options),
        split=options.split,
        labels=(LabelSpec(name=options.label, positives=options.positives, is_probability=not options.positives),),
        dense=(*options.dense, *options.log),
        categorical=(
            *options.categorical,
            *(options.id_name(column) for column in options.ids),
            *(f"{column}_bucket" for column in options.buckets),
        ),
        keys=options.keys,
        weight=options.weight,
        metadata=options.metadata,
    )


def _type(options: CsvOptions, column: str) -> SourceType:
    if column in options.integers:
        return "integer"
    is_number = column in (*options.numbers, options.weight) or (column == options.label and not options.positives)
    return "number" if is_number else "text"


def _steps(options: CsvOptions) -> tuple[Operator, ...]:
    """Return the steps: those that make further columns before those that replace columns."""
    steps: list[Operator] = []
    for count in sorted(set(options.buckets.values())):
        cut = tuple(column for column, intervals in options.buckets.items() if intervals == count)
        steps.append(Bucketize(columns=cut, outputs=tuple(f"{column}_bucket" for column in cut), intervals=count))
    beside = tuple(column for column in options.ids if options.id_name(column) != column)
    if beside:
        names = tuple(map(options.id_name, beside))
        steps.append(Categorify(columns=beside, outputs=names, min_count=options.min_count))
    replaced = (*options.categorical, *(column for column in options.ids if column not in beside))
    if replaced:
        steps.append(Categorify(columns=replaced, min_count=options.min_count))
    if options.log:
        steps += [FillMissing(columns=options.log, value=0.0), LogOp(columns=options.log, shift=None)]
    if options.dense:
        steps += [Normalize(columns=options.dense), FillMissing(columns=options.dense, value=0.0)]
    return tuple(steps)
