# SPDX-License-Identifier: Apache-2.0
"""Random samples of a layout as HugeCTR's files: keys, numbers, and labels that a known model may have drawn."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from terarec.apps.synthetic.raw_log import pack, packed_auc
from terarec.formats.block import Keys
from terarec.formats.dataset import METADATA_FILE, write_parquet_metadata
from terarec.formats.hugectr import write_file_list
from terarec.formats.hugectr.split_writer import add_key_offsets, create_writer
from terarec.ragged import Ragged, offsets_of
from terarec.spec import RecordLayout, RecordsSpec, SparseInput, checks
from terarec.spec.checks import FieldError
from terarec.spec.dataset import RecordKind

_FREQUENT = 32
"""Keys of a slot with an effect, the first ones: power laws make them frequent enough for a model to fit."""
_DEVIATION = 2.0
"""Standard deviation of the logit; gives a best AUC of about 0.85."""


@dataclass(frozen=True, slots=True)
class PlantedModel:
    """Model of P(label) = sigmoid(bias + sum of dense * weight + sum of the keys' effects), for each label.

    Attributes:
        weights: float64[L, F].
        effects: Effects of each slot's keys, float64[L, keys with an effect + 1]; the last one is that of all others.
        bias: float64[L].
    """

    weights: NDArray[np.float64]
    effects: tuple[NDArray[np.float64], ...]
    bias: NDArray[np.float64]

    def logits(self, dense: NDArray[np.float32], keys: Sequence[Keys]) -> NDArray[np.float64]:
        """Return float64[n, L] for samples with ``dense[n, F]`` and keys that start at 0 in each slot."""
        logits = np.tile(self.bias, (len(dense), 1)) + dense @ self.weights.T
        for column, effects in zip(keys, self.effects, strict=True):
            values, offsets = column if isinstance(column, Ragged) else (column, None)
            # All keys beyond the frequent ones share the last entry.
            of_keys = effects[:, np.minimum(values, effects.shape[1] - 1)]
            if offsets is None:
                logits += of_keys.T
            else:
                # Differences of running sums: `np.add.reduceat` would give an empty list the value after it.
                sums = np.concatenate([np.zeros((len(effects), 1)), np.cumsum(of_keys, axis=1)], axis=1)
                logits += (sums[:, offsets[1:]] - sums[:, offsets[:-1]]).T
        return logits


def plant(
    layout: RecordLayout, generator: np.random.Generator, pilot: tuple[NDArray[np.float32], Sequence[Keys]]
) -> PlantedModel:
    """Draw a model, scaled on the `pilot` samples (dense, keys) to a fixed spread and balanced labels.

    Args:
        layout: Layout of a sample, with the sizes of its slots.
        generator: Source of the model's numbers.
        pilot: Samples like those that will be labelled.
    """
    weights = generator.standard_normal((layout.label_dim, layout.dense_dim))
    sizes = [min(size, _FREQUENT) for size in layout.slot_sizes[: layout.num_slots]]
    effects = [generator.standard_normal((layout.label_dim, size + 1)) for size in sizes]
    # Rare keys have no effect: a model could not fit it from so few samples.
    for table in effects:
        table[:, -1] = 0.0
    raw = PlantedModel(weights, tuple(effects), np.zeros(layout.label_dim)).logits(*pilot)
    scale = _DEVIATION / np.maximum(raw.std(axis=0), 1e-6)
    return PlantedModel(
        weights=weights * scale[:, None],
        effects=tuple(table * scale[:, None] for table in effects),
        bias=-raw.mean(axis=0) * scale,
    )


_PILOT_ROWS = 8192
_INTEGERS_BELOW = 100
# Spawn keys of the random numbers: a stream of its own for each use, so that none depends on how much another draws.
_MODEL_STREAM, _PILOT_STREAM, _ROW_STREAM = 0, 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordGenerator:
    """Description of the samples to draw. Equal generators draw equal samples.

    Norm and Parquet: labels and dense numbers uniform in [0, 1). Raw and RawAsync: label i % 2 for sample i, dense
    number j for column j. With `is_planted` labels are 0 or 1, drawn from a known logistic model of dense numbers and
    keys, and dense numbers vary in every format.

    Attributes:
        kind: "norm", "parquet", "raw" or "raw_async".
        layout: Layout of a sample; its `slot_sizes` are the keys to draw from.
        alpha: Keys k of a slot of size n occur about as (k + 1)^-alpha; None for all alike.
        checksum: Whether Norm files have checksums.
        float_label_dense: Whether Raw files hold labels and dense numbers, and RawAsync files dense ones, as float32.
        is_length_random: Whether, in Norm files, a slot holds a random number of keys from 1 to the layout's, as it
            always does in Parquet files; otherwise as many as the layout says.
        is_planted: Whether labels follow a planted model.
        seed: Seed of all random numbers.
    """

    kind: RecordKind
    layout: RecordLayout
    alpha: Annotated[float, checks.number(0.0, 100.0, open_low=True)] | None = 1.2
    checksum: bool = True
    float_label_dense: bool = False
    is_length_random: bool = False
    is_planted: bool = False
    seed: checks.NonNegativeInt = 0

    def __post_init__(self) -> None:
        checks.check_fields(self)
        sizes = self.layout.slot_sizes
        if len(sizes) != self.layout.num_slots or any(size < 1 for size in sizes):
            expected = f"a size >= 1 for each of {self.layout.num_slots} slots"
            checks.reject(self, "layout", f"got slot_sizes {list(sizes)}, expected {expected}")

    @property
    def holds_integers(self) -> bool:
        """True if the files hold dense numbers as integers, of which a reader takes ln(x + 1)."""
        return self.kind in ("raw", "raw_async") and not self.float_label_dense


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnRows:
    """Samples as files hold them.

    Attributes:
        label: float32[n, L].
        dense: float32[n, F], integers where the files hold integers.
        keys: Keys of each slot, from 0 on.
        probabilities: float32[n, L] of label 1 where labels are planted.
    """

    label: NDArray[np.float32]
    dense: NDArray[np.float32]
    keys: tuple[Keys, ...]
    probabilities: NDArray[np.float32] | None


class RowSource:
    """Source of the samples of a `RecordGenerator`, any range of them on its own."""

    def __init__(self, generator: RecordGenerator) -> None:
        self._generator = generator
        self._model: PlantedModel | None = None
        if generator.is_planted:
            pilot = self._random(_PILOT_STREAM)
            dense, keys = self._features(pilot, _PILOT_ROWS)
            self._model = plant(generator.layout, self._random(_MODEL_STREAM), (self._decoded(dense), keys))

    def draw(self, split: str, first: int, count: int) -> DrawnRows:
        """Draw the samples `first` to ``first + count`` of `split`; `first` and `count` are part of the seed."""
        # Not hash(), which Python salts again in every process.
        random = self._random(_ROW_STREAM, zlib.crc32(split.encode()), first, count)
        dense, keys = self._features(random, count)
        probabilities = None
        if self._model is not None:
            logits = self._model.logits(self._decoded(dense), keys)
            probabilities = (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)
            # Against the float32 that are packed, so that the AUC is that of the labels drawn.
            label = (random.random(logits.shape) < probabilities).astype(np.float32)
        elif self._generator.kind in ("norm", "parquet"):
            label = random.random((count, self._generator.layout.label_dim), dtype=np.float32)
        else:
            ones = np.ones((1, self._generator.layout.label_dim), dtype=np.float32)
            label = (np.arange(first, first + count) % 2).astype(np.float32)[:, None] * ones
        return DrawnRows(label=label, dense=dense, keys=keys, probabilities=probabilities)

    def _random(self, *stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(self._generator.seed, spawn_key=stream)))

    def _decoded(self, dense: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return dense numbers as a reader returns them."""
        return np.log1p(dense) if self._generator.holds_integers else dense

    def _features(self, random: np.random.Generator, count: int) -> tuple[NDArray[np.float32], tuple[Keys, ...]]:
        generator = self._generator
        width = generator.layout.dense_dim
        if generator.kind in ("norm", "parquet") or (generator.is_planted and not generator.holds_integers):
            dense = random.random((count, width), dtype=np.float32)
        elif generator.is_planted:
            dense = random.integers(0, _INTEGERS_BELOW, (count, width)).astype(np.float32)
        else:
            dense = np.tile(np.arange(width, dtype=np.float32), (count, 1))
        keys = tuple(
            self._slot(random, count, size, most)
            for size, most in zip(generator.layout.slot_sizes, generator.layout.most_keys, strict=True)
        )
        return dense, keys

    def _slot(self, random: np.random.Generator, count: int, size: int, most: int) -> Keys:
        generator = self._generator
        if most == 1 or generator.kind == "raw":
            return draw_keys(random, count, size, generator.alpha)
        is_random = generator.kind == "parquet" or (generator.kind == "norm" and generator.is_length_random)
        lengths = random.integers(1, most + 1, count) if is_random else np.full(count, most)
        offsets = offsets_of(lengths)
        return Ragged(draw_keys(random, int(offsets[-1]), size, generator.alpha), offsets)


def draw_keys(random: np.random.Generator, count: int, size: int, alpha: float | None) -> NDArray[np.int64]:
    """Draw keys int64[count] from 0 to ``size - 1``.

    With `alpha` a, y is drawn from 1 to size with density proportional to y^-a, as the inverse of its distribution at a
    uniform number, and the key is y rounded, less 1.
    """
    if alpha is None:
        return random.integers(0, size, count)
    uniform = random.random(count)
    if alpha == 1.0:
        # The limit of the formula below.
        drawn = np.exp(uniform * np.log(size))
    else:
        power = 1.0 - alpha
        drawn = ((float(size) ** power - 1.0) * uniform + 1.0) ** (1.0 / power)
    # Floating-point errors may carry y beyond 1 or size.
    keys: NDArray[np.int64] = np.clip(np.rint(drawn).astype(np.int64) - 1, 0, size - 1)
    return keys


_BLOCK_ROWS = 16_384
"""Samples drawn and written at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedRecords:
    """Report of a generation.

    Attributes:
        files: The data files, in order.
        rows: Number of samples in all files.
        best_auc: The AUC of the true probabilities against the labels drawn, the mean over labels; None unless they are
            planted.
    """

    files: tuple[str, ...]
    rows: int
    best_auc: float | None


def generate_records(
    generator: RecordGenerator, path: Path, *, split: str = "train", num_files: int = 1, rows_per_file: int
) -> GeneratedRecords:
    """Write the samples of `split`; other splits have other samples of the same planted model.

    Args:
        generator: Samples to draw, and their format.
        path: Norm and Parquet: of the file list; the files go to ``<its directory>/<split>/gen_0.data`` (or
            ``.parquet``) and so on. Raw and RawAsync: of the only file.
        split: "train", "val" or any other name.
        num_files: Number of data files.
        rows_per_file: Samples of each file.

    Raises:
        ConfigError: A number out of range, or more than one Raw file.
        FormatError: A layout that the format cannot have.
        StorageError: The disk is full.
    """
    for name, value in (("num_files", num_files), ("rows_per_file", rows_per_file)):
        checks.argument(name, value, checks.integer(1, checks.MOST_BATCH))
    is_listed = generator.kind in ("norm", "parquet")
    if not is_listed and num_files != 1:
        raise FieldError("", "num_files", f"got {num_files}, expected 1 file of kind {generator.kind!r}")
    suffix = "parquet" if generator.kind == "parquet" else "data"
    directory = path.parent / split
    files = [directory / f"gen_{index}.{suffix}" for index in range(num_files)] if is_listed else [path]
    rows, description = RowSource(generator), _describe(generator)
    packed: list[NDArray[np.uint32]] = []
    offsets = generator.layout.key_offsets
    for index, file in enumerate(files):
        with create_writer(file, description) as writer:
            for drawn in _blocks(rows, split, index * rows_per_file, rows_per_file):
                # Norm files hold keys with the offsets of their slots; readers of the other formats add them.
                keys = add_key_offsets(drawn.keys, offsets) if generator.kind == "norm" else drawn.keys
                writer.write(drawn.label, drawn.dense, keys)
                if drawn.probabilities is not None:
                    packed.append(pack(drawn.probabilities, drawn.label.astype(np.uint8)))
            writer.close()
    if generator.kind == "parquet":
        stats = [(str(file), rows_per_file) for file in files]
        names = description.label_names, description.dense_names, description.key_names
        write_parquet_metadata(directory / METADATA_FILE, stats, *names)
    if is_listed:
        write_file_list(path, files)
    return GeneratedRecords(
        files=tuple(map(str, files)), rows=num_files * rows_per_file, best_auc=_best_auc(packed) if packed else None
    )


def _describe(generator: RecordGenerator) -> RecordsSpec:
    """Name the columns: ``label<i>``, and ``C<i>`` for dense numbers and slots, i counting over all columns."""
    layout = generator.layout
    first_key = layout.label_dim + layout.dense_dim
    inputs = tuple(
        SparseInput(name=f"C{first_key + slot}", nnz_per_slot=(most,), is_fixed_length=True)
        for slot, most in enumerate(layout.most_keys)
    )
    return RecordsSpec(
        kind=generator.kind,
        layout=dataclasses.replace(layout, inputs=inputs),
        splits={},
        label_names=tuple(f"label{index}" for index in range(layout.label_dim)),
        dense_names=tuple(f"C{index}" for index in range(layout.label_dim, first_key)),
        checksum=generator.checksum,
        float_label_dense=generator.float_label_dense,
    )


def _blocks(rows: RowSource, split: str, first: int, count: int) -> Iterator[DrawnRows]:
    for start in range(first, first + count, _BLOCK_ROWS):
        yield rows.draw(split, start, min(_BLOCK_ROWS, first + count - start))


def _best_auc(packed: list[NDArray[np.uint32]]) -> float:
    """Return the mean of the labels' AUCs."""
    columns = np.concatenate(packed).T
    return float(np.mean([packed_auc(np.ascontiguousarray(column)) for column in columns]))
