"""Figures of rows that are taken while the rows are computed for something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame, Observation


class Counted:
    """Aggregates of a frame.

    Args:
        frame: the rows.
        figures: named aggregates.
    """

    def __init__(self, frame: DataFrame, figures: Sequence[Column]) -> None:
        self._frame = frame
        self._figures = list(figures)
        self._seen = Observation()

    def observed(self) -> DataFrame:
        """The frame; whoever computes it, once, takes the figures along."""
        return self._frame.observe(self._seen, *self._figures)

    def figures(self) -> Mapping[str, Any]:
        """Name -> figure; once the observed frame was computed."""
        return self._seen.get

    def again(self) -> Mapping[str, Any]:
        """The same from the frame, computed anew: Spark counts the rows of a task twice that it had to do twice."""
        (row,) = self._frame.agg(*self._figures).collect()
        found: dict[str, Any] = row.asDict()
        return found
