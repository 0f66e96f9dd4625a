"""How many rows each file of a split takes."""

from __future__ import annotations

from collections.abc import Iterator


def even_sizes(total: int | None, most: int) -> Iterator[int]:
    """Rows of one file after the other, at most `most`: for a known `total` they differ by one at the most.

    Without it all files but the last are full. Goes on for ever, should there be more rows than `total`.
    """
    if total:
        files = -(-total // most)
        size, larger = divmod(total, files)
        for index in range(files):
            yield size + (index < larger)
    while True:
        yield most
