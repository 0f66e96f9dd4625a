# SPDX-License-Identifier: Apache-2.0
"""Parts of a split: consecutive row groups, each with the distinct keys that it holds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.formats.container import read_tensors, write_tensors
from terarec.formats.shard import Shard, open_shard
from terarec.io.files import read_versioned_json, write_versioned_json
from terarec.ragged import flat_values
from terarec.spec import DatasetSpec, checks, from_data, to_data

_logger = logging.getLogger(__name__)

PARTS_FILE = "_parts.json"
"""Description of the parts in the directory of their split; like all other files that begin with "_", no shard."""
_FORMAT = "terarec.parts"
_VERSION = 1
_MERGED_AT = 1 << 22  # keys of a column that wait to be merged: 32 MiB


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSpec(checks.Checked):
    """Consecutive row groups of a split.

    Attributes:
        groups: Number of row groups.
        rows: Samples in them.
        keyset: File of their keys in the directory of the split; None where none was written.
        sha256: Checksum of that file.
    """

    groups: checks.PositiveInt
    rows: checks.NonNegativeInt
    keyset: checks.InnerPath | None = None
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsSpec:
    """Parts of a split, in the order of its samples: the content of its parts file."""

    parts: tuple[PartSpec, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            checks.reject(self, "parts", "got none, expected at least one")


def write_parts(
    spec: DatasetSpec, directory: Path, split: str, count: int, *, keysets: bool = True
) -> tuple[PartSpec, ...]:
    """Divide a split into parts of about equally many samples and write their description, and the keys of each.

    Samples stay where they are: a part is a range of row groups.

    Args:
        spec: Description of the data set.
        directory: Directory of the data set.
        split: Split to divide.
        count: Number of parts. Where the split has fewer row groups, each is a part, and a warning says so.
        keysets: Whether to write the distinct keys of each part.

    Raises:
        ConfigError: No such split, one without samples, or a count below 1.
        FormatError: A shard does not hold what `spec` promises.
        StorageError: The disk is full.
    """
    groups = [(shard, index) for shard in _open(spec, directory, split) for index in range(len(shard.group_rows))]
    if count < 1 or not groups:
        raise ConfigError("parts", f"got {count} for split {split!r} of {len(groups)} row groups, expected at least 1")
    if count > len(groups):
        _logger.warning("parts: %d requested, split %r has %d row groups", count, split, len(groups))
        count = len(groups)
    parts = []
    for number, (start, stop) in enumerate(_ranges([shard.group_rows[index] for shard, index in groups], count)):
        mine = groups[start:stop]
        file = digest = None
        if keysets:
            file = f"_part-{number:05d}.keyset"
            # Before the description that names it, which is written last.
            digest = write_tensors(directory / split / file, _distinct_keys(spec, mine))
        rows = sum(shard.group_rows[index] for shard, index in mine)
        parts.append(PartSpec(groups=len(mine), rows=rows, keyset=file, sha256=digest))
    parts_spec = PartsSpec(parts=tuple(parts))
    write_versioned_json(directory / split / PARTS_FILE, _FORMAT, _VERSION, to_data(parts_spec))
    return parts_spec.parts


def read_parts(directory: Path, split: str) -> tuple[PartSpec, ...]:
    """Read the parts of a split.

    Raises:
        DataNotFoundError: The split has no parts.
        FormatError: Their description is damaged.
    """
    path = directory / split / PARTS_FILE
    if not path.is_file():
        raise DataNotFoundError(
            directory, f"split {split!r} has no parts, expected a data set that was prepared with parts=N"
        )
    try:
        return from_data(PartsSpec, read_versioned_json(path, _FORMAT, _VERSION)).parts
    except ConfigError as error:
        raise FormatError(path, f"{error}") from None


def read_part_keys(directory: Path, split: str, part: PartSpec) -> dict[str, NDArray[np.int64]]:
    """Read the distinct keys of a part: column -> int64[n], ascending.

    Raises:
        DataNotFoundError: The part has no keyset, or the file is missing.
        FormatError: The file is damaged.
    """
    if part.keyset is None:
        raise DataNotFoundError(directory, f"a part of split {split!r} has no keyset, expected parts with keysets")
    path = directory / split / part.keyset
    arrays, _ = read_tensors(path, sha256=part.sha256)
    for name, keys in arrays.items():
        if keys.dtype != np.int64 or keys.ndim != 1:
            raise FormatError(path, f"keys of {name!r} are {keys.dtype}{list(keys.shape)}, expected int64[n]")
    return arrays


def _open(spec: DatasetSpec, directory: Path, split: str) -> list[Shard]:
    return [open_shard(spec, directory / entry.file, entry.rows) for entry in spec.shards(split)]


def _ranges(group_rows: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return the first and the last group (exclusive) of each part, none of them empty, of nearly equal rows."""
    ends = np.asarray([*accumulate(group_rows)], dtype=np.int64)
    cuts = [0]
    for number in range(1, count):
        wanted = ends[-1] * number / count
        nearest = int(np.abs(ends - wanted).argmin()) + 1
        # At least one group for this part, and one for each that follows.
        cuts.append(min(max(nearest, cuts[-1] + 1), len(ends) - (count - number)))
    return list(zip(cuts, [*cuts[1:], len(ends)], strict=True))


def _distinct_keys(spec: DatasetSpec, groups: Sequence[tuple[Shard, int]]) -> Mapping[str, NDArray[np.int64]]:
    waiting: list[list[NDArray[np.int64]]] = [[] for _ in spec.categorical]
    for shard, index in groups:
        for pieces, column in zip(waiting, shard.read_group(index).keys, strict=True):
            # Distinct group by group, and merged when more wait than are merged: each key is sorted a few times only.
            pieces.append(np.unique(flat_values(column)).astype(np.int64, copy=False))
            if sum(len(piece) for piece in pieces[1:]) > max(_MERGED_AT, len(pieces[0])):
                pieces[:] = [np.unique(np.concatenate(pieces))]
    return {
        column.name: np.unique(np.concatenate([np.empty(0, np.int64), *pieces]))
        for column, pieces in zip(spec.categorical, waiting, strict=True)
    }
