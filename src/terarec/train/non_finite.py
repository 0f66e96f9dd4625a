# SPDX-License-Identifier: Apache-2.0
"""The first layer of a model whose output is not finite, for the error of a loss that is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.models.contract import logits_of


def first_non_finite(model: nn.Module, batch: Batch) -> str | None:
    """Return the name of the first layer that gives a value that is not finite for `batch`; None for no layer.

    Layers are those that end first, so that a layer inside another one counts. The model runs in evaluation mode, which
    reads rows of tables and keeps none, and is in its former mode afterwards.
    """
    found: list[str] = []
    was_training = model.training
    model.eval()
    try:
        with ExitStack() as hooks, torch.no_grad():
            for name, module in model.named_modules():
                kind = type(module).__name__
                note = partial(_note, found, f"{name} ({kind})" if name else kind)
                hooks.callback(module.register_forward_hook(note).remove)
            logits_of(model, model(batch))
    # The layers are found for an error that is reported in any case, also where another error ends them.
    except Exception:
        pass
    finally:
        model.train(was_training)
    return found[0] if found else None


def _note(found: list[str], name: str, _module: nn.Module, _inputs: object, output: object) -> None:
    if not found and not all(bool(tensor.isfinite().all()) for tensor in _tensors(output)):
        found.append(name)


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)
