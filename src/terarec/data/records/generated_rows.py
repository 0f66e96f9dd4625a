"""Random samples of a layout: keys of a power law or uniform, numbers, and labels, planted or not."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from terarec.data.records.planted import PlantedModel, plant
from terarec.errors import ConfigError
from terarec.formats import Keys
from terarec.formats.hugectr import RecordKind
from terarec.spec import RECORD_KINDS, RecordLayout

_PILOT_ROWS = 8192
_INTEGERS_BELOW = 100
_MODEL_STREAM, _PILOT_STREAM, _ROW_STREAM = 0, 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordGenerator:
    """Which samples to draw. Equal generators draw equal samples.

    Norm and Parquet: labels and dense numbers uniform in [0, 1). Raw and RawAsync: label i % 2 for sample i, dense
    number j for column j. With `is_planted` labels are 0 or 1, drawn from a known logistic model of dense numbers and
    keys, and dense numbers vary in every format.

    Attributes:
        kind: "norm", "parquet", "raw" or "raw_async".
        layout: what a sample holds; its `slot_sizes` are the keys to draw from.
        alpha: keys k of a slot of size n occur about as (k + 1)^-alpha; None for all alike.
        checksum: whether Norm files have checksums.
        float_label_dense: whether Raw files hold labels and dense numbers, and RawAsync files dense ones, as float32.
        is_length_random: whether, in Norm files, a slot holds a random number of keys from 1 to the layout's, as it
            always does in Parquet files; otherwise as many as the layout says.
        is_planted: see above.
        seed: of everything.
    """

    kind: RecordKind
    layout: RecordLayout
    alpha: float | None = 1.2
    checksum: bool = True
    float_label_dense: bool = False
    is_length_random: bool = False
    is_planted: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in RECORD_KINDS:
            raise ConfigError(f"RecordGenerator.kind: got {self.kind!r}, expected one of {', '.join(RECORD_KINDS)}")
        sizes = self.layout.slot_sizes
        if len(sizes) != self.layout.num_slots or any(size < 1 for size in sizes):
            raise ConfigError(
                f"RecordGenerator.layout: got slot_sizes {list(sizes)}, "
                f"expected a size >= 1 for each of {self.layout.num_slots} slots"
            )
        if self.alpha is not None and not 0.0 < self.alpha < 100.0:
            raise ConfigError(f"RecordGenerator.alpha: got {self.alpha!r}, expected None or a number above 0 to 100")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError(f"RecordGenerator.seed: got {self.seed!r}, expected an integer >= 0")

    @property
    def holds_integers(self) -> bool:
        """Whether the files hold dense numbers as integers, of which a reader takes ln(x + 1)."""
        return self.kind in ("raw", "raw_async") and not self.float_label_dense


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnRows:
    """Samples as files hold them.

    Attributes:
        label: float32[n, L].
        dense: float32[n, F], whole numbers where files hold integers.
        keys: per slot, from 0 on.
        probabilities: float32[n, L] of label 1 where labels are planted.
    """

    label: NDArray[np.float32]
    dense: NDArray[np.float32]
    keys: tuple[Keys, ...]
    probabilities: NDArray[np.float32] | None


class RowSource:
    """Draws the samples of a `RecordGenerator`, any range of them on its own."""

    def __init__(self, generator: RecordGenerator) -> None:
        self._generator = generator
        self._model: PlantedModel | None = None
        if generator.is_planted:
            pilot = self._random(_PILOT_STREAM)
            dense, keys = self._features(pilot, _PILOT_ROWS)
            self._model = plant(generator.layout, self._random(_MODEL_STREAM), (self._decoded(dense), keys))

    def draw(self, split: str, first: int, count: int) -> DrawnRows:
        """The samples `first` to ``first + count`` of `split`; `first` and `count` are part of the seed."""
        random = self._random(_ROW_STREAM, zlib.crc32(split.encode()), first, count)
        dense, keys = self._features(random, count)
        probabilities = None
        if self._model is not None:
            logits = self._model.logits(self._decoded(dense), keys)
            probabilities = (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)
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
        """Dense numbers as a reader gives them."""
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
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return draw_keys(random, int(offsets[-1]), size, generator.alpha), offsets


def draw_keys(random: np.random.Generator, count: int, size: int, alpha: float | None) -> NDArray[np.int64]:
    """Keys int64[count] from 0 to ``size - 1``.

    With `alpha` a, y is drawn from 1 to size with density proportional to y^-a, as the inverse of its distribution at a
    uniform number, and the key is y rounded, less 1.
    """
    if alpha is None:
        return random.integers(0, size, count)
    uniform = random.random(count)
    if alpha == 1.0:
        drawn = np.exp(uniform * np.log(size))
    else:
        power = 1.0 - alpha
        drawn = ((float(size) ** power - 1.0) * uniform + 1.0) ** (1.0 / power)
    keys: NDArray[np.int64] = np.clip(np.rint(drawn).astype(np.int64) - 1, 0, size - 1)
    return keys
