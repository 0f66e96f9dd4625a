# SPDX-License-Identifier: Apache-2.0
"""Files with bits flipped or cut short, and what a reader may do with one: find it, not notice it, reject it."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from terarec.errors import TerarecError


def damaged(content: bytes, seed: int, count: int) -> Iterator[bytes]:
    """`count` copies of `content`, each cut short or with one bit flipped."""
    rng = random.Random(seed)
    for index in range(count):
        place = rng.randrange(len(content))
        if index % 4 == 3:
            yield content[:place]
        else:
            yield content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def check_damage(
    path: Path,
    read: Callable[[], object],
    *,
    seed: int,
    count: int,
    may_differ: Callable[[bytes], bool] = lambda _: False,
) -> int:
    """Damage the file at `path` in `count` ways, and put it back.

    Args:
        path: File to damage.
        read: Reads what the file belongs to.
        seed: Seed of the damage.
        count: How many ways.
        may_differ: Whether a reader cannot know that these bytes are not those that were written.

    Returns:
        How many were rejected. The others gave what the whole file gives; or were such that no one can tell.
    """
    content, expected, rejected = path.read_bytes(), read(), 0
    try:
        for number, other in enumerate(damaged(content, seed, count)):
            path.write_bytes(other)
            try:
                found = read()
            except TerarecError:
                rejected += 1
            else:
                assert found == expected or may_differ(other), f"{path.name}, case {number}: other values"
    finally:
        path.write_bytes(content)
    return rejected
