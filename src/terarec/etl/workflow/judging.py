"""What can be refused of a row as soon as the row steps are done, before anything is learnt from it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from terarec.etl.ops import Operator
from terarec.etl.workflow.results import results_read
from terarec.spec import LabelSpec, WorkflowSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Judging:
    """What to look at right after the row steps.

    Attributes:
        reads: columns that stand there and that it takes.
        steps: to do for it, in order: none of them learns, or looks at other rows.
        labels: made by these steps, or by none.
        dense: columns of numbers that are, too.
        weight: the column of sample weights, if it is, too.
    """

    reads: frozenset[str]
    steps: tuple[int, ...]
    labels: tuple[LabelSpec, ...]
    dense: tuple[str, ...]
    weight: str | None


def judging(spec: WorkflowSpec, codes: Sequence[Operator], rows: int, columns: Collection[str]) -> Judging:
    """What of `spec` can be judged after its first `rows` steps, where `columns` stand.

    Args:
        spec: the workflow.
        codes: of its steps.
        rows: number of row steps.
        columns: names.
    """
    steps, known = _known_steps(codes, rows, columns)
    labels = tuple(label for label in spec.labels if label.source in known)
    dense = tuple(name for name in spec.dense if name in known - _may_be_dropped(codes))
    weight = spec.weight if spec.weight in known else None
    needed, wanted = {*dense, *(label.source for label in labels), *(() if weight is None else (weight,))}, []
    used = set(results_read(spec))  # a step that nothing uses is never done, and refuses nothing
    for step in reversed(range(rows, len(codes))):
        code, writes, reads = codes[step], set(codes[step].writes), set(codes[step].reads)
        is_used = code.stage != "stateless" or bool(used & writes)
        if is_used:
            used = (used - writes) | reads
        if step in steps and (needed & writes or (code.may_reject and is_used)):
            wanted.append(step)
            needed = (needed - writes) | reads
    return Judging(reads=frozenset(needed), steps=tuple(reversed(wanted)), labels=labels, dense=dense, weight=weight)


def _known_steps(codes: Sequence[Operator], rows: int, columns: Collection[str]) -> tuple[set[int], set[str]]:
    """The steps after the first `rows`, and the columns at the end, that need nothing learnt or grouped."""
    steps: set[int] = set()
    known = set(columns)
    for step, code in enumerate(codes[rows:], rows):
        if code.stage == "stateless" and known.issuperset(code.reads):
            steps.add(step)
            known = (known - set(code.removes)) | set(code.writes)
        else:
            known -= {*code.removes, *code.writes}
    return steps, known


def _may_be_dropped(codes: Sequence[Operator]) -> set[str]:
    return {name for code in codes for name in code.may_drop}
