# SPDX-License-Identifier: Apache-2.0
"""`MetricSamples`: values of metrics by name and labels, which those of other processes are added to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

Combination: TypeAlias = Literal["counter", "sum", "highest", "lowest"]
"""How values of several processes become one; that of a counter is a sum, too, and goes on where a process ends."""

Place: TypeAlias = tuple[str, tuple[str, ...]]
"""Name of a metric, and its labels."""


class MetricSamples:
    """Values of metrics by name and labels; several for one histogram."""

    def __init__(self) -> None:
        self._samples: dict[Place, tuple[Combination, tuple[float, ...]]] = {}

    def __iter__(self) -> Iterator[tuple[Place, tuple[float, ...]]]:
        yield from ((place, values) for place, (_, values) in self._samples.items())

    def of(self, name: str) -> Mapping[tuple[str, ...], tuple[float, ...]]:
        """Return the values of a metric by labels."""
        return {labels: values for (other, labels), values in self if other == name}

    def add(self, name: str, labels: Sequence[str], values: Sequence[float], how: Combination) -> None:
        """Add values to those that are there."""
        place, values = (name, tuple(labels)), tuple(values)
        if place in self._samples:
            pairs = zip(self._samples[place][1], values, strict=True)
            values = tuple(
                min(pair) if how == "lowest" else max(pair) if how == "highest" else sum(pair) for pair in pairs
            )
        self._samples[place] = how, values

    def merge(self, other: MetricSamples, *, only_counters: bool = False) -> None:
        """Add the values of another process, or its counters alone."""
        for (name, labels), (how, values) in other._samples.items():
            if how == "counter" or not only_counters:
                self.add(name, labels, values, how)

    def to_json(self) -> bytes:
        """Return the values for `of_json`."""
        return json.dumps([(*place, *sample) for place, sample in self._samples.items()]).encode()

    @classmethod
    def of_json(cls, text: bytes) -> MetricSamples:
        """Return the values that another process of this server has written with `to_json`."""
        samples = cls()
        for name, labels, how, values in json.loads(text or b"[]"):
            samples.add(name, labels, values, how)
        return samples
