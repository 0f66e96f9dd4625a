# SPDX-License-Identifier: Apache-2.0
"""FBGEMM: the table-batched embedding that TorchRec trains with, with its tables in host memory."""

from __future__ import annotations

import fbgemm_gpu
import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from numpy.typing import NDArray
from torch import Tensor

from peer_sides.cell import LR, SCALE, Inputs, Shape

_RULES = {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}


class TableBatched:
    """Implements `Side`. It does not check keys, which is faster; terarec checks every key.

    With the same weights and keys, `IntNBitTableBatchedEmbeddingBagsCodegen`, for inference, took 1.3 to 1.8 times as
    long at 100 x 8192 x 16, ten keys, batches of 64 to 8192 (two Zen 3 cores).
    """

    version = f"fbgemm-gpu-cpu {fbgemm_gpu.__version__}, torch {torch.__version__}"

    def __init__(self, shape: Shape, rule: str) -> None:
        self.shape = shape
        self.bags = SplitTableBatchedEmbeddingBagsCodegen(
            [(shape.rows, shape.width, EmbeddingLocation.HOST, ComputeDevice.CPU)] * shape.tables,
            optimizer=_RULES[rule],
            learning_rate=LR,
            eps=1e-8,
            stochastic_rounding=False,
            pooling_mode=PoolingMode.SUM,
            bounds_check_mode=BoundsCheckMode.NONE,
            device=torch.device("cpu"),
        )
        for held in self.bags.split_embedding_weights():
            held.fill_(SCALE)

    def load(self, tables: NDArray[np.float32]) -> None:
        for held, table in zip(self.bags.split_embedding_weights(), tables, strict=True):
            held.copy_(torch.from_numpy(table))

    def prepare(self, inputs: Inputs) -> None:
        self.keys = torch.from_numpy(inputs.keys.reshape(-1))
        self.offsets = torch.from_numpy(inputs.offsets)
        self.grad = torch.from_numpy(inputs.grad)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.bags(self.keys, self.offsets)

    def step(self) -> None:
        self.bags(self.keys, self.offsets).backward(self.grad)  # updates the rows as well

    def pooled(self) -> NDArray[np.float32]:
        return self.forward().numpy()

    def tables(self) -> NDArray[np.float32]:
        return np.stack([held.detach().numpy() for held in self.bags.split_embedding_weights()])
