"""`DynamicArena`: one growing block with the rows of all dynamic tables of one width and element type."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.errors import StorageError
from terarec.kernels import memory
from terarec.kernels.rows import reserve_rows
from terarec.ops import state_dtype
from terarec.spec import DynamicTableSpec
from terarec.storage.store import check_has_memory, shared_row_type

Change = Callable[[], object]


class Transaction:
    """The changes of one batch in the tables of an arena, all or none of which are made.

    A context manager: changes made within the block are rolled back if the block raises. A nested block is a part of
    the outer one. Outside of blocks a change is final at once.

    Args:
        lock: Lock held within the block.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._depth = 0
        self._undo_steps: list[Change] = []
        self._commit_steps: list[Change] = []

    def __enter__(self) -> Transaction:
        self._lock.acquire()
        self._depth += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._depth -= 1
        try:
            if not self._depth:
                self._end(has_failed=kind is not None)
        finally:
            self._lock.release()

    def on_rollback(self, undo: Change) -> None:
        """Register `undo`, which reverts a change that was made, after all later changes are reverted."""
        if self._depth:
            self._undo_steps.append(undo)

    def on_commit(self, change: Change) -> None:
        """Make `change`, which cannot fail and cannot be undone, after all others, in the order of these calls."""
        if self._depth:
            self._commit_steps.append(change)
        else:
            change()

    def _end(self, *, has_failed: bool) -> None:
        undo_steps, commit_steps = self._undo_steps, self._commit_steps
        self._undo_steps, self._commit_steps = [], []
        for step in reversed(undo_steps) if has_failed else commit_steps:
            step()


# NumPy types of the memory that tensors share; NumPy has no bfloat16.
_NUMPY_TYPES = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
}


