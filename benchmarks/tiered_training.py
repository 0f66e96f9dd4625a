"""DLRM steps with tables in tiers: samples a second against the share of the rows in the fast tier.

All rows are on the disk before, with the state of AdaGrad (512 bytes a row). Sides take turns of a few steps: tables in
memory; tables in tiers, which read the rows of the next batches while one trains, as `Trainer.fit` does; plain PyTorch
that gathers the rows of a batch from an ``np.memmap`` and writes them back; the same on RocksDB where ``rocksdict`` is
installed. "Page cache dropped": the files' pages are written and dropped before a turn, so that nearly all rows that a
turn reads come from the disk; otherwise the kernel may keep what it likes in free memory.

A share counts rows: with 0.01, one row of a hundred has a slot in the fast tier. The indexes of rows in files count in
the budget beyond 64 MiB, so the budget is that of the rows' slots and of that excess; `rows_mib` is what rows in the
fast tier take, `table_mib` all that the tables take of host memory, indexes and buffers included. A turn is timed from
its second step on and has two more after it, so that as many batches are read ahead in it as it trains.

With ``--memory-rows``, the tables in memory are smaller than those in tiers, for machines whose memory does not hold
all: their rate then stands for that of all rows in memory, which is a little lower (more distinct rows in a batch).

The limit is the slower of the step in memory and of the disk: as many random reads of a page as the side read rows, at
the rate of a loop of such reads past the page cache (O_DIRECT) in the same run. A share that does not hold the rows of
one batch is left out. The largest files at a time are those of one peer, or 1.5 times the rows for tiers.
`beyond_memory.py` is about preparation: group-bys, sorts and joins.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import shutil
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
from terarec.storage import Rows, TierUse
from terarec.storage.rocksdb_store import RocksDBStore
from terarec.storage.row_file import RowFile
from terarec.storage.row_levels import BudgetError
from terarec.storage.row_store import LEAST_ROW_BYTES
from terarec.storage.slots import SLOT_BYTES
from terarec.storage.tier_budget import INDEX_ALLOWANCE
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
PROBE_BYTES = 4 << 30  # of the file that the disk's reads are taken from
UNTIMED_STEPS = 3  # of a turn: the first, and two whose rows are read while others train
COLORS = (BLUE, ORANGE, GREEN, PURPLE, OCHRE)


@dataclass(frozen=True, kw_only=True)
class TierRow(Row):
    """A row with what the tiers did. Rows are counted a step.

    Attributes:
        share: rows in the fast tier.
        table_mib: host memory of the tables: rows, indexes and buffers.
        rows_mib: host memory of the rows in the fast tier.
        budget_mib: the budget.
    """

    skew: float
    share: float
    page_cache: str
    hit_rate: float | None = None
    rows_read: float | None = None
    rows_written: float | None = None
    table_mib: float | None = None
    disk_reads: float | None = None
    rows_mib: float | None = None
    budget_mib: float | None = None


class Side(Protocol):
    """One way to train."""

    def train(self, batches: Sequence[Batch], done: Callable[[], object] = lambda: None) -> None:
        """Do a step for each batch; call `done` after each."""


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

    def train(self, batches: Sequence[Batch], done: Callable[[], object] = lambda: None) -> None:
        coming: Iterable[tuple[Batch, dict[str, object]]] = ((batch, {}) for batch in batches)
        for batch, _ in coming if self.embedding.tier_use() is None else read_ahead(coming, self.model):
            self.trainer.train_step(batch)
            done()

    @property
    def use(self) -> TierUse:
        return self.embedding.tier_use() or TierUse()

    def fill(self) -> None:
        """Write all rows, so that all of them are on the disk."""
        values = torch.from_numpy(first_values())
        for table in self.embedding.tables.values():
            for first in range(0, len(table), FILL_ROWS):
                keys = torch.arange(first, min(first + FILL_ROWS, len(table)))
                part = values[: len(keys)]
                state = {table.state_names[0]: part[:, WIDTH:]}
                table.import_(Rows(keys=keys, weights=part[:, :WIDTH], state=state))

    def warm(self, keys: Keys, share: float) -> None:
        """Look the most frequent rows up, the rarest of them first, so that a long run's rows are in the fast tier."""
        end = int(share * keys.rows)
        at_once = max(1, min(BATCH, end // 4))
        with torch.no_grad():
            while end > 0:
                self.embedding(keys.of_ranks(max(0, end - at_once), end))
                end -= at_once


def first_values() -> np.ndarray:
    """Weights and positive state of `FILL_ROWS` rows; all pieces of a table begin with them."""
    values = np.random.default_rng(7).random((FILL_ROWS, 2 * WIDTH), dtype=np.float32)
    values[:, :WIDTH] = 0.02 * (values[:, :WIDTH] - 0.5)
    return values


class RowPlace(Protocol):
    """Where the plain side has its rows: float32[n, 2 * D] each time."""

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Copies of rows."""

    def write(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        """Set rows."""

    def drop(self) -> None:
        """Let go of pages of files, so that the page cache can drop them."""

    def close(self) -> None:
        """Close the files."""


class MapRows:
    """Rows in an ``np.memmap``."""

    def __init__(self, directory: Path, num_rows: int) -> None:
        self._map = np.memmap(directory / "map", dtype=np.float32, mode="w+", shape=(num_rows, 2 * WIDTH))
        values = first_values()
        for first in range(0, num_rows, FILL_ROWS):
            end = min(first + FILL_ROWS, num_rows)
            self._map[first:end] = values[: end - first]
        self._map.flush()

    def read(self, numbers: np.ndarray) -> np.ndarray:
        return self._map[numbers]

    def write(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        self._map[numbers] = rows

    def drop(self) -> None:
        self._map._mmap.madvise(mmap.MADV_DONTNEED)  # what is mapped stays in the page cache

    def close(self) -> None:
        del self._map


class RocksRows:
    """Rows in RocksDB; every write is one synchronous batch."""

    def __init__(self, directory: Path, num_rows: int) -> None:
        self._store = RocksDBStore(directory / "rocksdb", ROW_BYTES)
        values = first_values()
        for first in range(0, num_rows, FILL_ROWS):
            end = min(first + FILL_ROWS, num_rows)
            self.write(np.arange(first, end), values[: end - first])

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
    """The same model on torch.nn: the distinct rows of a batch are gathered, updated by AdaGrad and written back."""

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
        keys = batch.sparse.keys.view(FEATURES, BATCH) + self._rows * torch.arange(FEATURES)[:, None]
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
    memory_rows: int
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


PEERS: dict[str, Callable[[Path, int], RowPlace]] = {"np.memmap": MapRows, "RocksDB": RocksRows}


class Comparison:
    """All sides; batches of a skew are the same for all, but for the smaller tables of the side in memory."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.directory = directory
        self.keys = Keys(plan.rows)
        self.memory_keys = Keys(plan.memory_rows)
        self.memory = Tables(plan.memory_rows, None)
        self.memory.fill()
        self.memory.train(self.memory_keys.batches(1.0, 1, 9))
        self.peer = "in memory"
        if plan.memory_rows != plan.rows:
            self.peer += f", {FEATURES * plan.memory_rows * ROW_BYTES / 1e9:.3g} GB"
        self.disk_reads = self._disk_reads()
        print(f"the disk: {self.disk_reads:,.0f} random reads of {PAGE} bytes a second")

    def _disk_reads(self) -> float:
        path, piece = self.directory / "probe", first_values().tobytes()
        with path.open("wb") as file:
            for _ in range(-(-min(self.plan.table_bytes, PROBE_BYTES) // len(piece))):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        found = statistics.median(disk_reads(path) for _ in range(3))
        path.unlink()
        return found

    def peer_rows(self, name: str) -> Iterable[TierRow]:
        """Plain PyTorch on what a peer keeps its rows in, beside tables in memory."""
        folder = self.directory / "peer"
        folder.mkdir()
        try:
            peer = Plain(self.plan.rows, PEERS[name](folder, FEATURES * self.plan.rows))
        except MissingDependencyError:
            print(f"{name} is left out: it is not installed")
            return
        for skew in self.plan.skews:
            count = 2 * self.plan.turns * self.plan.steps + 1
            batches = self.keys.batches(skew, count, 1)
            in_memory = self.memory_keys.batches(skew, self.plan.steps, 1)
            peer.train(batches[-1:])
            rates: dict[str, list[float]] = {"used": [], "dropped": [], "memory": []}
            for number in range(2 * self.plan.turns):
                cache = ("used", "dropped")[number % 2]
                if cache == "dropped":
                    peer.held.drop()
                    drop_pages(folder)
                first = number * self.plan.steps
                rates[cache].append(rate(peer, batches[first : first + self.plan.steps]))
                rates["memory"].append(rate(self.memory, in_memory))
            for cache in ("used", "dropped"):
                yield TierRow(
                    case=f"{self.plan.case}, plain PyTorch on {name}", metric="training",
                    value=statistics.median(rates[cache]), unit="samples/s", peer=self.peer,
                    peer_value=statistics.median(rates["memory"]), skew=skew, share=0.0, page_cache=cache,
                    disk_reads=self.disk_reads,
                )  # fmt: skip
        peer.held.close()
        shutil.rmtree(folder)

    def share_rows(self, share: float) -> Iterable[TierRow]:
        """Tiers with a share of the rows in the fast tier, beside tables in memory."""
        budget = self._budget(share)
        tiered = Tables(self.plan.rows, Tiers(host=str(budget), file=str(self.directory / "rows")))
        tiered.fill()
        tiered.warm(self.keys, share)
        print(f"{share:.3g} of the rows: on the disk", flush=True)
        for skew in self.plan.skews:
            try:
                yield from self._skew_rows(tiered, budget, skew)
            except BudgetError as error:
                print(f"{share:.0%} at Zipf {skew} is left out: {error}")

    def _budget(self, share: float) -> int:
        """Bytes of the slots of a share of the rows and of what indexes take beyond their allowance."""
        with tempfile.TemporaryDirectory(dir=self.directory) as folder:
            probe = RowFile.create(Path(folder) / "index", LEAST_ROW_BYTES)
            for first in range(0, self.plan.rows, FILL_ROWS):
                keys = np.arange(first, min(first + FILL_ROWS, self.plan.rows))
                probe.write(keys, np.zeros((len(keys), LEAST_ROW_BYTES), dtype=np.uint8))
            index_bytes = FEATURES * probe.index_bytes
            probe.close()
        rows = FEATURES * self.plan.rows
        slots = int(share * rows)
        if (excess := index_bytes - INDEX_ALLOWANCE) > 0 and share < 1:
            slots = min(rows, int((slots + excess / ROW_BYTES) * (1 + 1 / 64)))  # given up 64ths at a time, without
        return slots * (ROW_BYTES + SLOT_BYTES) + 1  # what their slots take

    def _skew_rows(self, tiered: Tables, budget: int, skew: float) -> list[TierRow]:
        plan = self.plan
        length = plan.steps + UNTIMED_STEPS
        batches = self.keys.batches(skew, plan.warm_steps + 2 * plan.turns * length, 2)
        in_memory = self.memory_keys.batches(skew, length, 2)
        tiered.train(batches[: plan.warm_steps])
        turns = [batches[first : first + length] for first in range(plan.warm_steps, len(batches), length)]
        rates: dict[str, list[float]] = {"used": [], "dropped": [], "memory": []}
        uses = {"used": TierUse(), "dropped": TierUse()}
        for number, turn in enumerate(turns):
            cache = ("used", "dropped")[number % 2]
            if cache == "dropped":
                drop_pages(self.directory / "rows")
            before = tiered.use
            rates[cache].append(rate(tiered, turn, untimed=UNTIMED_STEPS))
            uses[cache] = uses[cache].plus(tiered.use.minus(before))
            rates["memory"].append(rate(self.memory, in_memory, untimed=UNTIMED_STEPS))
        memory_rate, steps = statistics.median(rates["memory"]), plan.turns * length
        slots = tiered.embedding.arenas[0].data.capacity
        return [
            TierRow(case=f"{plan.case}, tiers", metric="training", value=statistics.median(rates[cache]),
                    unit="samples/s", peer=self.peer, peer_value=memory_rate,
                    limit=min(memory_rate, BATCH * self.disk_reads / max(1e-9, use.rows_read / steps)),
                    skew=skew, share=slots / (FEATURES * plan.rows), page_cache=cache, hit_rate=use.hit_rate,
                    rows_read=use.rows_read / steps, rows_written=use.rows_written / steps,
                    table_mib=tiered.embedding.memory_bytes() / 2**20, disk_reads=self.disk_reads,
                    rows_mib=slots * ROW_BYTES / 2**20, budget_mib=budget / 2**20)
            for cache, use in uses.items()
        ]  # fmt: skip


def rate(side: Side, batches: Sequence[Batch], *, untimed: int = 0) -> float:
    """Samples a second of all steps but `untimed`, of which one is the first and the others are the last."""
    stamps = [time.perf_counter()]
    side.train(batches, lambda: stamps.append(time.perf_counter()))
    first, end = min(1, untimed), len(batches) - max(0, untimed - 1)
    return (end - first) * BATCH / (stamps[end] - stamps[first])


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
        figure.savefig(path, dpi=150, bbox_inches="tight")


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a share above 0, at most 1")
    return share


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=6_000_000, help="of all tables; 512 bytes each")
    parser.add_argument("--memory-rows", type=int, help="of all tables in memory to compare with; as many as --rows")
    parser.add_argument("--steps", type=int, default=8, help="timed in a turn")
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
        memory_rows=(options.memory_rows or options.rows) // FEATURES,
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
        comparison = Comparison(plan, Path(folder))
        for name in () if options.no_peers else PEERS:
            record(comparison.peer_rows(name))
            gc.collect()
        for share in plan.shares:
            record(comparison.share_rows(share))
            gc.collect()
        if rows and not options.dry:
            draw(rows, RESULTS / f"{NAME}.png")


if __name__ == "__main__":
    main()
