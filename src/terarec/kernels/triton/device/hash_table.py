# SPDX-License-Identifier: Apache-2.0
"""Open addressing with linear probing: slot p holds ``slot_keys[p]`` and ``slot_rows[p]``.

A slot is free while its key is EMPTY; claiming it is one compare-and-swap, after which its key never changes until the
table is rebuilt. A row below 0 means that the key is absent, so erasing a key leaves its slot to it. The key EMPTY
itself has the slot past the last, whose own key is never EMPTY.
"""

from __future__ import annotations

import triton
import triton.language as tl

from terarec.kernels.triton.device.rows import STEP, mix

EMPTY = tl.constexpr(-(2**63))


@triton.jit
def _first_slot(key, slots):
    """Return where a key's search starts: the high half of hash * slots, which needs no power of two."""
    hashed = mix(key.to(tl.uint64, bitcast=True) + STEP)
    wide = slots.to(tl.uint64) + tl.zeros_like(hashed)
    return tl.where(key == EMPTY, slots, tl.umulhi(hashed, wide).to(tl.int64))


@triton.jit(do_not_specialize=["num_keys", "slots"])
def find_kernel(keys, slot_keys, slot_rows, out, num_keys, slots, BLOCK: tl.constexpr, GIVES_ROWS: tl.constexpr):
    """Give ``out int64[N]``: the slot of each key, or its row; -1 where it has none."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_key = i < num_keys
    key = tl.load(keys + i, mask=is_key, other=EMPTY)
    slot = _first_slot(key, slots.to(tl.int64))
    # The key EMPTY has a slot of its own, which `_first_slot` names, and needs no search.
    result = tl.where(key == EMPTY, slot, -1)
    is_active = is_key & (key != EMPTY)
    # A block searches until its slowest lane is done; lanes that are done load nothing.
    while tl.max(is_active.to(tl.int32), 0) > 0:
        present = tl.load(slot_keys + slot, mask=is_active, other=EMPTY)
        result = tl.where(is_active & (present == key), slot, result)
        is_active = is_active & (present != key) & (present != EMPTY)
        slot = tl.where(is_active, tl.where(slot + 1 == slots, 0, slot + 1), slot)
    if GIVES_ROWS:
        result = tl.load(slot_rows + result, mask=is_key & (result >= 0), other=-1)
    tl.store(out + i, result, mask=is_key)


@triton.jit(do_not_specialize=["num_keys", "slots"])
def claim_kernel(keys, slot_keys, slot_rows, out, num_keys, slots, BLOCK: tl.constexpr):
    """Give ``out int64[N]``: the slot of each key, claimed if it had none; the table has room for all of them.

    The row of a key that is absent becomes ``p - N - 1``, p being its first position: below -1, and the least of all
    that its occurrences write, whichever of them won the slot.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_key = i < num_keys
    key = tl.load(keys + i, mask=is_key, other=EMPTY)
    slot = _first_slot(key, slots.to(tl.int64))
    is_active = is_key & (key != EMPTY)
    while tl.max(is_active.to(tl.int32), 0) > 0:
        present = tl.load(slot_keys + slot, mask=is_active, other=0)
        is_free = is_active & (present == EMPTY)
        if tl.max(is_free.to(tl.int32), 0) > 0:
            # Lanes without a free slot swap EMPTY for EMPTY in their present slot, which changes nothing.
            before = tl.atomic_cas(slot_keys + slot, tl.full(key.shape, EMPTY, tl.int64), tl.where(is_free, key, EMPTY))
            present = tl.where(is_free, tl.where(before == EMPTY, key, before), present)
        is_active = is_active & (present != key)
        slot = tl.where(is_active, tl.where(slot + 1 == slots, 0, slot + 1), slot)
    # A minimum, so that repeated keys need no order: codes are below -1, which is what an absent row holds.
    row = tl.load(slot_rows + slot, mask=is_key, other=0)
    tl.atomic_min(slot_rows + slot, i - num_keys - 1, mask=is_key & (row < 0))
    tl.store(out + i, slot, mask=is_key)
