# SPDX-License-Identifier: Apache-2.0
"""Golden records: samples with the scores of the run that a version is from, which it must give before it answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from terarec.batch import Batch, Jagged, check_offsets
from terarec.errors import ConfigError, FormatError
from terarec.export.files import NARROW_TOLERANCES, TOLERANCE
from terarec.formats.container import read_tensors, write_tensors
from terarec.spec import Numbers, RunSpec
from terarec.spec.codec import parse_json

_FORMAT, _VERSION = "terarec.golden", "1"
_INT8_ROWS = 0.05  # as of layers in int8: both round to 8 bits
WARM_SIZES = (1, 16, 64, 256, 1024)
"""Sizes of the batches that a version scores before it answers."""

Score = Callable[[Batch], npt.NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenRecords:
    """Samples and their scores.

    Attributes:
        batch: The samples as the model reads them.
        scores: float32[B, C].
    """

    batch: Batch
    scores: npt.NDArray[np.float32]

    @classmethod
    def of(cls, batch: Batch, score: Score) -> GoldenRecords:
        """Score samples."""
        if not batch.batch_size:
            raise ConfigError("golden records", "got no samples, expected a split that has some")
        scores = score(batch)
        if not np.isfinite(scores).all():
            row = int(np.flatnonzero(~np.isfinite(scores).all(axis=1))[0])
            raise ConfigError("golden records", f"the run scores sample {row} {scores[row].tolist()}, expected numbers")
        return cls(batch=batch, scores=scores)

    @classmethod
    def read(cls, path: Path) -> GoldenRecords:
        """Read the file of `write`.

        Raises:
            DataNotFoundError: No such file.
            FormatError: It is damaged.
        """
        arrays, metadata = read_tensors(path)
        try:
            if (metadata["format"], metadata["version"]) != (_FORMAT, _VERSION):
                raise FormatError(path, f"got {metadata['format']!r} {metadata['version']}, expected {_FORMAT!r} 1")
            weights = arrays.get("weights")
            sparse = Jagged(
                names=tuple(map(str, parse_json(metadata["features"]))),
                keys=torch.from_numpy(arrays["keys"]),
                offsets=torch.from_numpy(arrays["offsets"]),
                weights=None if weights is None else torch.from_numpy(weights),
            )
            check_offsets(sparse)
            dense, scores = torch.from_numpy(arrays["dense"]), arrays["scores"]
            labels = torch.zeros(len(dense), int(metadata["labels"]))
        except FormatError:
            raise
        except (KeyError, ValueError, TypeError) as error:
            raise FormatError(path, f"expected samples and scores ({type(error).__name__}: {error})") from None
        if len(scores) != len(dense) or sparse.batch_size not in (len(dense), 0):
            raise FormatError(path, f"got {len(scores)} scores for {len(dense)} samples, expected one for each")
        return cls(batch=Batch(dense=dense, label=labels, sparse=sparse), scores=scores)

    def write(self, path: Path) -> str:
        """Write them to a file of a directory that is flushed as a whole; return its SHA-256."""
        sparse = self.batch.sparse
        arrays: dict[str, npt.NDArray[Any]] = {
            "dense": self.batch.dense.numpy(),
            "keys": sparse.keys.numpy(),
            "offsets": sparse.offsets.numpy(),
            "scores": self.scores,
        }
        if sparse.weights is not None:
            arrays["weights"] = sparse.weights.numpy()
        metadata = {"format": _FORMAT, "version": _VERSION, "features": json.dumps(sparse.names)}
        return write_tensors(path, arrays, metadata | {"labels": str(self.batch.label.shape[1])}, flushes=False)

    def check(self, score: Score, bound: float = TOLERANCE) -> float:
        """Score the samples again.

        Args:
            score: Scores of a batch.
            bound: Largest difference of scores up to 1, see `tolerance`; that of larger ones is a multiple of them.

        Returns:
            The largest difference from the scores of the run.
        """
        scores = score(self.batch)
        if scores.shape != self.scores.shape:
            got, expected = list(scores.shape), list(self.scores.shape)
            raise ConfigError("golden records", f"got scores {got}, expected {expected}")
        bound *= max(1.0, float(np.abs(self.scores).max(initial=0.0)))
        difference = float(np.abs(scores - self.scores).max(initial=0.0))
        # Negated, so that NaN fails, too.
        if not difference <= bound:
            problem = f"its scores are {difference:.3g} off those of the run, expected at most {bound:.3g}"
            raise ConfigError("golden records", problem)
        return difference

    def warm(self, score: Score, sizes: Iterable[int] = WARM_SIZES) -> None:
        """Score batches of some sizes, made of the samples, so that no request pays for what first calls prepare."""
        for size in sizes:
            score(repeated(self.batch, size))


def tolerance(numbers: Numbers, run: RunSpec) -> float:
    """Return the largest accepted difference of scores up to 1, for the numbers in which a version of `run` scores."""
    precision = "int8" if numbers.precision == "int8" else numbers.products(run)
    of_layers = NARROW_TOLERANCES.get(precision, TOLERANCE)
    return max(of_layers, _INT8_ROWS if numbers.row_type == "int8" else 0.0)


def repeated(batch: Batch, size: int) -> Batch:
    """Return a batch of `size` samples: those of `batch`, again and again."""
    samples = torch.arange(size) % batch.batch_size
    sparse = batch.sparse
    features = len(sparse.names)
    lengths = sparse.offsets.diff().view(features, -1)[:, samples].reshape(-1)
    starts = sparse.offsets[:-1].view(features, -1)[:, samples].reshape(-1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    places = torch.arange(int(offsets[-1])) + torch.repeat_interleave(starts - offsets[:-1], lengths)
    jagged = Jagged(
        names=sparse.names,
        keys=sparse.keys[places],
        offsets=offsets,
        weights=None if sparse.weights is None else sparse.weights[places],
    )
    return Batch(dense=batch.dense[samples], label=batch.label[samples], sparse=jagged)
