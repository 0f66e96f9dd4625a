"""Operations on plain values: each takes some slots of one list and adds what it makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from terarec.etl.ops.record_values import as_numbers


class Operation(NamedTuple):
    """Takes the slots that `fetch` gives and adds what `call` makes of them."""

    fetch: Callable[[list[Any]], Any]
    call: Callable[..., Any]


class NumberPlace(NamedTuple):
    """Where numbers are: a row of the matrix in a slot, or all of the slot, float64[n].

    Attributes:
        slot: see above.
        row: see above.
        rows: how many the matrix has, where that is known.
    """

    slot: int
    row: int | None = None
    rows: int | None = None


class Operations:
    """Operations in the order in which they were first asked for, each of them once.

    Args:
        num_inputs: slots that are filled before the first one.
    """

    def __init__(self, num_inputs: int) -> None:
        self._num_slots = num_inputs
        self._added: list[tuple[Sequence[int], Callable[..., Any]]] = []
        self._slots: dict[Any, int] = {}

    def ordered(self) -> list[Operation]:
        """All of them; a list of slots that grew after its operation was asked for is taken as it is now."""
        return [Operation(fetching(reads), call) for reads, call in self._added]

    def once(self, key: Any, reads: Sequence[int], call: Callable[..., Sequence[Any]], outputs: int = 1) -> int:
        """The slot of the first output of an operation, which is added unless that of this `key` is there already."""
        if key not in self._slots:
            self._slots[key] = self._num_slots
            self._added.append((reads, call))
            self._num_slots += outputs
        return self._slots[key]

    def numbers(self, slot: int) -> NumberPlace:
        """The numbers or integers of a slot as numbers."""
        return NumberPlace(self.once(("numbers", slot), [slot], alone(as_numbers)))

    def row(self, place: NumberPlace) -> int:
        """The slot of one row of a matrix."""
        return self.once(place, [place.slot], lambda matrix: (matrix[place.row],))

    def matrix(self, places: Sequence[NumberPlace]) -> int:
        """The slot of a matrix float64[c, n] of the numbers at c places."""
        slots = {place.slot for place in places}
        rows = [place.row for place in places]
        first = rows[0]
        if len(slots) > 1 or first is None or rows != list(range(first, first + len(rows))):
            return self.once(tuple(places), [place.slot for place in places], _gathering(rows))
        if len(rows) == places[0].rows:
            return places[0].slot
        return self.once(tuple(places), [*slots], lambda matrix: (matrix[first : first + len(rows)],))


def fetching(slots: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """What gives the contents of some slots of the list of all."""
    if len(slots) > 1:
        return itemgetter(*slots)
    first = slots[0] if slots else 0
    return itemgetter(slice(first, first + len(slots)))  # one slot is a sequence, too


def alone(call: Callable[[Any], Any]) -> Callable[..., Sequence[Any]]:
    """`call`, its result as that of an operation with one output."""
    return lambda value: (call(value),)


def _gathering(rows: Sequence[int | None]) -> Callable[..., Sequence[Any]]:
    """What makes a matrix of one row of each of several, or of all of one where the row is None."""
    if rows == [None]:
        return lambda numbers: (numbers[None],)

    def gather(*matrices: NDArray[np.float64]) -> Sequence[Any]:
        gathered = np.empty((len(rows), matrices[0].shape[-1]))
        for place, (matrix, row) in enumerate(zip(matrices, rows, strict=True)):
            gathered[place] = matrix if row is None else matrix[row]
        return (gathered,)

    return gather
