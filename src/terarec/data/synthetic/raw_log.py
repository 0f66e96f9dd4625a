"""Writes a log piece by piece, and beside it what is known of it: the best AUC above all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from terarec.data.synthetic.best_auc import pack, packed_auc
from terarec.errors import ConfigError
from terarec.io import atomic_dir

REPORT_FILE = "generated.json"

Progress = Callable[[int, int], None]
"""Called with (rows done, rows) after every block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateReport:
    """What was generated.

    Attributes:
        best_auc: AUC of the true probabilities against the labels drawn, over all samples.
        rows: rows written: lines of the log, without those of side tables.
        samples: of how many labels the AUC is: the rows, or those that the data set's workflow makes of them.
        seed: what the log was drawn with.
        positives: samples with label 1.
        files: the files' names, in the order in which preparation takes them.
        text_bytes: size of the files together.
        seconds: time taken.
        rows_per_second: `rows` / `seconds`.
    """

    best_auc: float
    rows: int
    samples: int
    seed: int
    positives: int
    files: tuple[str, ...]
    text_bytes: int
    seconds: float
    rows_per_second: float


@dataclass(frozen=True, slots=True)
class Piece:
    """Text for the end of one file, and the samples in it.

    Attributes:
        file: path below the log's directory.
        text: what to append.
        rows: lines of it that are rows of the log.
        packed: uint32[n], the samples' probabilities and labels as `best_auc.pack` gives them.
    """

    file: str
    text: bytes | memoryview
    rows: int = 0
    packed: NDArray[np.uint32] | None = None


def drawn(chances: NDArray[np.float64], uniforms: NDArray[np.float64]) -> tuple[NDArray[np.bool_], NDArray[np.uint32]]:
    """Labels bool[n] of samples with these `chances`, and both packed."""
    scores = chances.astype(np.float32)
    labels = uniforms < scores
    return labels, pack(scores, labels.astype(np.uint8))


def check_count(name: str, value: object, minimum: int) -> None:
    """Raise `ConfigError` unless the option `name` of a generator is an integer of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"generate: {name}: got {value!r}, expected an integer >= {minimum}")


def check_choice(name: str, value: object, accepted: Sequence[str]) -> None:
    """Raise `ConfigError` unless the option `name` of a generator is one of those `accepted`."""
    if value not in accepted:
        raise ConfigError(f"generate: {name}: got {value!r}, expected one of {', '.join(map(repr, accepted))}")


def write_log(
    out: Path,
    pieces: Iterable[Piece],
    *,
    rows: int,
    seed: int,
    options: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> GenerateReport:
    """Write the `pieces` below `out`, and ``generated.json``. Memory: one piece, and 4 bytes a sample for the AUC.

    Args:
        out: directory to make; it must not exist, or be empty.
        pieces: in order; each file's in the order of its lines.
        rows: how many there are in all.
        seed: what they are drawn with.
        options: what else they depend on, for ``generated.json``.
        progress: see `Progress`.

    Raises:
        ConfigError: `rows` or `seed` is out of range, or `out` holds something.
        StorageError: the disk cannot hold the log.
    """
    check_count("rows", rows, 1)
    check_count("seed", seed, 0)
    started = time.perf_counter()
    with atomic_dir(out) as partial:
        files, samples = _write(partial, pieces, rows, progress)
        report = _report(partial, files, samples, rows=rows, seed=seed, started=started)
        known = {key: value for key, value in asdict(report).items() if "second" not in key}
        (partial / REPORT_FILE).write_text(json.dumps({**known, **(options or {})}, indent=2) + "\n", encoding="ascii")
    return report


def _write(
    directory: Path, pieces: Iterable[Piece], rows: int, progress: Progress | None
) -> tuple[tuple[str, ...], list[NDArray[np.uint32]]]:
    samples, done = [], 0
    files: dict[str, IO[bytes]] = {}
    with ExitStack() as stack:
        for piece in pieces:
            if piece.file not in files:
                path = directory / piece.file
                path.parent.mkdir(exist_ok=True)
                files[piece.file] = stack.enter_context(path.open("wb"))
            files[piece.file].write(piece.text)
            if piece.packed is not None:
                samples.append(piece.packed)
            done += piece.rows
            if progress is not None and piece.rows:
                progress(done, rows)
    assert done == rows, f"{done} rows were written, {rows} asked for"
    return tuple(files), samples


def _report(
    directory: Path, files: tuple[str, ...], samples: list[NDArray[np.uint32]], *, rows: int, seed: int, started: float
) -> GenerateReport:
    packed = np.concatenate(samples)
    positives = int((packed & np.uint32(1)).sum(dtype=np.int64))
    best_auc = packed_auc(packed)
    seconds = time.perf_counter() - started
    return GenerateReport(
        best_auc=best_auc,
        rows=rows,
        samples=len(packed),
        seed=seed,
        positives=positives,
        files=files,
        text_bytes=sum((directory / name).stat().st_size for name in files),
        seconds=seconds,
        rows_per_second=rows / seconds,
    )
