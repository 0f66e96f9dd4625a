# SPDX-License-Identifier: Apache-2.0
"""torch: an `nn.EmbeddingBag` for each table, with sparse or dense gradients, and the torch optimizer."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from peer_sides.cell import INITIAL_ACCUMULATOR, LR, SCALE, Inputs, Shape


class Bags:
    """Implements `Side`."""

    version = f"torch {torch.__version__}"
    sparse: bool

    def __init__(self, shape: Shape, rule: str) -> None:
        self.bags = [
            nn.EmbeddingBag.from_pretrained(
                torch.full((shape.rows, shape.width), SCALE),
                freeze=False,
                mode="sum",
                sparse=self.sparse,
            )
            for _ in range(shape.tables)
        ]
        weights = [bag.weight for bag in self.bags]
        fused = None if self.sparse else True  # the fastest variant of both optimizers; it takes dense gradients only
        self.optimizer: torch.optim.Optimizer
        if rule == "sgd":
            self.optimizer = torch.optim.SGD(weights, lr=LR, fused=fused)
        else:
            self.optimizer = torch.optim.Adagrad(
                weights, lr=LR, initial_accumulator_value=INITIAL_ACCUMULATOR, fused=fused
            )

    def load(self, tables: NDArray[np.float32]) -> None:
        for bag, table in zip(self.bags, tables, strict=True):
            bag.weight.data.copy_(torch.from_numpy(table))

    def prepare(self, inputs: Inputs) -> None:
        num_tables, batch = len(self.bags), inputs.grad.shape[0]
        self.keys = list(torch.from_numpy(inputs.keys))
        self.offsets = torch.from_numpy(inputs.offsets[:batch])
        self.grads = [part.contiguous() for part in torch.from_numpy(inputs.grad).chunk(num_tables, dim=1)]

    def forward(self) -> list[Tensor]:
        with torch.no_grad():
            return self._look_up()

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(self._look_up(), self.grads)
        self.optimizer.step()

    def pooled(self) -> NDArray[np.float32]:
        return torch.cat(self.forward(), dim=1).numpy()

    def tables(self) -> NDArray[np.float32]:
        return torch.stack([bag.weight.detach() for bag in self.bags]).numpy()

    def _look_up(self) -> list[Tensor]:
        return [bag(keys, self.offsets) for bag, keys in zip(self.bags, self.keys, strict=True)]


class SparseBags(Bags):
    """Bags with sparse gradients (COO tensors)."""

    sparse = True


class DenseBags(Bags):
    """Bags with dense gradients, as large as the tables."""

    sparse = False
