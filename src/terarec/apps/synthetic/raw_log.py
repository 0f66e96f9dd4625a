# SPDX-License-Identifier: Apache-2.0
"""Raw logs: lines of text by Arrow's compiled functions, and their writer with a report, above all of the best AUC."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.io.directories import atomic_dir
from terarec.io.files import write_json
from terarec.spec import checks
from terarec.spec.dataset import GENERATED_FILE

Column = Any
"""A NumPy or Arrow array of integers, numbers or texts, or one text for all rows."""

_HEX = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)


def joined(columns: Sequence[Column], separator: str, end: str = "\n") -> bytes:
    """Join the columns of each row with `separator`, and close it with `end`. Missing values are empty."""
    parts = [_texts(column) for column in columns]
    # Twice, since Arrow's function has one separator: between the columns, and then before the end of the line.
    lines = pc.binary_join_element_wise(*parts, separator, null_handling="replace", null_replacement="")
    lines = pc.binary_join_element_wise(lines, "", end)
    # The texts lie one after the other in one buffer, which is the file already.
    first, last = lines.buffers()[1], len(lines)
    offsets = np.frombuffer(first, dtype=np.int32)
    text: bytes = lines.buffers()[2].slice(int(offsets[0]), int(offsets[last] - offsets[0])).to_pybytes()
    return text


def choose(words: Sequence[str], indices: NDArray[np.int64]) -> pa.Array:
    """Return the word at each of `indices`; negative ones count from the end, as in Python."""
    return pa.array(words, pa.string()).take(pa.array(indices % len(words)))


def hexadecimal(values: NDArray[np.uint32]) -> pa.Array:
    """Return eight lower-case digits for each of uint32[n]."""
    shifts = np.arange(28, -1, -4, dtype=np.uint32)
    digits = _HEX[(values[:, None] >> shifts) & np.uint32(15)]
    offsets = np.arange(len(values) + 1, dtype=np.int32) * 8
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(offsets), pa.py_buffer(digits))


def lists_joined(texts: pa.Array, offsets: NDArray[np.int64]) -> pa.Array:
    """Join each list of `texts`, from ``offsets[i]`` to ``offsets[i + 1]``, with spaces."""
    return pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), texts), " ")


def clock(seconds: NDArray[np.int64], directives: str) -> pa.Array:
    """Format seconds since 1970 UTC with the `directives` of strftime."""
    return pc.strftime(pa.array(seconds).cast(pa.timestamp("s")), format=directives)


def decimals(values: NDArray[np.float64], places: int) -> pa.Array:
    """Format non-negative numbers with `places` digits after the point."""
    scale = 10**places
    scaled = np.rint(values * scale).astype(np.int64)
    behind = pc.utf8_lpad(pa.array(scaled % scale).cast(pa.string()), width=places, padding="0")
    return pc.binary_join_element_wise(pa.array(scaled // scale).cast(pa.string()), behind, ".")


def concatenated(*columns: Column) -> pa.Array:
    """Concatenate the texts of each row."""
    return pc.binary_join_element_wise(*map(_texts, columns), "")


def _texts(column: Column) -> Any:
    if isinstance(column, str):
        return pa.scalar(column, pa.string())
    return (column if isinstance(column, pa.Array | pa.ChunkedArray) else pa.array(column)).cast(pa.string())


_ROWS_AT_ONCE = 1 << 20


def pack(scores: NDArray[np.float32], labels: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Pack scores float32[n] in [0, 1] and labels uint8[n] into uint32[n] that sort by score.

    A non-negative float's bits rise with its value, and those of 1.0 fit in 30 bits.
    """
    return scores.view(np.uint32) << np.uint32(1) | labels


def packed_auc(packed: NDArray[np.uint32]) -> float | None:
    """Compute the AUC of packed scores, ties counting half. Sorts `packed` in place.

    Returns:
        The AUC; None if there are no positives or no negatives.
    """
    packed.sort()
    positives = negatives = 0
    wins_twice = 0  # 2 * (pairs won) + (pairs tied): stays an exact integer
    start = 0
    while start < len(packed):
        stop = _end_of_ties(packed, min(start + _ROWS_AT_ONCE, len(packed)))
        part = packed[start:stop]
        scores, labels = part >> np.uint32(1), (part & np.uint32(1)).astype(np.int64)
        # Blocks end at a change of the score, so that no tie crosses two of them.
        firsts = np.flatnonzero(np.r_[True, scores[1:] != scores[:-1]])
        group_positives = np.add.reduceat(labels, firsts)
        group_negatives = np.diff(np.r_[firsts, len(part)]) - group_positives
        below = negatives + np.cumsum(group_negatives) - group_negatives
        wins_twice += int(np.sum(group_positives * (2 * below + group_negatives)))
        positives += int(group_positives.sum())
        negatives += int(group_negatives.sum())
        start = stop
    return wins_twice / (2 * positives * negatives) if positives and negatives else None


