# SPDX-License-Identifier: Apache-2.0
"""`DriftCounts`: what a process has counted of its records and of the training data, which those of others add to."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class InputCounts:
    """Counts of one column that a model reads. Of each pair the first is of the training data, the second of now.

    Attributes:
        name: Name of the column.
        values: Values.
        missing: Values that are missing.
        rare: Values that are rare or that the training never saw; 0 for numbers.
        bins: Values in each bin, and, of lists, the lists whose length is in each bin.
    """

    name: str
    values: tuple[int, int]
    missing: tuple[int, int]
    rare: tuple[int, int]
    bins: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    def plus(self, other: InputCounts) -> InputCounts:
        """Return these counts with the present ones of another process, whose training data are the same."""
        return dataclasses.replace(
            self,
            values=_plus(self.values, other.values),
            missing=_plus(self.missing, other.missing),
            rare=_plus(self.rare, other.rare),
            bins=tuple(
                (reference, tuple(map(sum, zip(mine, its, strict=True))))
                for (reference, mine), (_, its) in zip(self.bins, other.bins, strict=True)
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftCounts:
    """Counts of one version of a model.

    Attributes:
        model: Name of the model.
        version: Its version.
        data: What tells the training data from others, with their state; "" where they could not be read.
        records: Records that were compared.
        reference_records: Rows of the training data.
        inputs: Its columns.
        problem: Why there is nothing to show; "" where there is.
    """

    model: str
    version: str
    data: str = ""
    records: int = 0
    reference_records: int = 0
    inputs: tuple[InputCounts, ...] = ()
    problem: str = ""

    @property
    def form(self) -> object:
        """What is equal for counts that can be added."""
        return self.data, [(column.name, [len(reference) for reference, _ in column.bins]) for column in self.inputs]

    def plus(self, other: DriftCounts) -> DriftCounts:
        """Return these counts with those of another process, of the same form."""
        inputs = tuple(mine.plus(its) for mine, its in zip(self.inputs, other.inputs, strict=True))
        return dataclasses.replace(self, records=self.records + other.records, inputs=inputs)


def _plus(mine: tuple[int, int], its: tuple[int, int]) -> tuple[int, int]:
    return mine[0], mine[1] + its[1]


def joined_counts(counts: Sequence[DriftCounts]) -> list[DriftCounts]:
    """Return the counts of each version in all processes, in the order in which they come first.

    Where processes compare with other data, since these were replaced meanwhile, it is those of most records.
    """
    versions: dict[tuple[str, str], list[DriftCounts]] = {}
    for each in counts:
        versions.setdefault((each.model, each.version), []).append(each)
    return [_joined(parts) for parts in versions.values()]


def _joined(parts: Sequence[DriftCounts]) -> DriftCounts:
    by_form: dict[str, DriftCounts] = {}
    for each in parts:
        if not each.problem:
            form = repr(each.form)
            by_form[form] = by_form[form].plus(each) if form in by_form else each
    if not by_form:
        return parts[0]
    # By the form, too, so that all processes choose the same one.
    return max(by_form.items(), key=lambda item: (item[1].records, item[0]))[1]


def to_json(counts: Sequence[DriftCounts]) -> bytes:
    """Return counts for `of_json`."""
    return json.dumps([dataclasses.asdict(each) for each in counts]).encode()


def of_json(text: bytes) -> list[DriftCounts]:
    """Return the counts that another process of this server has written with `to_json`."""
    return [
        DriftCounts(**{**fields, "inputs": tuple(InputCounts(**_tuples(column)) for column in fields["inputs"])})
        for fields in json.loads(text or b"[]")
    ]


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with tuples in place of the lists of JSON, so that equal counts are equal."""
    bins = tuple((tuple(reference), tuple(current)) for reference, current in fields["bins"])
    pairs = {name: tuple(fields[name]) for name in ("values", "missing", "rare")}
    return {**fields, **pairs, "bins": bins}
