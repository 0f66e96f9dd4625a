# SPDX-License-Identifier: Apache-2.0
"""A tiny problem with a planted answer: the label depends on products of two categories' hidden numbers."""

import torch

from terarec.batch import Batch, Jagged
from terarec.spec import CategoricalColumn, DatasetSpec, DenseColumn, LabelColumn

NUM_ROWS = 6


def planted_dataset(num_dense: int = 2, num_labels: int = 1) -> DatasetSpec:
    return DatasetSpec(
        name="planted",
        storage="parquet",
        labels=tuple(LabelColumn(name=f"y{index}") for index in range(num_labels)),
        dense=tuple(DenseColumn(name=f"d{index}") for index in range(num_dense)),
        categorical=tuple(CategoricalColumn(name=name, rows=NUM_ROWS) for name in ("a", "b")),
    )


def planted_batch(batch_size: int = 256, seed: int = 0, num_labels: int = 1) -> Batch:
    """Samples whose label is the sign of sin(a) * sin(b) + dense[:, 0] / 4, without noise."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(0, NUM_ROWS, (2, batch_size), generator=generator)
    dense = torch.randn(batch_size, 2, generator=generator)
    hidden = (keys[0] + 1.0).sin() * (keys[1] + 1.0).sin() + dense[:, 0] / 4
    label = (hidden > 0).float()[:, None].expand(-1, num_labels).contiguous()
    sparse = Jagged(names=("a", "b"), keys=keys.reshape(-1), offsets=torch.arange(2 * batch_size + 1))
    return Batch(dense=dense, label=label, sparse=sparse)
