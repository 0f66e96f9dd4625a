"""Slices that copy a tensor for each layer that reads it, which HugeCTR's readers of a graph's JSON rely on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

IS_COPY = "is_copy"
"""Marks such a Slice, so that terarec leaves it out again; HugeCTR's readers pass over keys that they do not know."""


def with_copies(layers: Sequence[dict[str, Any]], widths: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """`layers` with a Slice before the first reader of each tensor that is read several times.

    Its outputs are the whole tensor each, named ``<tensor>_slice<n>``, one for every time it is read.

    Args:
        layers: of a graph's JSON, dense ones.
        widths: last dimension of each tensor.
    """
    uses = Counter(name for layer in layers for name in _bottoms(layer))
    served: Counter[str] = Counter()
    for layer in layers:
        bottoms = []
        for name in _bottoms(layer):
            if uses[name] > 1 and not served[name]:
                yield _copies(name, uses[name], widths[name])
            bottoms.append(f"{name}_slice{served[name]}" if uses[name] > 1 else name)
            served[name] += 1
        yield {**layer, "bottom": bottoms[0] if len(bottoms) == 1 else bottoms}


def _copies(name: str, count: int, width: int) -> dict[str, Any]:
    tops = [f"{name}_slice{number}" for number in range(count)]
    return {"type": "Slice", "bottom": name, "top": tops, "ranges": [[0, width]] * count, IS_COPY: True}


def _bottoms(layer: Mapping[str, Any]) -> list[str]:
    bottom = layer["bottom"]
    return [bottom] if isinstance(bottom, str) else list(bottom)
