"""DLRM steps with tables in tiers: samples a second against the share of the rows in the fast tier.

All rows are on the disk before, with the state of AdaGrad (512 bytes a row). Sides take turns of a few steps: tables in
memory; tables in tiers, which read the rows of the next batches while one trains, as `Trainer.fit` does; plain PyTorch
that gathers the rows of a batch from an ``np.memmap`` and writes them back; the same on RocksDB where ``rocksdict`` is
installed. "Page cache dropped": the files' pages are written and dropped before a turn, so that nearly all rows that a
turn reads come from the disk; otherwise the kernel may keep what it likes in free memory.

The limit is the slower of the step in memory and of the disk: as many random reads of a page as the side read rows, at
the rate of a loop of such reads past the page cache (O_DIRECT) in the same run. A share that does not hold the rows of
one batch is left out. `beyond_memory.py` is about preparation: group-bys, sorts and joins.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from record import RESULTS, Row, append_rows
from step_sides import NUM_DENSE, plain_mlp
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding

from terarec.batch import Batch, Jagged, one_hot
from terarec.errors import MissingDependencyError
from terarec.models import DLRM
from terarec.reports.plots import BLUE, GREEN, MUTED, OCHRE, ORANGE, PURPLE, new_axes, plot_style
from terarec.spec import (
    AdaGradSpec,
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    DLRMSpec,
    LabelColumn,
    StaticTablesSpec,
    Tiers,
    TrainingSpec,
)
from terarec.storage import TierUse
from terarec.storage.rocksdb_store import RocksDBStore
from terarec.storage.row_levels import BudgetError
from terarec.storage.slots import SLOT_BYTES
from terarec.train import Optimizers, Trainer
from terarec.train.devices import keep_freed_memory
from terarec.train.row_tiers import read_ahead

NAME = "tiered_training"
FEATURES, WIDTH, BATCH = 26, 64, 8192
BOTTOM, TOP = (512, 256, WIDTH), (1024, 1024, 512, 256)
NAMES = tuple(f"C{number}" for number in range(FEATURES))
ROW_BYTES = 2 * 4 * WIDTH  # weights and AdaGrad's sums
PAGE = 4096
READERS = 64  # threads of the disk's probe
LR, EPS = 0.01, 1e-8
FILL_ROWS = 65_536
COLORS = (BLUE, ORANGE, GREEN, PURPLE, OCHRE)


@dataclass(frozen=True, kw_only=True)
class TierRow(Row):
    """A row with what the tiers did. Rows are counted a step; `table_mib` is what the tables take of host memory."""

    skew: float
    share: float
    page_cache: str
    hit_rate: float | None = None
    rows_read: float | None = None
    rows_written: float | None = None
    table_mib: float | None = None
    disk_reads: float | None = None


class Side(Protocol):
    """One way to train."""

    def train(self, batches: Sequence[Batch]) -> None:
        """Do a step for each batch."""


class Keys:
    """Batches whose keys follow Zipf's law; a permutation decides which are frequent."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._order = np.random.default_rng(0).permutation(rows)

    def batches(self, skew: float, count: int, seed: int) -> list[Batch]:
        shares = np.cumsum(np.arange(1, self.rows + 1, dtype=np.float64) ** -skew)
        generator = np.random.default_rng((seed, int(100 * skew)))
        return [self._batch(generator, shares / shares[-1]) for _ in range(count)]

    def of_ranks(self, first: int, end: int) -> Jagged:
        """The keys of these ranks, of all tables."""
        keys = torch.from_numpy(self._order[first:end])
        return one_hot(NAMES, keys.expand(FEATURES, -1))

    def _batch(self, generator: np.random.Generator, shares: np.ndarray) -> Batch:
        ranks = np.searchsorted(shares, generator.random((FEATURES, BATCH))).clip(max=self.rows - 1)
        return Batch(
            dense=torch.from_numpy(generator.standard_normal((BATCH, NUM_DENSE), dtype=np.float32)),
            label=torch.from_numpy(generator.integers(0, 2, (BATCH, 1)).astype(np.float32)),
            sparse=one_hot(NAMES, torch.from_numpy(self._order[ranks])),
        )


