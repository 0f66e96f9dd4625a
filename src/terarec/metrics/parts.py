"""The samples of one label, split into parts: what metrics that cannot be streamed are computed from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from terarec.metrics.auc import auc_by_group
from terarec.metrics.columns import FloatColumns, Floats, Integers
from terarec.metrics.ranking import RelevantRanks, ranks_of_samples


@dataclass(frozen=True, kw_only=True)
class Samples:
    """N samples with a known label.

    Attributes:
        logits: Logits [N, 1], or [N, C] for classes; None if no metric reads them.
        scores: Probabilities or values, like `logits`.
        labels: Known labels [N].
        weights: Weights [N], > 0; None for ones.
        group: Group of each sample, int64[N]; -1 for none. None if there is no group column.
    """

    logits: FloatColumns | None
    scores: FloatColumns | None
    labels: FloatColumns
    weights: FloatColumns | None
    group: Integers | None


class PartedSamples:
    """Samples with the part that each belongs to.

    Args:
        samples: Samples of one label.
        part: Part of each sample, int64[N] in [0, parts).
        parts: Number of parts.
    """

    def __init__(self, samples: Samples, part: Integers, parts: int) -> None:
        self.samples = samples
        self.part = part
        self.parts = parts

    def auc(self) -> Floats:
        """The weighted AUC of each part, float64[parts]."""
        held = self.samples
        assert held.logits is not None
        return auc_by_group(held.logits[:, 0], held.labels, held.weights, self.part, self.parts)

    def gauc(self) -> Floats:
        """The mean AUC of the groups in each part that have both classes, weighted by their impressions."""
        held, grouped = self.samples, self._groups
        assert held.logits is not None
        kept = grouped.kept
        weights = None if held.weights is None else held.weights[kept]
        values = auc_by_group(held.logits[kept, 0], held.labels[kept], weights, grouped.code, grouped.count)
        return self._mean_of_groups(values, grouped.weight)

    def ranking(self, values: Floats) -> Floats:
        """The mean over the groups of each part of one value a group, weighted by the mean weight of their samples."""
        grouped = self._groups
        return self._mean_of_groups(values, grouped.weight / grouped.size)

    @cached_property
    def ranks(self) -> RelevantRanks:
        """The ranks of the samples with labels above 0, in the groups of each part."""
        held, grouped = self.samples, self._groups
        assert held.logits is not None
        kept = grouped.kept
        return ranks_of_samples(held.logits[kept, 0], held.labels[kept], grouped.code, grouped.count)

    @cached_property
    def _groups(self) -> _Groups:
        """The groups of each part: a group that occurs in two parts is one group in each."""
        held = self.samples
        assert held.group is not None
        kept = np.flatnonzero(held.group >= 0)
        num_groups = int(held.group.max(initial=-1)) + 1
        pairs, code = np.unique(self.part[kept] * num_groups + held.group[kept], return_inverse=True)
        size = np.bincount(code, minlength=len(pairs))
        weight = size if held.weights is None else np.bincount(code, held.weights[kept], len(pairs))
        return _Groups(
            kept=kept, code=code, part=pairs // max(num_groups, 1), size=size, weight=weight.astype(np.float64)
        )

    def _mean_of_groups(self, values: Floats, weights: Floats) -> Floats:
        is_defined = ~np.isnan(values)
        part, weights = self._groups.part[is_defined], weights[is_defined]
        totals = np.bincount(part, values[is_defined] * weights, self.parts)
        of_part = np.bincount(part, weights, self.parts)
        means: Floats = np.divide(totals, of_part, out=np.full(self.parts, np.nan), where=of_part > 0)
        return means


@dataclass(frozen=True, kw_only=True)
class _Groups:
    """The G groups of the samples that have one: their indices and group codes, and each group's part and weight."""

    kept: Integers
    code: Integers
    part: Integers
    size: Integers
    weight: Floats

    @property
    def count(self) -> int:
        return len(self.part)
