"""Logits of a model for a stream of batches, without gradients: what evaluation and prediction share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from terarec.batch import Batch, to_device
from terarec.errors import ConfigError
from terarec.models import GraphModel
from terarec.train.precision import Precision, autocast


def score(model: nn.Module, batches: Iterable[Batch], precision: Precision = "fp32") -> Iterator[tuple[Batch, Tensor]]:
    """Each of `batches` with its logits float32[B, L], the model being in evaluation mode meanwhile.

    The mode that the model had before is restored when the stream ends or is closed.

    Raises:
        ConfigError: a model that gives no logits, or a graph with a label that no loss reads.
    """
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            yield batch, _logits(model, batch, precision)
    finally:
        model.train(was_training)


@torch.no_grad()
def _logits(model: nn.Module, batch: Batch, precision: Precision) -> Tensor:
    if isinstance(model, GraphModel):
        with autocast(precision, model.device):
            return model.label_logits(model(to_device(batch, model.device))).float()
    with autocast(precision):
        logits = model(batch)
    if not isinstance(logits, Tensor):
        raise ConfigError(f"{type(model).__name__}: got {type(logits).__name__} from it, expected logits [B, L]")
    return logits.float()
