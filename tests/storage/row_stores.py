"""The kinds of row stores that the behaviour suite runs on: how each is made, and opened again after a crash."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from terarec.storage import MemoryRowStore, RowStore


@dataclass(frozen=True)
class Kind:
    """A kind of row store.

    Attributes:
        create: Rows of so many bytes in a directory that does not exist.
        reopen: Close a store of that directory without a commit and open it again.
        load: Open what `snapshot` wrote.
    """

    create: Callable[[Path, int], RowStore]
    reopen: Callable[[RowStore, Path], RowStore]
    load: Callable[[Path], RowStore]


def _reopen_memory(store: RowStore, directory: Path) -> RowStore:
    """What a process finds that starts after this one: the last snapshot, which is taken of the last commit."""
    store.snapshot(directory / f"commit-{store.last_commit}-{id(store)}")
    path = directory / f"commit-{store.last_commit}-{id(store)}"
    store.close()
    return MemoryRowStore.load(path)


KINDS = {
    "memory": Kind(
        create=lambda directory, row_bytes: MemoryRowStore(row_bytes), reopen=_reopen_memory, load=MemoryRowStore.load
    )
}
