"""What a checkpoint is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from terarec.storage import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """A training at rest after some step. Nothing is copied: tensors and stores are the ones that train.

    Attributes:
        step: training steps done.
        dense: the model's dense parameters and buffers by name.
        tables: the embedding tables by name, with the row optimizer's state in them.
        optimizer: ``state_dict()`` of the dense optimizer.
        rng: ``torch.get_rng_state()``, which dropout draws from.
        progress: JSON data: the trainer's counters, the reader's state, the row optimizer's steps.
    """

    step: int
    dense: Mapping[str, Tensor]
    tables: Mapping[str, Store]
    optimizer: Mapping[str, Any]
    rng: Tensor
    progress: Mapping[str, Any]
