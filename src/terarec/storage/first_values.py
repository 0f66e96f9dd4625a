"""`FirstValues`: the weights and states of rows that no tier holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from terarec.kernels.rows import initialise_keys
from terarec.kernels.slots import RowBatch
from terarec.spec import DynamicTableSpec, TableSpec
from terarec.storage.arena import first_scale
from terarec.storage.row_levels import by_table


class FirstValues:
    """First weights, which depend on table, key and seed alone, and initial states.

    Attributes:
        seeds: Seed of each table's first weights.
        fills: State -> its initial value.
        keys_of: Number of a table -> function that gives the keys by which rows are drawn, for tables whose keys here
            are other numbers; set by whoever gave them these numbers.

    Args:
        specs: Tables of an arena.
        seed: Seed of all of them.
    """

    def __init__(self, specs: Sequence[TableSpec | DynamicTableSpec], seed: int) -> None:
        self.seeds = [seed] * len(specs)
        self.fills: dict[str, float] = {}
        self.keys_of: dict[int, Callable[[Tensor], Tensor]] = {}
        self._specs = tuple(specs)

    def write(self, weights: Tensor, state: Mapping[str, Tensor], places: Tensor, batch: RowBatch) -> None:
        """Write the first values of the rows of a batch to the ``places int64[n]`` of tensors."""
        for name, held in state.items():
            held[places] = self.fills[name]
        for table, mine in by_table(batch):
            spec, keys = self._specs[table], batch.keys[mine]
            initialise_keys(
                weights,
                places[mine],
                self.keys_of[table](keys) if table in self.keys_of else keys,
                table=spec.name,
                seed=self.seeds[table],
                initializer=spec.initializer,
                scale=first_scale(spec) if isinstance(spec, TableSpec) else spec.init_scale,
            )
