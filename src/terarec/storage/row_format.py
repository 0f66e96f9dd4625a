"""`RowFormat`: the weights and optimizer state of a row as bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from terarec.errors import FormatError
from terarec.storage.row_file_layout import RowColumn

_ALIGNMENT = 4
_FEWEST_BYTES = 16  # of a row in a row store
_WEIGHTS = "weights"


class RowFormat:
    """A row as bytes: its weights, then its states, each from a multiple of 4 bytes on.

    Attributes:
        width: Length D of a vector.
        dtype: Element type of the weights.
        states: Name -> element type and shape of a row's state.
        num_bytes: Bytes of a row, at least 16.
        offsets: Where the weights and each state begin in a row.

    Args:
        width: As above.
        dtype: As above.
        states: As above.
    """

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        states: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] | None = None,
    ) -> None:
        self.width = width
        self.dtype = dtype
        self.states = dict(states or {})
        self._parts: list[tuple[str, torch.dtype, tuple[int, ...], int, int]] = []
        end = 0
        for name, (of_part, shape) in {"": (dtype, (width,)), **self.states}.items():
            size = math.prod(shape) * of_part.itemsize
            self._parts.append((name, of_part, shape, end, size))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = max(end, _FEWEST_BYTES)
        self.offsets = tuple(begin for *_, begin, _ in self._parts)
        self._is_dense = sum(size for *_, size in self._parts) == self.num_bytes

    @classmethod
    def of_columns(cls, columns: Sequence[RowColumn]) -> RowFormat:
        """Return the format whose `columns` these are.

        Raises:
            FormatError: Columns of something else.
        """
        shapes = [column.shape for column in columns]
        if not columns or columns[0].name != _WEIGHTS or len(shapes[0]) != 1 or any(len(shape) > 1 for shape in shapes):
            names = ", ".join(f"{column.name} {list(column.shape)}" for column in columns)
            raise FormatError("columns", f"got {names or 'none'}, expected weights [D] and optimizer states")
        types = [getattr(torch, column.dtype) for column in columns]
        states = {column.name: (of, column.shape) for column, of in zip(columns[1:], types[1:], strict=True)}
        return cls(shapes[0][0], types[0], states)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The optimizer states beside the weights."""
        return tuple(self.states)

    def columns(self) -> tuple[RowColumn, ...]:
        """Return the parts of a row, in the order of its bytes."""
        return tuple(
            RowColumn(name=name or _WEIGHTS, dtype=str(of).removeprefix("torch."), shape=shape)
            for name, of, shape, *_ in self._parts
        )

    def new_rows(self, rows: int) -> Tensor:
        """Return uint8[rows, num_bytes] in host memory; bytes between the parts of a row are 0."""
        make = torch.empty if self._is_dense else torch.zeros
        return make(rows, self.num_bytes, dtype=torch.uint8)

    def pack(self, weights: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return rows as uint8[n, num_bytes] in host memory.

        Args:
            weights: [n, D] in host memory.
            state: Name -> state [n, ...] in host memory.
        """
        values = self.new_rows(weights.shape[0])
        for (name, *_), part in zip(self._parts, self._views(values), strict=True):
            part.copy_(state[name] if name else weights)
        return values

    def unpack(self, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weights [n, D] and states of ``values uint8[n, num_bytes]``, which share its memory."""
        weights, *states = self._views(values)
        return weights, dict(zip(self.states, states, strict=True))

    def empty(self, rows: int, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
        """Return weights [rows, D] and states of any values."""
        weights = torch.empty(rows, self.width, dtype=self.dtype, device=device)
        return weights, {
            name: torch.empty(rows, *shape, dtype=dtype, device=device) for name, (dtype, shape) in self.states.items()
        }

    def _views(self, values: Tensor) -> list[Tensor]:
        rows = values.shape[0]
        return [
            values[:, begin : begin + size].view(dtype).view(rows, *shape)
            for _, dtype, shape, begin, size in self._parts
        ]
