# SPDX-License-Identifier: Apache-2.0
"""The time that a batch spends in look-ups of rows, apart from the layers around them."""

from __future__ import annotations

import threading
import time
from typing import Any

from torch import nn

from terarec.embedding import EmbeddingCollection
from terarec.embedding.lookups import LookupCollection
from terarec.embedding.quantized import QuantizedCollection

_IS_TIMED = "_terarec_is_timed"


class _Spent(threading.local):
    """Time of one thread.

    Attributes:
        begun_ns: Beginning of the look-up under way.
        total_ns: Sum of those that have ended.
    """

    begun_ns = 0
    total_ns = 0


_spent = _Spent()


def time_lookups(model: nn.Module) -> None:
    """Let the look-ups of a model be timed from now on, in each thread apart; on a GPU the time to start them."""
    for module in model.modules():
        is_lookup = isinstance(module, EmbeddingCollection | LookupCollection | QuantizedCollection)
        # A copy of a module has its hooks, and this mark.
        if is_lookup and not hasattr(module, _IS_TIMED):
            module.register_forward_pre_hook(_begin)
            module.register_forward_hook(_end)
            setattr(module, _IS_TIMED, True)


def take_lookup_ns() -> int:
    """Return the nanoseconds of the look-ups in this thread since the last call; 0 where they are not timed."""
    total, _spent.total_ns = _spent.total_ns, 0
    return total


def _begin(_module: nn.Module, _inputs: Any) -> None:
    _spent.begun_ns = time.monotonic_ns()


def _end(_module: nn.Module, _inputs: Any, _output: Any) -> None:
    _spent.total_ns += time.monotonic_ns() - _spent.begun_ns
