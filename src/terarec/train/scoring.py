"""Logits of a model for a stream of batches, without gradients: what evaluation and prediction share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.train.precision import Precision, autocast


def score(model: nn.Module, batches: Iterable[Batch], precision: Precision = "fp32") -> Iterator[tuple[Batch, Tensor]]:
    """Each of `batches` with its logits float32[B, L], the model being in evaluation mode meanwhile.

    The mode that the model had before is restored when the stream ends or is closed.
    """
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            with torch.no_grad(), autocast(precision):
                logits = model(batch)
            yield batch, logits.float()
    finally:
        model.train(was_training)
