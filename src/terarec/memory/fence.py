# SPDX-License-Identifier: Apache-2.0
"""The fence protocol: which state the rows of a table in one memory are of."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol


class Fence(Protocol):
    """Says which state the rows of a table in one memory are of, and notices rows of another one.

    A change of rows is between `begin` or `reset`, and `end`; one change comes after the other. States have names, such
    as that of a checkpoint.

    Attributes:
        takes_later: Whether lookups take rows that another process changed to another state.
        is_shared: Whether several processes may change the rows.
    """

    takes_later: bool
    is_shared: bool

    @property
    def state(self) -> str:
        """Name of the state that the rows are of; "" during a change, for none, and for one without a name."""

    def begin(self, state: str | None, through: Collection[str] = ()) -> bool:
        """Note that rows are about to change, before the first of them does.

        Args:
            state: Name of the state that the change leads to; None where it keeps its name.
            through: Names of states on the way there, from which it is complete, too.

        Returns:
            Whether another process has made this change: then there is nothing to change, and no `end` follows.

        Raises:
            StaleRowsError: The rows are of another state than this process left them in, or a part of a change to one.
                Where they are later ones, another call may succeed.
            StorageError: The memory cannot be reached.
        """

    def reset(self, state: str | None) -> bool:
        """Begin a change after which no row of before is left, so that these may be of any state.

        Returns:
            Whether there may be rows of another state, which the caller removes.

        Raises:
            StorageError: The memory cannot be reached.
        """

    def extend(self) -> None:
        """Let other processes know that this one goes on with its change; before rows are written.

        Raises:
            StaleRowsError: It paused for so long that another process has taken over.
            StorageError: The memory cannot be reached.
        """

    def end(self) -> None:
        """Note that the change is complete; errors are those of `begin`."""

    def compare(self) -> None:
        """Raise unless the rows are of the state that this process left them in; errors are those of `begin`."""

    def give_up(self) -> bool:
        """End a change after `reset` that failed; return whether to remove the rows, which nobody else can need.

        Where `reset` was not called, the rows are those of before, and stay. Errors are those of `end`.
        """

    def leave(self) -> bool:
        """Note that this process needs the rows no more; return whether another does. Errors are those of `adopt`."""

    def remove(self) -> None:
        """Remove what stands beside rows that are gone for good; errors are those of `adopt`."""

    def adopt(self, *states: str | None) -> bool:
        """Take over the rows if another process completed their change to one of some states; return whether it did.

        Raises:
            StorageError: The memory cannot be reached.
        """


class OwnFence:
    """The state of rows that no other process changes. Implements `Fence`.

    Attributes:
        at_end: Called at the end of each change.
    """

    def __init__(self, state: str = "") -> None:
        self.takes_later = self.is_shared = False
        self.state = state
        self.at_end: Callable[[], None] = lambda: None
        self._next = state
        self._has_reset = False  # whether the rows of before have given way to those of this process

    def begin(self, state: str | None, through: Collection[str] = ()) -> bool:
        """Note a change; see `Fence.begin`."""
        del through
        self._next = self.state if state is None else state
        return False

    def reset(self, state: str | None) -> bool:
        """Note a change; see `Fence.reset`."""
        had_state = self.state != ""
        self.begin(state)
        self._has_reset = True
        return had_state

    def extend(self) -> None:
        """Do nothing: no other process waits."""

    def end(self) -> None:
        """Note the end of a change; see `Fence.end`."""
        self.state = self._next
        self.at_end()

    def compare(self) -> None:
        """Do nothing: the rows are as this process left them."""

    def give_up(self) -> bool:
        """Return whether rows of this process are there; those of before stay."""
        return self._has_reset

    def leave(self) -> bool:
        """Return False: nobody else has the rows."""
        return False

    def remove(self) -> None:
        """Forget the state."""
        self.state = ""

    def adopt(self, *states: str | None) -> bool:
        """Return False: no other process changes rows."""
        del states
        return False