def _end_of_ties(packed: NDArray[np.uint32], stop: int) -> int:
    """Return the first index at or after `stop` whose score differs from the preceding one."""
    if stop >= len(packed):
        return len(packed)
    last_of_score = packed[stop - 1] | np.uint32(1)
    return int(np.searchsorted(packed, last_of_score, side="right"))


Progress = Callable[[int, int], None]
"""Called with (rows done, rows) after every block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateReport:
    """Report of a generation.

    Attributes:
        best_auc: AUC of the true probabilities against the labels drawn, over all samples; None for one class.
        rows: Rows written: lines of the log, without those of side tables.
        samples: Number of labels of the AUC: the rows, or the samples that the data set's workflow derives.
        seed: Seed of the log.
        positives: Samples with label 1.
        files: The files' names, in the order in which preparation takes them.
        text_bytes: Total size of the files.
        seconds: Elapsed time.
        rows_per_second: `rows` / `seconds`.
    """

    best_auc: float | None
    rows: int
    samples: int
    seed: int
    positives: int
    files: tuple[str, ...]
    text_bytes: int
    seconds: float
    rows_per_second: float


@dataclass(frozen=True, slots=True)
class LogText:
    """Text to append to one file, and the samples in it.

    Attributes:
        file: Path below the log's directory.
        text: Text to append.
        rows: Number of its lines that are rows of the log.
        packed: uint32[n], the samples' probabilities and labels as `pack` returns them.
    """

    file: str
    text: bytes | memoryview
    rows: int = 0
    packed: NDArray[np.uint32] | None = None


def drawn(chances: NDArray[np.float64], uniforms: NDArray[np.float64]) -> tuple[NDArray[np.bool_], NDArray[np.uint32]]:
    """Draw labels bool[n] of samples with these `chances`; return them, and both packed."""
    scores = chances.astype(np.float32)
    labels = uniforms < scores
    return labels, pack(scores, labels.astype(np.uint8))


def blocks(rows: int, size: int, first: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the bounds of blocks of `size` rows, from `first` to `rows`; the last one may be smaller."""
    for start in range(first, rows, size):
        yield start, min(start + size, rows)


def check_count(name: str, value: object, minimum: int) -> None:
    """Raise `ConfigError` unless the option `name` of a generator is an integer of at least `minimum`."""
    checks.argument(name, value, checks.integer(minimum, checks.MOST))


def check_choice(name: str, value: object, accepted: Sequence[str]) -> None:
    """Raise `ConfigError` unless the option `name` of a generator is one of those `accepted`."""
    checks.argument(name, value, checks.choice(accepted))


def write_log(
    out: Path,
    pieces: Iterable[LogText],
    *,
    rows: int,
    seed: int,
    options: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> GenerateReport:
    """Write the `pieces` below `out`, and ``generated.json``. Memory: one piece, and 4 bytes a sample for the AUC.

    Args:
        out: Directory to create; it must not exist, or be empty.
        pieces: Pieces in order; each file's in the order of its lines.
        rows: Number of rows in all.
        seed: Seed of the pieces; equal arguments give equal bytes.
        options: Further parameters of the pieces, for ``generated.json``.
        progress: Callback; see `Progress`.

    Raises:
        ConfigError: `rows` or `seed` is out of range, or `out` holds something.
        StorageError: The disk cannot hold the log.
    """
    check_count("rows", rows, 1)
    check_count("seed", seed, 0)
    started = time.perf_counter()
    with atomic_dir(out) as partial:
        files, samples = _write(partial, pieces, rows, progress)
        report = _report(partial, files, samples, rows=rows, seed=seed, started=started)
        # Without times, so that equal arguments give equal bytes in this file, too.
        known = {key: value for key, value in asdict(report).items() if "second" not in key}
        write_json(partial / GENERATED_FILE, {**known, **(options or {})})
    return report


def _write(
    directory: Path, pieces: Iterable[LogText], rows: int, progress: Progress | None
) -> tuple[tuple[str, ...], list[NDArray[np.uint32]]]:
    samples, done = [], 0
    # All stay open: generators write several files in turns.
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
    assert done == rows, f"{done} rows were written, {rows} requested"
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
