# SPDX-License-Identifier: Apache-2.0
"""Train DLRM over a table of 20 GB on the disk: tiers with a tenth and a hundredth of its rows in memory, and peers.

One peer is plain PyTorch that gathers the rows of a batch from an ``np.memmap`` and writes them back. Another does the
same with RocksDB, if ``rocksdict`` is installed. They are slow, so their turns are shorter, and each has its own files.
See `tiered_sides.py` for turns, shares and limits.

With ``--memory-rows``, the tables in memory are smaller than the tables in tiers, for machines whose memory does not
hold all rows. Their rate then stands in for the rate of all rows in memory, which is a little lower (more distinct rows
in a batch).
"""

from __future__ import annotations

import argparse
import gc
import mmap
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from record import RESULTS, append_rows
from step_sides import NUM_DENSE, plain_mlp
from tiered_sides import (
    BOTTOM,
    CACHES,
    FEATURES,
    FILL_ROWS,
    LR,
    ROW_BYTES,
    TOP,
    WIDTH,
    TierRow,
    Turns,
    flush,
    initial_values,
    plan_of,
    plan_options,
    rate,
)
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding

from terarec.batch import Batch
from terarec.errors import MissingDependencyError
from terarec.memory.rocksdb import RocksDBStore
from terarec.reports.page import BLUE, GREEN, MUTED, ORANGE, new_axes, plot_style
from terarec.train.devices import keep_freed_memory

NAME = "tiered_training"
EPS = 1e-8
SORTED_ROWS = 1 << 18  # of a file that RocksDB ingests, 128 MiB


class RowPlace(Protocol):
    """Storage of the plain side's rows, read and written as float32[n, 2 * D]."""

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Return copies of rows."""

    def write(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        """Set rows."""

    def drop(self) -> None:
        """Unmap pages of files, so that the page cache can drop them."""

    def close(self) -> None:
        """Close the files."""


class MapRows:
    """Rows in an ``np.memmap``."""

    def __init__(self, directory: Path, num_rows: int) -> None:
        self._map = np.memmap(directory / "map", dtype=np.float32, mode="w+", shape=(num_rows, 2 * WIDTH))
        values = initial_values()
        for first in range(0, num_rows, FILL_ROWS):
            end = min(first + FILL_ROWS, num_rows)
            self._map[first:end] = values[: end - first]
        self._map.flush()

    def read(self, numbers: np.ndarray) -> np.ndarray:
        return self._map[numbers]

    def write(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        self._map[numbers] = rows

    def drop(self) -> None:
        self._map._mmap.madvise(mmap.MADV_DONTNEED)  # mapped pages stay in the page cache

    def close(self) -> None:
        del self._map


class RocksRows:
    """Rows in RocksDB, ingested as sorted files; then every write is one synchronous batch."""

    def __init__(self, directory: Path, num_rows: int) -> None:
        path = directory / "rocksdb"
        RocksDBStore(path, ROW_BYTES).close()
        self._ingest(path, num_rows)
        self._store = RocksDBStore.open(path)

    @staticmethod
    def _ingest(path: Path, num_rows: int) -> None:
        import rocksdict  # `RocksDBStore` names the extra where it is missing

        options = rocksdict.Options(raw_mode=True)
        rows = [row.tobytes() for row in initial_values()]
        keys = np.arange(num_rows)
        keys = keys[np.argsort(keys.byteswap().view(np.uint64))]  # the store sorts keys as bytes
        files = []
        for first in range(0, num_rows, SORTED_ROWS):
            part = keys[first : first + SORTED_ROWS]
            files.append(str(path.parent / f"{first}.sst"))
            file, text = rocksdict.SstFileWriter(options), part.tobytes()
            file.open(files[-1])
            for place, number in enumerate((part % FILL_ROWS).tolist()):
                file[text[8 * place : 8 * place + 8]] = rows[number]
            file.finish()
        moves = rocksdict.IngestExternalFileOptions()
        moves.set_move_files(True)
        database = rocksdict.Rdict(str(path), options)
        database.ingest_external_file(files, moves)
        database.close()

    def read(self, numbers: np.ndarray) -> np.ndarray:
        out = np.empty((len(numbers), ROW_BYTES), dtype=np.uint8)
        assert self._store.read(numbers, out).all()
        return out.view(np.float32)

    def write(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        self._store.write(numbers, np.ascontiguousarray(rows).view(np.uint8))
        self._store.commit()

    def drop(self) -> None:
        """Do nothing: RocksDB maps no files."""

    def close(self) -> None:
        self._store.close()


class Plain:
    """The model on torch.nn: the distinct rows of a batch are gathered, updated by AdaGrad and written back."""

    def __init__(self, rows: int, held: RowPlace) -> None:
        self._rows, self.held = rows, held
        vectors = FEATURES + 1
        self._bottom = plain_mlp((NUM_DENSE, *BOTTOM), relu_last=True)
        self._top = plain_mlp((WIDTH + vectors * (vectors - 1) // 2, *TOP, 1), relu_last=False)
        self._pairs = torch.tril_indices(vectors, vectors, offset=-1)
        layers = nn.ModuleList([self._bottom, self._top])
        self._optimizer = torch.optim.Adagrad(layers.parameters(), lr=LR)

    def train(self, batches: Sequence[Batch], done: Callable[[], object] = lambda: None) -> None:
        for batch in batches:
            self._step(batch)
            done()

    def _step(self, batch: Batch) -> None:
        keys = batch.sparse.keys.view(FEATURES, -1) + self._rows * torch.arange(FEATURES)[:, None]
        numbers, places = torch.unique(keys, return_inverse=True)
        rows = torch.from_numpy(self.held.read(numbers.numpy()))
        weights = rows[:, :WIDTH].clone().requires_grad_()
        self._optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(self._logits(batch.dense, embedding(places, weights)), batch.label)
        loss.backward()
        self._optimizer.step()
        gradient = weights.grad
        assert gradient is not None
        rows[:, WIDTH:] += gradient.square()
        rows[:, :WIDTH] -= LR * gradient / (rows[:, WIDTH:].sqrt() + EPS)
        self.held.write(numbers.numpy(), rows.numpy())

    def _logits(self, dense: Tensor, vectors: Tensor) -> Tensor:
        first: Tensor = self._bottom(dense)
        stacked = torch.cat([first[:, None], vectors.transpose(0, 1)], dim=1)
        dots = torch.bmm(stacked, stacked.transpose(1, 2))[:, self._pairs[0], self._pairs[1]]
        logits: Tensor = self._top(torch.cat([first, dots], dim=1))
        return logits


PEERS: dict[str, Callable[[Path, int], RowPlace]] = {"np.memmap": MapRows, "RocksDB": RocksRows}


def peer_rows(turns: Turns, name: str, skew: float, *, steps: int, count: int) -> Iterable[TierRow]:
    """Measure plain PyTorch with a peer's storage of rows next to tables in memory, in `count` turns of a few steps."""
    folder = turns.directory / "peer"
    folder.mkdir()
    try:
        peer = Plain(turns.plan.rows, PEERS[name](folder, FEATURES * turns.plan.rows))
    except MissingDependencyError:
        print(f"{name} is left out: it is not installed")
        return
    print(f"{name}: ready", flush=True)
    batches = turns.keys.batches(skew, 2 * count * steps + 1, 1)
    in_memory = turns.memory_keys.batches(skew, steps, 1)
    peer.train(batches[-1:])
    for index, cache in enumerate(CACHES):
        rates, memory_rates = [], []
        for number in range(count):
            if cache == "dropped":
                peer.held.drop()
                flush(folder, drops=True)
            first = (index * count + number) * steps
            rates.append(rate(peer, batches[first : first + steps]))
            memory_rates.append(rate(turns.memory, in_memory))
        yield TierRow(
            case=f"{turns.plan.case}, plain PyTorch on {name}", metric="training", value=statistics.median(rates),
            unit="samples/s", peer=turns.peer, peer_value=statistics.median(memory_rates), skew=skew, share=0.0,
            page_cache=cache, disk_reads=turns.disk_reads,
        )  # fmt: skip
    peer.held.close()
    shutil.rmtree(folder)