class Tables:
    """`Trainer.train_step` of a DLRM whose tables are in memory or in tiers."""

    def __init__(self, rows: int, tiers: Tiers | None) -> None:
        dataset = DatasetSpec(
            name="synthetic",
            storage="parquet",
            labels=(LabelColumn(name="label"),),
            dense=tuple(DenseColumn(name=f"I{number}") for number in range(NUM_DENSE)),
            categorical=tuple(CategoricalColumn(name=name, rows=rows) for name in NAMES),
        )
        self.model = DLRM(DLRMSpec(width=WIDTH, bottom=BOTTOM, top=TOP, tables=StaticTablesSpec(tiers=tiers)), dataset)
        assert self.model.embedding is not None
        self.embedding = self.model.embedding
        rule = AdaGradSpec(lr=LR)
        self.trainer = Trainer(self.model, TrainingSpec(), Optimizers.of(self.model, rule, rule))

    def train(self, batches: Sequence[Batch]) -> None:
        if self.embedding.tier_use() is None:
            for batch in batches:
                self.trainer.train_step(batch)
            return
        for batch, _ in read_ahead(((batch, {}) for batch in batches), self.model):
            self.trainer.train_step(batch)

    @property
    def use(self) -> TierUse:
        return self.embedding.tier_use() or TierUse()

    def fill(self, other: Tables) -> None:
        """Write all rows of another side, so that all of them are on the disk."""
        for name in NAMES:
            for rows in other.embedding.tables[name].export_chunks(FILL_ROWS):
                self.embedding.tables[name].import_(rows)

    def warm(self, keys: Keys, share: float) -> None:
        """Look the most frequent rows up, the rarest of them first, so that a long run's rows are in the fast tier."""
        end = int(share * keys.rows)
        at_once = max(1, min(BATCH, end // 4))
        with torch.no_grad():
            while end > 0:
                self.embedding(keys.of_ranks(max(0, end - at_once), end))
                end -= at_once

    def packed(self) -> Iterable[tuple[int, np.ndarray]]:
        """Pieces of all rows with the number of their first: weights and state, float32[n, 2 * D]."""
        first = 0
        for name in NAMES:
            for rows in self.embedding.tables[name].export_chunks(FILL_ROWS):
                state = next(iter(rows.state.values()))
                yield first, torch.cat([rows.weights, state], dim=1).numpy()
                first += len(rows.keys)


class Rows(Protocol):
    """Where the plain side has its rows: float32[n, 2 * D] each time."""

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Copies of rows."""

    def write(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        """Set rows."""


class MapRows:
    """Rows in an ``np.memmap``."""

    def __init__(self, directory: Path, of: Tables, num_rows: int) -> None:
        self._map = np.memmap(directory / "map", dtype=np.float32, mode="w+", shape=(num_rows, 2 * WIDTH))
        for first, rows in of.packed():
            self._map[first : first + len(rows)] = rows
        self._map.flush()

    def read(self, numbers: np.ndarray) -> np.ndarray:
        return self._map[numbers]

    def write(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        self._map[numbers] = rows


class RocksRows:
    """Rows in RocksDB; every write is one synchronous batch."""

    def __init__(self, directory: Path, of: Tables) -> None:
        self._store = RocksDBStore(directory / "rocksdb", ROW_BYTES)
        for first, rows in of.packed():
            self.write(np.arange(first, first + len(rows)), rows)

    def read(self, numbers: np.ndarray) -> np.ndarray:
        out = np.empty((len(numbers), ROW_BYTES), dtype=np.uint8)
        assert self._store.read(numbers, out).all()
        return out.view(np.float32)

    def write(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        self._store.write(numbers, np.ascontiguousarray(rows).view(np.uint8))
        self._store.commit()


class Plain:
    """The same model on torch.nn: the distinct rows of a batch are gathered, updated by AdaGrad and written back."""

    def __init__(self, rows: int, held: Rows) -> None:
        self._rows, self._held = rows, held
        vectors = FEATURES + 1
        self._bottom = plain_mlp((NUM_DENSE, *BOTTOM), relu_last=True)
        self._top = plain_mlp((WIDTH + vectors * (vectors - 1) // 2, *TOP, 1), relu_last=False)
        self._pairs = torch.tril_indices(vectors, vectors, offset=-1)
        layers = nn.ModuleList([self._bottom, self._top])
        self._optimizer = torch.optim.Adagrad(layers.parameters(), lr=LR)

    def train(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self._step(batch)

    def _step(self, batch: Batch) -> None:
        keys = batch.sparse.keys.view(FEATURES, BATCH) + self._rows * torch.arange(FEATURES)[:, None]
        numbers, places = torch.unique(keys, return_inverse=True)
        rows = torch.from_numpy(self._held.read(numbers.numpy()))
        weights = rows[:, :WIDTH].clone().requires_grad_()
        self._optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(self._logits(batch.dense, embedding(places, weights)), batch.label)
        loss.backward()
        self._optimizer.step()
        gradient = weights.grad
        assert gradient is not None
        rows[:, WIDTH:] += gradient.square()
        rows[:, :WIDTH] -= LR * gradient / (rows[:, WIDTH:].sqrt() + EPS)
        self._held.write(numbers.numpy(), rows.numpy())

    def _logits(self, dense: Tensor, vectors: Tensor) -> Tensor:
        first: Tensor = self._bottom(dense)
        stacked = torch.cat([first[:, None], vectors.transpose(0, 1)], dim=1)
        dots = torch.bmm(stacked, stacked.transpose(1, 2))[:, self._pairs[0], self._pairs[1]]
        logits: Tensor = self._top(torch.cat([first, dots], dim=1))
        return logits


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def drop_pages(directory: Path) -> None:
    """Write what the page cache has of files, and drop it."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_reads(path: Path, count: int = 20_000) -> float:
    """Random reads a second of a page past the page cache, with `READERS` under way."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    pages = path.stat().st_size // PAGE
    parts = np.array_split(np.random.default_rng(1).integers(0, pages, count) * PAGE, READERS)

    def read(offsets: np.ndarray) -> None:
        buffer = mmap.mmap(-1, PAGE)  # aligned, as O_DIRECT wants it
        for offset in offsets.tolist():
            os.preadv(file, [buffer], offset)

    with ThreadPoolExecutor(READERS) as pool:
        seconds = seconds_of(lambda: list(pool.map(read, parts)))
    os.close(file)
    return count / seconds


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure."""

    rows: int
    steps: int
    warm_steps: int
    turns: int
    skews: tuple[float, ...]
    shares: tuple[float, ...]

    @property
    def case(self) -> str:
        return f"DLRM {FEATURES} x {self.rows:,} x {WIDTH}, batch {BATCH}, AdaGrad, {self.table_bytes / 1e9:.3g} GB"

    @property
    def table_bytes(self) -> int:
        return FEATURES * self.rows * ROW_BYTES


class Comparison:
    """All sides; batches of a skew are the same for all."""

    def __init__(self, plan: Plan, directory: Path, *, with_peers: bool) -> None:
        self.plan = plan
        self.directory = directory
        self.keys = Keys(plan.rows)
        self.memory = Tables(plan.rows, None)
        self.memory.train(self.keys.batches(1.0, 1, 9))
        (directory / "map").mkdir()
        self.peers: dict[str, Side] = {
            "np.memmap": Plain(plan.rows, MapRows(directory / "map", self.memory, FEATURES * plan.rows))
        }
        try:
            if with_peers:
                self.peers["RocksDB"] = Plain(plan.rows, RocksRows(directory, self.memory))
        except MissingDependencyError:
            print("RocksDB is left out: rocksdict is not installed")
        self.disk_reads = statistics.median(disk_reads(directory / "map" / "map") for _ in range(3))

    def rate(self, side: Side, batches: Sequence[Batch]) -> float:
        return len(batches) * BATCH / seconds_of(lambda: side.train(batches))

    def peer_rows(self, skew: float) -> list[TierRow]:
        """Plain PyTorch on what a peer keeps its rows in, beside tables in memory."""
        rows: list[TierRow] = []
        batches = self.keys.batches(skew, self.plan.steps, 1)
        for name, peer in self.peers.items():
            for cache in ("used", "dropped"):
                rates: dict[str, list[float]] = {"peer": [], "memory": []}
                peer.train(batches[:1])
                for _ in range(self.plan.turns):
                    if cache == "dropped":
                        drop_pages(self.directory)
                    rates["peer"].append(self.rate(peer, batches))
                    rates["memory"].append(self.rate(self.memory, batches))
                rows.append(
                    TierRow(case=f"{self.plan.case}, plain PyTorch on {name}", metric="training",
                            value=statistics.median(rates["peer"]), unit="samples/s", peer="in memory",
                            peer_value=statistics.median(rates["memory"]), skew=skew, share=0.0, page_cache=cache,
                            disk_reads=self.disk_reads)
                )  # fmt: skip
        return rows

    def share_rows(self, share: float) -> Iterable[TierRow]:
        """Tiers with a share of the rows in the fast tier, beside tables in memory."""
        budget = int(share * FEATURES * self.plan.rows * (ROW_BYTES + SLOT_BYTES)) + 1
        tiered = Tables(self.plan.rows, Tiers(host=str(budget), file=str(self.directory / "rows")))
        tiered.fill(self.memory)
        tiered.warm(self.keys, share)
        for skew in self.plan.skews:
            try:
                yield from self._skew_rows(tiered, share, skew)
            except BudgetError as error:
                print(f"{share:.0%} at Zipf {skew} is left out: {error}")

    def _skew_rows(self, tiered: Tables, share: float, skew: float) -> list[TierRow]:
        plan = self.plan
        batches = self.keys.batches(skew, plan.warm_steps + 2 * plan.turns * plan.steps, 2)
        tiered.train(batches[: plan.warm_steps])
        turns = [batches[first : first + plan.steps] for first in range(plan.warm_steps, len(batches), plan.steps)]
        rates: dict[str, list[float]] = {"used": [], "dropped": [], "memory": []}
        uses = {"used": TierUse(), "dropped": TierUse()}
        for number, turn in enumerate(turns):
            cache = ("used", "dropped")[number % 2]
            if cache == "dropped":
                drop_pages(self.directory / "rows")
            before = tiered.use
            rates[cache].append(self.rate(tiered, turn))
            uses[cache] = uses[cache].plus(tiered.use.minus(before))
            rates["memory"].append(self.rate(self.memory, turn))
        in_memory, steps = statistics.median(rates["memory"]), plan.turns * plan.steps
        return [
            TierRow(case=f"{plan.case}, tiers", metric="training", value=statistics.median(rates[cache]),
                    unit="samples/s", peer="in memory", peer_value=in_memory,
                    limit=min(in_memory, BATCH * self.disk_reads / max(1e-9, use.rows_read / steps)),
                    skew=skew, share=share, page_cache=cache, hit_rate=use.hit_rate, rows_read=use.rows_read / steps,
                    rows_written=use.rows_written / steps, table_mib=tiered.embedding.memory_bytes() / 2**20,
                    disk_reads=self.disk_reads)
            for cache, use in uses.items()
        ]  # fmt: skip


def draw(rows: Sequence[TierRow], path: Path) -> None:
    """Samples a second against the share, a color for each skew, with the limit."""
    with plot_style():
        figure, axes = new_axes(3.6)
        tiers = [row for row in rows if row.share > 0]
        for color, skew in zip(COLORS, sorted({row.skew for row in tiers}), strict=False):
            for cache, style in (("used", "-o"), ("dropped", "--s")):
                mine = sorted((r for r in tiers if (r.skew, r.page_cache) == (skew, cache)), key=lambda r: r.share)
                shares = [100 * row.share for row in mine]
                name = f"Zipf {skew:g}" + (", page cache dropped" if cache == "dropped" else "")
                axes.plot(shares, [row.value for row in mine], style, color=color, markersize=3, label=name)
                if cache == "dropped":
                    axes.plot(shares, [row.limit for row in mine], ":", color=color, linewidth=1, label="its limit")
            memory = [row.peer_value for row in tiers if row.skew == skew and row.peer_value is not None]
            axes.axhline(statistics.median(memory), color=MUTED, linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xticks(ticks := sorted({100 * row.share for row in tiers}), [f"{tick:g}" for tick in ticks])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("share of the rows in the fast tier, %; gray: in memory")
        axes.set_ylabel("samples/s")
        axes.legend(fontsize=7)
        figure.savefig(path, dpi=150)


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a share above 0, at most 1")
    return share


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=6_000_000, help="of all tables; 512 bytes each")
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--warm-steps", type=int, default=4)
    parser.add_argument("--turns", type=int, default=2, help="with the page cache, and as many with dropped pages")
    parser.add_argument("--skews", type=float, nargs="+", default=[0.8, 1.05, 1.2])
    parser.add_argument("--shares", type=_share, nargs="+", default=[1.0, 0.5, 0.25, 0.1, 0.05, 0.01])
    parser.add_argument("--no-peers", action="store_true", help="leave out plain PyTorch on np.memmap and RocksDB")
    parser.add_argument("--dir", type=Path, help="a directory on the disk to measure")
    parser.add_argument("--dry", action="store_true", help="print the figures alone")
    options = parser.parse_args(arguments)
    plan = Plan(
        rows=options.rows // FEATURES,
        steps=options.steps,
        warm_steps=options.warm_steps,
        turns=options.turns,
        skews=tuple(options.skews),
        shares=tuple(options.shares),
    )
    keep_freed_memory()
    rows: list[TierRow] = []

    def record(found: Iterable[TierRow]) -> None:
        for row in found:
            append_rows(NAME, [row], dry=options.dry)
            rows.append(row)

    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        comparison = Comparison(plan, Path(folder), with_peers=not options.no_peers)
        print(f"the disk: {comparison.disk_reads:,.0f} random reads of {PAGE} bytes a second")
        if not options.no_peers:
            for skew in plan.skews:
                record(comparison.peer_rows(skew))
        for share in plan.shares:
            record(comparison.share_rows(share))
            gc.collect()
        if rows and not options.dry:
            draw(rows, RESULTS / f"{NAME}.png")


if __name__ == "__main__":
    main()
