# SPDX-License-Identifier: Apache-2.0
"""HSTU (Zhai et al. 2024, arXiv 2402.17152)."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from terarec.batch import Jagged, select
from terarec.errors import ConfigError
from terarec.models.columns import categorical_column
from terarec.models.sequences import SequenceModel
from terarec.nn import sequences
from terarec.spec import DatasetSpec, HSTUSpec


class HSTU(SequenceModel):
    """Hierarchical sequential transduction units over the history: gated layers of pointwise attention.

    Args:
        spec: Columns, layers and loss.
        dataset: Columns, with one label.
        num_outputs: Number of outputs, which is 1; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: See `SequenceModel`; or no column of any integers for the times.
    """

    def __init__(self, spec: HSTUSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        encoder = sequences.HSTU(
            spec.max_length,
            spec.width,
            layers=spec.layers,
            heads=spec.heads,
            rate=spec.dropout,
            time_buckets=0 if spec.times is None else spec.time_buckets,
            generator=torch.Generator().manual_seed(seed),
        )
        super().__init__(spec, dataset, encoder, kind=spec.kind, num_outputs=num_outputs, seed=seed)
        self.times = spec.times
        if spec.times is not None:
            column = categorical_column(spec.kind, "times", spec.times, dataset, one_key=False)
            if column.rows is not None:
                raise ConfigError(
                    spec.kind, f"times: {column.name!r} has {column.rows} ids, expected times: keys of any integers"
                )

    @override
    def recent(self, sparse: Jagged) -> Jagged:
        jagged = super().recent(sparse)
        if self.times is None:
            return jagged
        both, size = select(sparse, (self.history, self.times)), sparse.batch_size
        every = both.offsets.diff()
        lengths, of_times = every[:size], every[size:]
        if not torch.equal(lengths, of_times):
            row = int((lengths != of_times).nonzero()[0])
            raise ConfigError(
                f"column {self.times!r}, row {row}",
                f"got {int(of_times[row])} times for {int(lengths[row])} items of {self.history!r}, expected as many",
            )
        keys, times = both.keys.chunk(2)
        is_item = keys != self.missing
        ends = torch.cat([both.offsets[:1], is_item.cumsum(0)])[both.offsets[: size + 1]]
        recent, _ = sequences.last_positions(times[is_item], ends, self.longest)
        offsets = torch.cat([jagged.offsets, jagged.offsets[-1] + jagged.offsets[1 : size + 1]])
        return Jagged(names=(*jagged.names, self.times), keys=torch.cat([jagged.keys, recent]), offsets=offsets)

    @override
    def encoded(self, vectors: Tensor, offsets: Tensor, jagged: Jagged) -> Tensor:
        times = None if self.times is None else jagged.keys[len(jagged.keys) - len(vectors) :]
        hidden: Tensor = self.encoder(vectors, offsets, times)
        return hidden

    @override
    def last_padded(self, vectors: Tensor, lengths: Tensor) -> Tensor:
        if self.times is not None:
            raise ConfigError("hstu", "has biases of gaps in time, which exported programs do not have")
        return super().last_padded(vectors, lengths)