def draw(rows: Sequence[TierRow], path: Path) -> None:
    """Draw the samples per second of each side, with and without the page cache, and in memory."""
    names = {row.case: row.case.split(", ")[-1].replace("plain ", "") for row in rows}
    labels = [f"tiers, {100 * row.share:.2g} %" if row.share else names[row.case] for row in rows]
    with plot_style():
        figure, axes = new_axes(0.9 + 0.5 * len(set(labels)))
        places = {label: place for place, label in enumerate(dict.fromkeys(labels))}
        for offset, color, cache in ((-0.2, BLUE, "used"), (0.2, ORANGE, "dropped"), (0.2, GREEN, "direct")):
            mine = [(places[label], row) for label, row in zip(labels, rows, strict=True) if row.page_cache == cache]
            if not mine:
                continue
            values = [row.value for _, row in mine]
            drawn = axes.barh([place + offset for place, _ in mine], values, 0.38, color=color, label=cache)
            axes.bar_label(drawn, [f"{value:,.0f}" for value in values], padding=3, fontsize=7)
        memory = statistics.median(row.peer_value for row in rows if row.peer_value is not None)
        axes.axvline(memory, color=MUTED, linewidth=0.8)
        axes.text(memory, -0.55, rows[0].peer, color=MUTED, fontsize=7, ha="right", va="bottom")
        axes.set_yticks(list(places.values()), list(places))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"samples/s; {rows[0].case.split(', AdaGrad, ')[1].split(',')[0]}, Zipf {rows[0].skew:g}")
        axes.legend(title="page cache", fontsize=7, title_fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(path, dpi=150, bbox_inches="tight")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[plan_options(rows=40_000_000, batch=8192, steps=5, warm_steps=4, shares=(0.1, 0.01))],
    )
    parser.add_argument(
        "--memory-rows", type=int, help="rows of all tables in memory to compare with (default: as --rows)"
    )
    parser.add_argument("--peer-steps", type=int, default=1, help="steps in a turn of np.memmap and RocksDB")
    parser.add_argument("--skew", type=float, default=1.05)
    parser.add_argument("--no-peers", action="store_true", help="leave out plain PyTorch on np.memmap and RocksDB")
    parser.add_argument("--direct", action="store_true", help="let the files of tiers bypass the page cache")
    options = parser.parse_args(arguments)
    plan = plan_of(options, memory_rows=options.memory_rows, direct=options.direct)
    keep_freed_memory()
    rows: list[TierRow] = []

    def record(found: Iterable[TierRow]) -> None:
        for row in found:
            append_rows(NAME, [row], dry=options.dry)
            rows.append(row)
        gc.collect()

    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        turns = Turns(plan, Path(folder))
        for name in () if options.no_peers else PEERS:
            record(peer_rows(turns, name, options.skew, steps=options.peer_steps, count=plan.turns))
        for share in options.shares:
            record(turns.rows_of({share: turns.tiered(share)}, options.skew))
        if rows and (options.plot or not options.dry):
            draw(rows, options.plot or RESULTS / f"{NAME}.png")


if __name__ == "__main__":
    main()
