# SPDX-License-Identifier: Apache-2.0
"""The positive items of users in the train split, of which a model draws no negatives."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from terarec.batch import Batch, column
from terarec.models.contract import device_of
from terarec.models.pairs import PairModel


def learn_positives(model: nn.Module, batches: Iterable[Batch]) -> None:
    """Let a model of users and items know the samples with a label above 0; other models draw none by user.

    Memory: 8 bytes a positive sample.

    Args:
        model: The model.
        batches: All samples of the train split.

    Raises:
        ConfigError: A column of lists in the place of users or items.
    """
    if not isinstance(model, PairModel):
        return
    users: list[Tensor] = []
    items: list[Tensor] = []
    for batch in batches:
        is_positive = batch.label[:, 0] > 0
        for name, parts in ((model.user_key, users), (model.item_key, items)):
            keys = column(batch, name)
            assert isinstance(keys, Tensor)
            parts.append(keys[is_positive])
    if users:
        device = device_of(model)
        model.know_positives(torch.cat(users).to(device), torch.cat(items).to(device))
