"""What a sample of HugeCTR's data files holds: labels, dense numbers, and the slots of its sparse inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from terarec.errors import ConfigError
from terarec.spec import checks

RECORD_KINDS = ("norm", "parquet", "raw", "raw_async")
KEY_FORMS = ("columns", "as_read", "with_offsets")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordSplit:
    """Where the samples of a split lie.

    Attributes:
        path: of the file list (Norm, Parquet) or of the file; relative to ``records.json``, absolute, or a URL.
        rows: its samples.
    """

    path: str
    rows: int

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            checks.fail(self, "path", "the path of a file")
        checks.positive_int(self, "rows", minimum=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordsSpec:
    """HugeCTR's files that belong together: the content of ``records.json``.

    Attributes:
        kind: the files' format.
        layout: what a sample holds.
        splits: split name ("train", "valid") -> where its samples lie.
        label_names: of the labels, in order.
        dense_names: of the dense numbers, in order.
        checksum: whether Norm files have checksums.
        float_label_dense: whether Raw files hold labels and dense numbers, and RawAsync files dense ones, as float32.
        keys: What batches hold: "columns" for keys from 0 on in each slot; "as_read" for what the files hold, where
            `slot_sizes` of the layout are bounds, 0 for none; "with_offsets" for what HugeCTR's hash tables see, with
            the sizes of the slots before added to the keys of Parquet and Raw files.
        multi_hot: Whether RawAsync files hold `nnz_per_slot` keys a slot and int32 labels; otherwise they are laid out
            as Raw files.
        shuffles_rows: Whether shuffling mixes the samples of several groups; otherwise whole groups move, as in
            HugeCTR.
    """

    kind: Literal["norm", "parquet", "raw", "raw_async"]
    layout: RecordLayout
    splits: Mapping[str, RecordSplit]
    label_names: tuple[str, ...]
    dense_names: tuple[str, ...]
    checksum: bool = True
    float_label_dense: bool = True
    keys: Literal["columns", "as_read", "with_offsets"] = "columns"
    multi_hot: bool = True
    shuffles_rows: bool = True

    def __post_init__(self) -> None:
        checks.one_of(self, "kind", RECORD_KINDS)
        checks.one_of(self, "keys", KEY_FORMS)
        for name in ("multi_hot", "shuffles_rows"):
            checks.one_of(self, name, (False, True))
        for field, names, expected in (
            ("label_names", self.label_names, self.layout.label_dim),
            ("dense_names", self.dense_names, self.layout.dense_dim),
        ):
            if len(names) != expected:
                checks.refuse(self, field, f"got {len(names)} names, expected {expected} as in the layout")
        checks.distinct(self, "names", self.column_names)

    @property
    def key_names(self) -> tuple[str, ...]:
        """A column name for each slot: the input's own name if that is its only slot."""
        return tuple(
            sparse.name if sparse.slot_num == 1 else f"{sparse.name}.{slot}"
            for sparse in self.layout.inputs
            for slot in range(sparse.slot_num)
        )

    @property
    def column_names(self) -> tuple[str, ...]:
        """Labels, dense numbers and slots, in the order in which files hold them."""
        return (*self.label_names, *self.dense_names, *self.key_names)

    def split(self, name: str) -> RecordSplit:
        """The split `name`; raises `ConfigError` naming those that exist."""
        if name not in self.splits:
            raise ConfigError(f"no split {name!r}, expected one of {', '.join(map(repr, sorted(self.splits)))}")
        return self.splits[name]
