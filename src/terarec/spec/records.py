"""What a sample of HugeCTR's data files holds: labels, dense numbers, and the slots of its sparse inputs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from terarec.spec import checks


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseInput:
    """Some slots of a sample, read together under one name.

    Attributes:
        name: of the input; its slots are the features ``<name>.0``, ``<name>.1``, ...
        nnz_per_slot: per slot, the most keys that a sample holds.
        is_fixed_length: a promise that every sample holds the same number of keys. Files that tell the numbers are
            believed instead; only RawAsync needs it, and then takes exactly `nnz_per_slot` keys.
    """

    name: str
    nnz_per_slot: tuple[int, ...]
    is_fixed_length: bool

    def __post_init__(self) -> None:
        checks.name(self)
        checks.widths(self, "nnz_per_slot")
        checks.one_of(self, "is_fixed_length", (False, True))

    @property
    def slot_num(self) -> int:
        """Number of slots."""
        return len(self.nnz_per_slot)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordLayout:
    """The columns of HugeCTR's data files. The files themselves do not name them.

    Attributes:
        label_dim: labels of a sample.
        dense_dim: dense numbers of a sample.
        inputs: the sparse inputs, in the order in which a sample holds their slots.
        key_bytes: 4 or 8 bytes a key.
        slot_sizes: distinct keys of each slot, for the formats whose reader adds the sizes of the slots before to every
            key; empty adds nothing.
    """

    label_dim: int
    dense_dim: int
    inputs: tuple[SparseInput, ...]
    key_bytes: int = 4
    slot_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        checks.positive_int(self, "label_dim")
        checks.positive_int(self, "dense_dim", minimum=0)
        checks.one_of(self, "key_bytes", (4, 8))
        checks.distinct(self, "inputs", [sparse.name for sparse in self.inputs])
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in self.slot_sizes):
            checks.fail(self, "slot_sizes", "integers >= 0")
        if self.slot_sizes and len(self.slot_sizes) < self.num_slots:
            problem = (
                f"got {len(self.slot_sizes)} sizes for {self.num_slots} slots, expected one for each slot, or none"
            )
            checks.refuse(self, "slot_sizes", problem)

    @property
    def num_slots(self) -> int:
        """Slots of all inputs together, S."""
        return sum(sparse.slot_num for sparse in self.inputs)

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The features' names, ``<input>.<slot>``, in the order of the files."""
        return tuple(f"{sparse.name}.{slot}" for sparse in self.inputs for slot in range(sparse.slot_num))

    @property
    def most_keys(self) -> tuple[int, ...]:
        """Per slot, the most keys that a sample holds."""
        return tuple(count for sparse in self.inputs for count in sparse.nnz_per_slot)

    @property
    def key_offsets(self) -> tuple[int, ...]:
        """Per slot, the sum of the sizes of the slots before it; zeros without `slot_sizes`."""
        sums = tuple(accumulate(self.slot_sizes, initial=0))
        return sums[: self.num_slots] if self.slot_sizes else (0,) * self.num_slots
