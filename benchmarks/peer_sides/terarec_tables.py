# SPDX-License-Identifier: Apache-2.0
"""terarec: an `EmbeddingCollection` and its `RowOptimizer`, as a model uses them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from row_probe import COPY, MODIFY, READ, row_visitor
from torch import Tensor

import terarec
from peer_sides.cell import INITIAL_ACCUMULATOR, LR, SCALE, Inputs, Shape
from terarec.batch import Jagged
from terarec.embedding import EmbeddingCollection
from terarec.kernels.rows import allocate_rows
from terarec.optim import RowOptimizer
from terarec.spec import AdaGradSpec, DynamicTableSpec, FeatureSpec, RowWiseAdaGradSpec, SGDSpec, TableSpec

_RULES = {
    "sgd": SGDSpec(lr=LR),
    "adagrad": AdaGradSpec(lr=LR, initial_accumulator=INITIAL_ACCUMULATOR),
    "rowwise_adagrad": RowWiseAdaGradSpec(lr=LR),
}


def names_of(shape: Shape) -> tuple[str, ...]:
    """Return the names of its tables, and of the features that look them up."""
    return tuple(f"t{index}" for index in range(shape.tables))


class _GiveGradient(torch.autograd.Function):
    """Replace the model: the backward returns the prepared gradient in a tensor with no other reference."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, pooled: Tensor, grad: NDArray[np.float32]) -> Tensor:
        ctx.grad = grad
        return pooled.new_zeros(())

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, _: Tensor) -> tuple[Tensor, None]:
        return torch.from_numpy(ctx.grad), None


class Tables:
    """Implements `Side`; with `is_dynamic`, a step or `meet_all` inserts the rows of new keys."""

    version = f"terarec {terarec.__version__}, torch {torch.__version__}"

    def __init__(self, shape: Shape, rule: str, *, is_dynamic: bool = False) -> None:
        self.shape = shape
        self.names = names_of(shape)
        make = DynamicTableSpec if is_dynamic else partial(TableSpec, rows=shape.rows)
        self.collection = EmbeddingCollection(
            [make(name=name, width=shape.width, init_scale=SCALE) for name in self.names],
            [FeatureSpec(name=name, table=name) for name in self.names],
        )
        self.optimizer = RowOptimizer(self.collection, _RULES[rule])

    def meet_all(self, batch: Jagged) -> None:
        """Look up all keys in training mode, one of each table in a sample, in equal batches that reuse `batch`."""
        size = batch.batch_size
        for start in range(0, self.shape.rows, size):
            batch.keys.view(-1, size)[:] = torch.arange(size) + min(start, self.shape.rows - size)
            self.collection(batch)
            self.collection.take_gradients()

    def load(self, tables: NDArray[np.float32]) -> None:
        for name, table in zip(self.names, tables, strict=True):
            self.collection.table(name).copy_(torch.from_numpy(table))

    def prepare(self, inputs: Inputs) -> None:
        keys, offsets = torch.from_numpy(inputs.keys.reshape(-1)), torch.from_numpy(inputs.offsets)
        self.jagged = Jagged(names=self.names, keys=keys, offsets=offsets)
        self.grad = inputs.grad
        self.visits: dict[int, Callable[[], None]] = {}

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.collection(self.jagged).pooled

    def step(self) -> None:
        _GiveGradient.apply(self.collection(self.jagged).pooled, self.grad).backward()
        self.optimizer.step()

    def read(self) -> None:
        """Read the rows of the batch, in its order or in rising order, as the limit of `forward`."""
        self._visit(READ)

    def modify(self) -> None:
        """Read and write each row of the batch once."""
        self._visit(MODIFY)

    def stream(self) -> None:
        """Read the gradient of the pooled vectors and write as many bytes, as a step must."""
        self._visit(COPY)

    def _visit(self, access: int) -> None:
        if access not in self.visits:
            self.visits[access] = self._visitor(access)
        self.visits[access]()

    def _visitor(self, access: int) -> Callable[[], None]:
        if access == COPY:
            grad = torch.from_numpy(self.grad).view(-1, self.shape.width)
            result = torch.from_numpy(allocate_rows(tuple(grad.shape)))
            return row_visitor(COPY, grad, torch.arange(grad.shape[0]), dense=result)
        arena, starts = self._arena()
        rows = (self.jagged.keys.view(len(starts), -1) + starts[:, None]).flatten()
        rising = rows.sort().values
        if access == READ:
            return row_visitor(READ, arena, rows, rising)
        return row_visitor(MODIFY, arena, rising.unique_consecutive())

    def _arena(self) -> tuple[Tensor, Tensor]:
        """Return the memory that all tables share, from the first table on, and the offset of each table."""
        tables = [self.collection.table(name).detach() for name in self.names]
        starts = torch.tensor([table.storage_offset() // self.shape.width for table in tables])
        first = tables[int(starts.argmin())]
        rows = int(starts.max() - starts.min()) + self.shape.rows
        return first.as_strided((rows, self.shape.width), (self.shape.width, 1)), starts - starts.min()

    def pooled(self) -> NDArray[np.float32]:
        return self.forward().numpy()

    def tables(self) -> NDArray[np.float32]:
        return np.stack([self.collection.table(name).detach().numpy() for name in self.names])