class GrowingTensor:
    """A tensor ``[rows, ...]`` to which rows of zeros can be appended.

    In host memory it keeps its address: it reserves as much address space as the machine has memory, and commits
    memory as rows are appended. On other devices growing allocates and copies.

    Attributes:
        tensor: Rows.
        row_bytes: Bytes of a row.

    Args:
        row_shape: Shape of a row, ``()`` for a number.
        dtype: Element type, one of `_NUMPY_TYPES`.
        device: Device of the rows.
    """

    def __init__(self, row_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._row_shape = row_shape
        self.row_bytes = math.prod(row_shape) * dtype.itemsize
        self.tensor = torch.empty(0, *row_shape, dtype=dtype, device=device)
        self._reserved = None
        if device.type == "cpu":
            most = memory.total_bytes() // max(1, self.row_bytes)
            self._reserved = reserve_rows((most, *row_shape), _NUMPY_TYPES[dtype])

    def grow(self, rows: int) -> None:
        """Grow to `rows` rows; the new ones are zero.

        Raises:
            StorageError: Not enough memory; nothing has changed.
        """
        if self._reserved is not None:
            self._reserved.grow(rows)
            self.tensor = torch.from_numpy(self._reserved.array(rows)).view(self.tensor.dtype)
            return
        try:
            grown = self.tensor.new_zeros(rows, *self._row_shape)
        except torch.OutOfMemoryError as error:
            raise StorageError(f"{rows * self.row_bytes:,} bytes requested on {self.tensor.device}") from error
        grown[: self.tensor.shape[0]] = self.tensor
        self.tensor = grown

    def to(self, device: torch.device) -> GrowingTensor:
        """Return a copy on `device`.

        Raises:
            StorageError: Not enough memory there.
        """
        return _copied(self._row_shape, self.tensor, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> GrowingTensor:
        twin = self.to(self.tensor.device)
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        # Reserved address space cannot be pickled. A tensor would be moved to shared memory on its way to another
        # process, and so out of that address space.
        held = self.tensor.cpu()
        rows = held.view(torch.int16) if held.dtype == torch.bfloat16 else held
        return _rebuilt, (self._row_shape, rows.numpy(), held.dtype, self.tensor.device)


def _rebuilt(row_shape: tuple[int, ...], rows: NDArray[Any], dtype: torch.dtype, device: torch.device) -> GrowingTensor:
    return _copied(row_shape, torch.from_numpy(rows).view(dtype), device)


def _copied(row_shape: tuple[int, ...], rows: Tensor, device: torch.device) -> GrowingTensor:
    copied = GrowingTensor(row_shape, rows.dtype, device)
    copied.grow(rows.shape[0])
    copied.tensor.copy_(rows)
    return copied


_FEWEST_BYTES = 1 << 20
_GROWTH = 8  # an eighth more at a time: only address space until rows are written


class DynamicArena:
    """Rows of several dynamic tables in order of insertion, with their optimizer state.

    Row t < T is the default row of table t: the vector of keys without a row. `reset_defaults` restores it after every
    update. The rows after those belong to keys, were freed, or were never used.

    Rows that are freed while gradients for them may be pending (`pin` to `unpin`), or within a `transaction`, are
    recycled only afterwards.

    Attributes:
        specs: The T tables, all of one width, element type and optimizer.
        width: Length D of a vector.
        dtype: Element type of the weights.
        optimizer: Name of the optimizer that updates the tables.
        table_names: The tables' names.
        seed: Seed of the first weights.
        num_rows: Rows V for which memory is allocated.
        num_defaults: T, the rows at the start of the arena that belong to no key.
        next_row: First row that was never used.
        recycled: int64[n], rows that were freed, in the order in which they are allocated again.
        generation: Number that increases when rows that were freed while pinned can be allocated again.
        attached: Token of the row optimizer that the state belongs to.
        lock: Lock to hold while rows are allocated or freed, since tables share the recycled ones.
        transaction: Transaction of changes to the keys of the tables; it holds the lock.

    Args:
        specs: The tables.
        seed: Seed of the first weights, which depend on table name, key and seed only.

    Raises:
        ConfigError: No table, or tables of several widths, element types or optimizers.
        StorageError: Not enough memory.
    """

    def __init__(self, specs: Sequence[DynamicTableSpec], *, seed: int = 0) -> None:
        self.specs = tuple(specs)
        self.width, self.dtype, self.optimizer = shared_row_type(specs)
        self.table_names = tuple(spec.name for spec in specs)
        self.seed = seed
        self.num_rows = 0
        self.num_defaults = len(specs)
        self.next_row = len(specs)
        self.recycled = torch.empty(0, dtype=torch.int64)
        self.generation = 0
        self.lock = threading.RLock()
        self.transaction = Transaction(self.lock)
        self._is_pinned = False
        self.attached: object = None
        self._freed_while_pinned: list[Tensor] = []
        memory.require(4 * self.num_defaults * self.width, f"default rows of dynamic tables {self._names()}")
        self._defaults = torch.stack([torch.tensor(spec.default).expand(self.width) for spec in specs])
        self._weights = GrowingTensor((self.width,), self.dtype, torch.device("cpu"))
        self._state: dict[str, GrowingTensor] = {}
        self._fills: dict[str, float] = {}
        self._uses: dict[str, GrowingTensor] = {}
        self._grow(self.next_row, "the default rows")
        self.reset_defaults()

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.weights.device

    @property
    def weights(self) -> Tensor:
        """Weights [V, D] of `dtype`; in host memory always at one address."""
        return self._weights.tensor

    @property
    def state(self) -> dict[str, Tensor]:
        """Name -> optimizer state [V, D] or [V]; empty until `attach_state`."""
        return {name: held.tensor for name, held in self._state.items()}

    @property
    def uses(self) -> Mapping[str, Tensor]:
        """Name -> tracked use of each row [V]; has the names that `track` was called for."""
        return {name: held.tensor for name, held in self._uses.items()}

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's weights, state and uses."""
        return sum(held.row_bytes for held in self._blocks())

    @property
    def memory_bytes(self) -> int:
        """Bytes of all rows for which memory is allocated."""
        return self.num_rows * self.row_bytes

    def attach_state(
        self, shapes: Sequence[tuple[str, tuple[int, ...]]], *, fills: Mapping[str, float] | None = None
    ) -> None:
        """Allocate an optimizer's state in place of any former one.

        Args:
            shapes: Name and shape [V, ...] of each state tensor, as ``ops.row_update.state_shapes`` returns them.
            fills: State -> its initial value, also of rows that are inserted later; 0 for other states.

        Raises:
            StorageError: Not enough memory.
        """
        self._state = {}
        for name, shape in shapes:
            held = GrowingTensor(tuple(shape[1:]), state_dtype(name), self.device)
            self._require(self.num_rows * held.row_bytes, f"optimizer state {name!r}")
            held.grow(self.num_rows)
            self._state[name] = held
            self._fills[name] = (fills or {}).get(name, 0.0)
            held.tensor[: self.next_row] = self._fills[name]

    def track(self, name: str, dtype: torch.dtype) -> None:
        """Add ``uses[name]``: a number of `dtype` for each row, 0 at first."""
        if name not in self._uses:
            self._uses[name] = GrowingTensor((), dtype, self.device)
            self._uses[name].grow(self.num_rows)

    def allocate_rows(self, count: int, purpose: str) -> Tensor:
        """Allocate rows for the next `count` keys, with initial state; the caller writes the weights.

        Args:
            count: Number of rows.
            purpose: Use of the rows, for the error.

        Returns:
            int64[count]: from `recycled`, then from `next_row` on.

        Raises:
            StorageError: Not enough memory; nothing has changed.
        """
        reused = min(count, self.recycled.numel())
        end = self.next_row + count - reused
        self._grow(end, purpose)
        recycled, first, again = self.recycled, self.next_row, self.recycled[:reused]
        self.recycled, self.next_row = recycled[reused:], end
        self.transaction.on_rollback(lambda: self._restore_rows(recycled, first))
        for name, held in (*self._state.items(), *self._uses.items()):
            fill = self._fills.get(name, 0.0)
            held.tensor[again] = fill
            if fill:  # rows that were never used are zero
                held.tensor[first:end] = fill
        return torch.cat([again, torch.arange(first, end, device=self.device)])

    def make_room(self, count: int, *, freed: int, purpose: str) -> None:
        """Allocate memory for `count` rows after `freed` are freed.

        Raises:
            StorageError: Not enough memory; nothing has changed.
        """
        reused = self.recycled.numel() + (0 if self._is_pinned else freed)
        self._grow(self.next_row + max(0, count - reused), purpose)

    def free_rows(self, rows: Tensor) -> None:
        """Free ``rows int64[n]``, whose keys were removed."""
        self.transaction.on_commit(lambda: self._recycle(rows))

    def pin(self) -> None:
        """Stop recycling freed rows once the `transaction` ends: a backward pass may still use them."""
        self.transaction.on_commit(self._begin_pin)

    def unpin(self) -> None:
        """Recycle the rows that were freed since `pin`: their gradients have been applied or dropped."""
        with self.lock:
            self._is_pinned = False
            if self._freed_while_pinned:
                self.recycled = torch.cat([self.recycled, *self._freed_while_pinned])
                self._freed_while_pinned = []
                self.generation += 1

    def reset_defaults(self) -> None:
        """Restore the default rows and their state after an update changed them."""
        self.weights[: len(self.specs)] = self._defaults
        for name, held in self._state.items():
            held.tensor[: len(self.specs)] = self._fills[name]

    def move(self, device: torch.device) -> None:
        """Move all tensors to `device`.

        Raises:
            ConfigError: A device without memory.
            StorageError: Not enough memory there.
        """
        if device == self.device:
            return
        check_has_memory(device)
        weights = self._weights.to(device)
        state = {name: held.to(device) for name, held in self._state.items()}
        uses = {name: held.to(device) for name, held in self._uses.items()}
        self._weights, self._state, self._uses = weights, state, uses
        self._defaults, self.recycled = self._defaults.to(device), self.recycled.to(device)
        self._freed_while_pinned = [rows.to(device) for rows in self._freed_while_pinned]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("lock", "transaction")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        lock = threading.RLock()
        vars(self).update(state, lock=lock, transaction=Transaction(lock))

    def _restore_rows(self, recycled: Tensor, next_row: int) -> None:
        self.recycled, self.next_row = recycled, next_row

    def _recycle(self, rows: Tensor) -> None:
        if self._is_pinned:
            self._freed_while_pinned.append(rows)
        else:
            self.recycled = torch.cat([self.recycled, rows])

    def _begin_pin(self) -> None:
        self._is_pinned = True

    def _blocks(self) -> list[GrowingTensor]:
        return [self._weights, *self._state.values(), *self._uses.values()]

    def _grow(self, rows: int, purpose: str) -> None:
        """Allocate memory for at least `rows` rows."""
        if rows <= self.num_rows:
            return
        spare = max(self.num_rows // _GROWTH, _FEWEST_BYTES // self.row_bytes)
        target = max(rows, self.num_rows + spare)
        self._require((target - self.num_rows) * self.row_bytes, purpose)
        try:
            for held in self._blocks():
                held.grow(target)
        except StorageError as error:
            for held in self._blocks():
                held.tensor = held.tensor[: self.num_rows]
            raise StorageError(f"{purpose}: {error}") from None
        self.num_rows = target

    def _require(self, num_bytes: int, purpose: str) -> None:
        if self.device.type == "cpu":
            memory.require(num_bytes, f"{purpose}, dynamic table{'s' * (len(self.specs) > 1)} {self._names()}")

    def _names(self) -> str:
        shown = ", ".join(repr(name) for name in self.table_names[:3])
        return shown if len(self.table_names) <= 3 else f"{shown}, ... ({len(self.table_names)})"
