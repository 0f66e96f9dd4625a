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

    A context manager: changes made within the block are undone if the block raises. A block within a block is a part of
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
        """Note a change that was made; `undo` reverts it, once all later changes are reverted."""
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


# What NumPy lends its memory as; it has no bfloat16.
_LENT_AS = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
}


class GrowingTensor:
    """A tensor ``[rows, ...]`` that grows at its end by zeros.

    In host memory it keeps its address: address space for as much as the machine has memory is reserved, and memory
    is taken as rows come. On other devices growing allocates and copies.

    Attributes:
        tensor: the rows there are.
        row_bytes: bytes of a row.

    Args:
        row_shape: shape of a row, ``()`` for a number.
        dtype: one that NumPy can lend.
        device: where the rows are.
    """

    def __init__(self, row_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._row_shape = row_shape
        self.row_bytes = math.prod(row_shape) * dtype.itemsize
        self.tensor = torch.empty(0, *row_shape, dtype=dtype, device=device)
        self._reserved = None
        if device.type == "cpu":
            most = memory.total_bytes() // max(1, self.row_bytes)
            self._reserved = reserve_rows((most, *row_shape), _LENT_AS[dtype])

    def grow(self, rows: int) -> None:
        """Become `rows` rows long, the new ones zero.

        Raises:
            StorageError: no memory for them; nothing has changed then.
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
            StorageError: no memory there.
        """
        return _copied(self._row_shape, self.tensor, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> GrowingTensor:
        twin = self.to(self.tensor.device)
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        # Address space that is reserved cannot be pickled. As a tensor the rows would move to shared memory on their
        # way to another process, and out of that address space.
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
    """Rows of several dynamic tables in the order in which their keys came, and the optimizer state beside them.

    Row t < T is the default row of table t: the vector of keys without a row. `reset_defaults` restores it after every
    update. The rows after those belong to keys, were freed, or were never used.

    Rows that are freed while gradients for them may be pending (`pin` to `unpin`), or within a `transaction`, are
    recycled only afterwards.

    Attributes:
        specs: the T tables, all of one width, element type and optimizer.
        width: length D of a vector.
        dtype: element type of the weights.
        optimizer: name of the rule that moves the tables.
        table_names: the tables' names.
        seed: of the first weights.
        num_rows: rows V that have memory.
        num_defaults: T, the rows at the start of the arena that belong to no key.
        next_row: first row that was never used.
        recycled: int64[n], rows that were freed, in the order in which they are allocated again.
        generation: rises when rows that were freed while pinned can be allocated again.
        attached: token of the row optimizer that the state belongs to.
        lock: held by whoever allocates or frees rows: tables share the recycled ones.
        transaction: changes of the keys of its tables, all or none of which are made; it holds the lock.

    Args:
        specs: the tables.
        seed: of the first weights, which depend on table name, key and seed only.

    Raises:
        ConfigError: no table, or tables of several widths, element types or optimizers.
        StorageError: not enough memory.
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
        """Where the rows are."""
        return self.weights.device

    @property
    def weights(self) -> Tensor:
        """[V, D] of `dtype`; in host memory always at one address."""
        return self._weights.tensor

    @property
    def state(self) -> dict[str, Tensor]:
        """Name -> optimizer state [V, D] or [V]; empty until `attach_state`."""
        return {name: held.tensor for name, held in self._state.items()}

    @property
    def uses(self) -> Mapping[str, Tensor]:
        """Name -> what tables note of a row's use [V]; those that `track` was called for."""
        return {name: held.tensor for name, held in self._uses.items()}

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's weights, state and notes of use."""
        return sum(held.row_bytes for held in self._blocks())

    @property
    def memory_bytes(self) -> int:
        """Bytes of all rows there is memory for."""
        return self.num_rows * self.row_bytes

    def attach_state(
        self, shapes: Sequence[tuple[str, tuple[int, ...]]], *, fills: Mapping[str, float] | None = None
    ) -> None:
        """Allocate an optimizer's state, in place of any former optimizer's.

        Args:
            shapes: name and shape [V, ...] of each state tensor, as ``ops.row_update.state_shapes`` gives them.
            fills: state -> its first value, of later rows too; 0 for those that are not named.

        Raises:
            StorageError: not enough memory.
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
        """Keep a number of `dtype` for each row, from 0, in ``uses[name]``."""
        if name not in self._uses:
            self._uses[name] = GrowingTensor((), dtype, self.device)
            self._uses[name].grow(self.num_rows)

    def allocate_rows(self, count: int, purpose: str) -> Tensor:
        """Allocate rows for the next `count` keys, with fresh state; the caller writes the weights.

        Args:
            count: Number of rows.
            purpose: Use of the rows, for the error.

        Returns:
            int64[count]: from `recycled`, then from `next_row` on.

        Raises:
            StorageError: not enough memory; nothing has changed then.
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
        """Have memory to allocate `count` rows after `freed` were freed.

        Raises:
            StorageError: not enough memory; nothing has changed then.
        """
        reused = self.recycled.numel() + (0 if self._is_pinned else freed)
        self._grow(self.next_row + max(0, count - reused), purpose)

    def free_rows(self, rows: Tensor) -> None:
        """Free ``rows int64[n]``, which no key has any more."""
        self.transaction.on_commit(lambda: self._recycle(rows))

    def pin(self) -> None:
        """Stop recycling freed rows once the `transaction` ends: gradients may come for rows in use."""
        self.transaction.on_commit(self._begin_pin)

    def unpin(self) -> None:
        """Recycle the rows that were freed since `pin`: their gradients have been taken."""
        with self.lock:
            self._is_pinned = False
            if self._freed_while_pinned:
                self.recycled = torch.cat([self.recycled, *self._freed_while_pinned])
                self._freed_while_pinned = []
                self.generation += 1

    def reset_defaults(self) -> None:
        """Restore the default rows and their state, after an update moved them."""
        self.weights[: len(self.specs)] = self._defaults
        for name, held in self._state.items():
            held.tensor[: len(self.specs)] = self._fills[name]

    def move(self, device: torch.device) -> None:
        """Take everything to `device`.

        Raises:
            ConfigError: a device without memory.
            StorageError: not enough memory there.
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
        """Have memory for `rows` rows, and some to spare."""
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
