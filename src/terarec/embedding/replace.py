"""`replace_embeddings`: the embedding modules of an existing model, moved onto the engine in place."""

from __future__ import annotations

import logging
from typing import TypeVar

from torch import nn

from terarec.embedding.bag import EmbeddingBag
from terarec.embedding.table import Embedding
from terarec.ops.checks import ROW_TYPES

_LOGGER = logging.getLogger(__name__)

_Model = TypeVar("_Model", bound=nn.Module)
_REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {nn.EmbeddingBag: EmbeddingBag, nn.Embedding: Embedding}


def replace_embeddings(model: _Model) -> _Model:
    """Turn every `torch.nn.EmbeddingBag` and `torch.nn.Embedding` in `model` into terarec's, in place.

    The module objects stay and change their class, so that all else stays, too: the weights and optimizers that hold
    them, modules and weights shared by several places, hooks, training flags, references from elsewhere.

    What was replaced is logged at level INFO; an embedding module that is left alone (a subclass, weights of another
    type, a patched ``forward``) at level WARNING, with the reason.

    Args:
        model: any module; may itself be an embedding module.

    Returns:
        `model`.
    """
    replaced: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.EmbeddingBag | nn.Embedding) or isinstance(module, EmbeddingBag | Embedding):
            continue
        place = name or "the model itself"
        reason = _refusal(module)
        if reason:
            _LOGGER.warning("replace_embeddings: %s is left alone: %s", place, reason)
        else:
            module.__class__ = _REPLACEMENTS[type(module)]  # type: ignore[assignment]
            replaced.append(place)
    _LOGGER.info("replace_embeddings: %d modules replaced: %s", len(replaced), ", ".join(replaced) or "none")
    return model


def _refusal(module: nn.EmbeddingBag | nn.Embedding) -> str:
    """Why `module` cannot be replaced; empty if it can."""
    if type(module) not in _REPLACEMENTS:
        return f"{type(module).__name__} is a subclass, which may compute something else"
    if "forward" in vars(module):
        return "its forward was patched"
    if module.weight.dtype not in ROW_TYPES:
        return f"its weights are {str(module.weight.dtype).removeprefix('torch.')}, not float32, bfloat16 or float16"
    return ""
