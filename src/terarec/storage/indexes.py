"""Copies of hash indexes."""

from __future__ import annotations

import torch

from terarec.kernels.hash_index import HashIndex, new_hash_index


def copied_to(index: HashIndex, device: torch.device, implementation: str = "auto") -> HashIndex:
    """A new index on `device` with the keys and rows of `index`."""
    copied = new_hash_index(device, implementation)
    keys, rows, _ = index.items()
    copied.assign(keys.to(device), rows.to(device))
    return copied
