"""Logits of a model for a stream of batches, without gradients: what evaluation and prediction share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.models.contract import device_of, logits_of
from terarec.train.devices import copied_ahead
from terarec.train.precision import Precision, autocast


def score(model: nn.Module, batches: Iterable[Batch], precision: Precision = "fp32") -> Iterator[tuple[Batch, Tensor]]:
    """Yield each of `batches`, on the CPU, with its logits float32[B, C], the model being in evaluation mode meanwhile.

    The mode that the model had before is restored when the stream ends or is closed.

    Raises:
        ConfigError: A model that gives no logits, or a graph with a label that no loss reads.
    """
    was_training, device = model.training, device_of(model)
    model.eval()
    try:
        for there, batch in copied_ahead(((batch, batch) for batch in batches), device):
            yield batch, _logits(model, there, precision)
    finally:
        model.train(was_training)


@torch.no_grad()
def _logits(model: nn.Module, batch: Batch, precision: Precision) -> Tensor:
    with autocast(precision, batch.label.device):
        output = model(batch)
    return logits_of(model, output).float().cpu()
