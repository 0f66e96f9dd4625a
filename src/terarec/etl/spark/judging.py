"""Rows with values that are refused, left out before anything is learnt, as `terarec.etl.engine.passes` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from terarec.etl.source import FAULTS_SHOWN
from terarec.etl.spark.bad_input import PlacedFault
from terarec.etl.spark.counted import Counted
from terarec.etl.spark.expressions import FILE, LINE, ROW, column
from terarec.etl.spark.steps.refusals import (
    Refusal,
    dense_refusal,
    first_refusal,
    label_refusals,
    step_refusals,
    weight_refusal,
)
from terarec.etl.spark.steps.step import Step
from terarec.etl.workflow.plan import Plan
from terarec.spec import SourceSpec

_REFUSED, _KEPT = "__terarec_refused", "__terarec_kept"


class RefusedRows:
    """Rows of which something is refused.

    Args:
        frame: rows with their places.
        refusals: what is, in order; of a row the first one counts.
        paths: of the files.
        source: how they are read.
    """

    def __init__(self, frame: DataFrame, refusals: Sequence[Refusal], paths: Sequence[str], source: SourceSpec) -> None:
        self._frame = frame
        self._refusals = refusals
        self._paths = paths
        self._place = "row" if source.format == "parquet" else "line"
        numbers: dict[str, list[int]] = {}
        for number, refusal in enumerate(refusals):
            numbers.setdefault(refusal.kind, []).append(number)
        found = F.col(_REFUSED)["number"]
        figures = [F.count_if(found.isin(*those)).alias(kind) for kind, those in numbers.items()]
        self._counted = Counted(frame, figures)
        self.are_counted_twice = False

    def others(self) -> DataFrame:
        """The other rows; these are counted when they are computed."""
        return self._counted.observed().where(F.col(_REFUSED).isNull()).drop(_REFUSED)

    def counts(self) -> Mapping[str, int]:
        """Kind -> how many rows."""
        found = self._counted.again() if self.are_counted_twice else self._counted.figures()
        return {kind: count for kind, count in found.items() if count}

    def first(self) -> Sequence[PlacedFault]:
        """The first ones."""
        if not self.counts():
            return []
        bad = self._frame.where(F.col(_REFUSED).isNotNull()).select(FILE, LINE, ROW, _REFUSED)
        return list(map(self._placed, bad.orderBy(FILE, LINE, ROW).limit(FAULTS_SHOWN).collect()))

    def _placed(self, row: Row) -> PlacedFault:
        number, got = row[_REFUSED]
        refusal = self._refusals[number]
        where = f"{self._paths[row[FILE]]}: {self._place} {row[LINE]}, column {refusal.column!r}"
        return PlacedFault(
            row[FILE], row[LINE], row[ROW], f"{where}: got {refusal.shown(got)}, expected {refusal.expected}"
        )


class Judge:
    """Leaves rows out of frames, and knows which.

    Args:
        plan: of the workflow.
        paths: of the files.
        step_at: a step by its position.
        run_step: does a step.

    Attributes:
        refused: what was left out, in the order in which it was found.
    """

    def __init__(
        self,
        plan: Plan,
        paths: Sequence[str],
        step_at: Callable[[int], Step],
        run_step: Callable[[DataFrame, Step], DataFrame],
    ) -> None:
        self.refused: list[RefusedRows] = []
        self._plan = plan
        self._paths = paths
        self._step_at = step_at
        self._run_step = run_step

    def enter(self, frame: DataFrame) -> DataFrame:
        """The rows that the row steps keep and of which nothing is refused, as they stand after these steps."""
        used = self._plan.transform_pass().row_steps
        for index in self._plan.row_steps:
            step = self._step_at(index)
            refusals = step_refusals(step) if index in used else []
            if refusals:
                frame = self._left_out(frame.withColumn(_REFUSED, first_refusal(refusals)), refusals)
            frame = self._run_step(frame, step)
        return self._judged(frame)

    def _judged(self, frame: DataFrame) -> DataFrame:
        plan = self._plan
        kept = {f"{_KEPT}{place}": name for place, name in enumerate(frame.columns) if name not in (ROW, FILE, LINE)}
        refusals: list[Refusal] = []
        marked = frame.withColumns({stored: column(name) for stored, name in kept.items()})
        marked = marked.withColumn(_REFUSED, first_refusal([]))
        for index in plan.validation.steps:
            step = self._step_at(index)
            marked = _also(marked, refusals, step_refusals(step))
            marked = self._run_step(marked, step)
        of_results = [refusal for label in plan.validation.labels for refusal in label_refusals(label, plan)]
        of_results += [dense_refusal(name, plan.types[-1][name].kind) for name in plan.validation.dense]
        weight = plan.validation.weight
        of_results += [] if weight is None else [weight_refusal(weight, plan.types[-1][weight].kind)]
        marked = _also(marked, refusals, of_results)
        if not refusals:
            return frame
        back = [F.col(stored).alias(name) for stored, name in kept.items()]
        return self._left_out(marked.select(ROW, FILE, LINE, *back, _REFUSED), refusals)

    def _left_out(self, marked: DataFrame, refusals: Sequence[Refusal]) -> DataFrame:
        found = RefusedRows(marked, refusals, self._paths, self._plan.spec.source)
        self.refused.append(found)
        return found.others()


def _also(marked: DataFrame, known: list[Refusal], more: Sequence[Refusal]) -> DataFrame:
    """`marked` with those rows marked, too, of which something of `more` is refused, which join the `known` ones."""
    if not more:
        return marked
    first = first_refusal(more, len(known))
    known += more
    return marked.withColumn(_REFUSED, F.coalesce(_REFUSED, first))
