"""When `Model.fit` displays, evaluates and saves, and how it numbers its iterations, by release."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Cadence:
    """How a release counts.

    Attributes:
        from_one: displays and evaluations are due when the iterations done are a multiple of the interval; before that
            release, when those done before the running one are, unless there are none.
        saves_from_one: the same for snapshots, but none after the first iteration alone.
        counts_end: in epochs, the call that finds no more data counts as an iteration, too.
    """

    from_one: bool
    saves_from_one: bool
    counts_end: bool

    def shows(self, index: int, interval: int) -> bool:
        """Whether a display or an evaluation is due after the iteration `index`, from 0."""
        return _is_due(index, interval, self.from_one)

    def number(self, index: int) -> int:
        """The iteration `index` as lines on the screen number it."""
        return index + self.from_one

    def saves(self, index: int, interval: int) -> bool:
        """Whether a snapshot is due after the iteration `index`, from 0."""
        return index != 0 and _is_due(index, interval, self.saves_from_one)

    def saved_number(self, index: int) -> int:
        """The iteration `index` as snapshots are named."""
        return index + self.saves_from_one


def release_number(release: str) -> tuple[int, int]:
    """`release`, such as "3.1" or "25.03", as what compares as releases follow each other."""
    major, minor = map(int, release.split("."))
    return major, minor


def cadence_of(release: str) -> Cadence:
    """The cadence of `release`."""
    number = release_number(release)
    return Cadence(from_one=number >= (23, 6), saves_from_one=number >= (23, 12), counts_end=number < (24, 0))


def _is_due(index: int, interval: int, from_one: bool) -> bool:
    if interval <= 0:
        return False
    return (index + 1) % interval == 0 if from_one else index != 0 and index % interval == 0
