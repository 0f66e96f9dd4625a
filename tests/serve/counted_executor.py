# SPDX-License-Identifier: Apache-2.0
"""An executor that computes in eager torch and keeps the sizes of its batches."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from terarec.export.dense_part import DensePart
from terarec.serve import executors


def count_batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put the executor in the place of "onnxruntime"; return the list that gets the samples of each batch."""
    sizes: list[int] = []

    def counted(part: DensePart, folder: Path) -> executors.Program:
        def run(values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            sizes.append(len(values[0]))
            return part.module(*values)

        return run

    monkeypatch.setattr(executors, "EXECUTORS", {**executors.EXECUTORS, "onnxruntime": counted})
    return sizes
