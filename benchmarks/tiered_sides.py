# SPDX-License-Identifier: Apache-2.0
"""Sides of DLRM training over tables larger than memory, which take turns.

`beyond_memory.py` draws a curve over the share of rows in fast memory; `tiered_training.py` compares two shares with
other ways to train such tables.

All rows are on the disk before training, with the state of AdaGrad (512 bytes a row). Sides take turns of a few steps:
tables in memory, and tables in tiers, which prefetch the rows of the next batches during a step, as `Trainer.fit` does.
"Page cache dropped" means that the files' pages are written and dropped before a turn, so that a turn reads nearly all
rows from the disk. In other turns the kernel may keep any pages in free memory. Turns with dropped pages come last.

A share counts rows: with 0.01, one row of a hundred has a slot in the fast tier. Indexes of rows in files count in the
budget only beyond 64 MiB, so the budget is the size of the rows' slots plus that excess. `rows_mib` is the memory of
rows in the fast tier; `table_mib` is all host memory of the tables, including indexes and buffers. The timing of a turn
starts at its second step and ends two steps before its last, so that it reads ahead as many batches as it trains.

The limit is the slower of two: the step in memory, and the disk, with one random page read for each row that the side
read, at the rate of a loop of such reads that bypass the page cache (O_DIRECT) in the same run. A share that does not
hold the rows of one batch is left out.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from record import Row
from step_sides import NUM_DENSE

from terarec.batch import Batch, Jagged, one_hot
from terarec.embedding import EmbeddingCollection
from terarec.kernels.slots import SLOT_BYTES
from terarec.memory.budget import INDEX_ALLOWANCE
from terarec.memory.cached_part import BudgetError
from terarec.memory.fast_tier import TierUse
from terarec.memory.row_file import RowFile
from terarec.models import DLRM
from terarec.optim import RowOptimizer
from terarec.spec import (
    AdaGradSpec,
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    DLRMSpec,
    FeatureSpec,
    LabelColumn,
    StaticTablesSpec,
    TableSpec,
    Tiers,
    TrainingSpec,
)
from terarec.storage import RowValues
from terarec.storage.kinds import AnyTable
from terarec.train import Optimizers, Trainer
from terarec.train.devices import read_ahead

FEATURES, WIDTH = 26, 64
BOTTOM, TOP = (512, 256, WIDTH), (1024, 1024, 512, 256)
NAMES = tuple(f"C{number}" for number in range(FEATURES))
ROW_BYTES = 2 * 4 * WIDTH  # weights and AdaGrad's sums
LR = 0.01
FILL_ROWS = 65_536
WARM_KEYS = 8192  # rows of each table at a time
CACHES = ("used", "dropped")
_PAGE = 4096
_READERS = 64  # threads of the disk's probe
_PROBE_BYTES = 4 << 30  # size of the file that measures the disk's reads
_UNTIMED_STEPS = 3  # steps of a turn: the first, and two whose rows are prefetched during other steps


@dataclass(frozen=True, kw_only=True)
class TierRow(Row):
    """A row with statistics of the tiers. Counts of rows are per step.

    Attributes:
        share: Share of the rows in the fast tier.
        table_mib: Host memory of the tables: rows, indexes and buffers.
        rows_mib: Host memory of the rows in the fast tier.
        budget_mib: Budget of host memory.
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
        """Run a step for each batch; call `done` after each step."""


class Keys:
    """Batches whose keys follow Zipf's law; a permutation decides which are frequent.

    Args:
        rows: Rows of each table.
        batch: Samples of a batch.
    """

    def __init__(self, rows: int, batch: int) -> None:
        self.rows = rows
        self._batch_size = batch
        self._order = np.random.default_rng(0).permutation(rows)

    def batches(self, skew: float, count: int, seed: int) -> list[Batch]:
        shares = np.cumsum(np.arange(1, self.rows + 1, dtype=np.float64) ** -skew)
        generator = np.random.default_rng((seed, int(100 * skew)))
        return [self._batch(generator, shares / shares[-1]) for _ in range(count)]

    def of_ranks(self, first: int, end: int) -> Jagged:
        """Return the keys of these frequency ranks, of all tables."""
        keys = torch.from_numpy(self._order[first:end])
        return one_hot(NAMES, keys.expand(FEATURES, -1))

    def _batch(self, generator: np.random.Generator, shares: np.ndarray) -> Batch:
        ranks = np.searchsorted(shares, generator.random((FEATURES, self._batch_size))).clip(max=self.rows - 1)
        return Batch(
            dense=torch.from_numpy(generator.standard_normal((self._batch_size, NUM_DENSE), dtype=np.float32)),
            label=torch.from_numpy(generator.integers(0, 2, (self._batch_size, 1)).astype(np.float32)),
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
        """Write all rows."""
        for table in self.embedding.tables.values():
            fill(table)

    def warm(self, keys: Keys, share: float) -> None:
        """Look up the most frequent rows, the rarest of them first, so that the fast tier is as after a long run."""
        end = int(share * keys.rows)
        at_once = max(1, min(WARM_KEYS, end // 4))
        with torch.no_grad():
            while end > 0:
                self.embedding(keys.of_ranks(max(0, end - at_once), end))
                end -= at_once


def fill(table: AnyTable) -> None:
    """Write all rows of a table, in pieces of `initial_values`."""
    values = torch.from_numpy(initial_values())
    for first in range(0, len(table), FILL_ROWS):
        keys = torch.arange(first, min(first + FILL_ROWS, len(table)))
        part = values[: len(keys)]
        state = {table.state_names[0]: part[:, WIDTH:]}
        table.import_(RowValues(keys=keys, weights=part[:, :WIDTH], state=state))


def initial_values() -> np.ndarray:
    """Return the weights and positive state of `FILL_ROWS` rows; all pieces of a table begin with them."""
    values = np.random.default_rng(7).random((FILL_ROWS, 2 * WIDTH), dtype=np.float32)
    values[:, :WIDTH] = 0.02 * (values[:, :WIDTH] - 0.5)
    return values


class FilledTables:
    """All rows in read-only files; tables in tiers start with hard links to them.

    Args:
        directory: Directory of the files.
        rows: Rows of each table.
    """

    def __init__(self, directory: Path, rows: int) -> None:
        self._directory = directory
        directory.mkdir()
        tiers = Tiers(host="64MiB", file=str(directory / "made"))
        made = EmbeddingCollection(
            [TableSpec(name=NAMES[0], rows=rows, width=WIDTH, tiers=tiers)], [FeatureSpec(name="f", table=NAMES[0])]
        )
        RowOptimizer(made, AdaGradSpec(lr=LR))
        fill(made.tables[NAMES[0]])
        first = directory / NAMES[0]
        made.tables[NAMES[0]].snapshot(first)
        file = RowFile.open(first, read_only=True)
        self.index_bytes = FEATURES * file.index_bytes
        file.close()
        for name in NAMES[1:]:
            shutil.copytree(first, directory / name)
            flush(directory / name)

    def open(self, tables: Mapping[str, AnyTable]) -> None:
        """Load these rows into tables."""
        for name, table in tables.items():
            assert table.adopt(self._directory / name)


def flush(directory: Path, *, drops: bool = False) -> None:
    """Write dirty pages of files to the disk, and drop the pages if requested."""
    for path in directory.rglob("*"):
        # Background compaction may remove a file at the same time.
        with suppress(FileNotFoundError, IsADirectoryError), path.open("rb") as file:
            os.fsync(file.fileno())
            if drops:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_reads(directory: Path, num_bytes: int) -> float:
    """Return the random page reads per second of a file of this size, with `_READERS` concurrent reads and O_DIRECT."""
    path, piece = directory / "probe", initial_values().tobytes()
    with path.open("wb") as file:
        for _ in range(-(-min(num_bytes, _PROBE_BYTES) // len(piece))):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    found = statistics.median(_probe(path) for _ in range(3))
    path.unlink()
    return found


def _probe(path: Path, count: int = 20_000) -> float:
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    pages = path.stat().st_size // _PAGE
    parts = np.array_split(np.random.default_rng(1).integers(0, pages, count) * _PAGE, _READERS)

    def read(offsets: np.ndarray) -> None:
        buffer = mmap.mmap(-1, _PAGE)  # aligned, as O_DIRECT requires
        for offset in offsets.tolist():
            os.preadv(file, [buffer], offset)

    with ThreadPoolExecutor(_READERS) as pool:
        start = time.perf_counter()
        list(pool.map(read, parts))
        seconds = time.perf_counter() - start
    os.close(file)
    return count / seconds


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A measurement.

    Attributes:
        rows: Rows of each table.
        memory_rows: Rows of each table in memory.
        batch: Samples of a batch.
        steps: Timed steps of a turn.
        warm_steps: Steps of each side before the turns of a skew.
        turns: Turns with the page cache, and as many with dropped pages.
        direct: Whether files bypass the page cache; then there is one kind of turns, "direct".
    """

    rows: int
    memory_rows: int
    batch: int
    steps: int
    warm_steps: int
    turns: int
    direct: bool = False

    @property
    def caches(self) -> tuple[str, ...]:
        return ("direct",) if self.direct else CACHES

    @property
    def case(self) -> str:
        size = self.table_bytes / 1e9
        return f"DLRM {FEATURES} x {self.rows:,} x {WIDTH}, batch {self.batch}, AdaGrad, {size:.3g} GB"

    @property
    def table_bytes(self) -> int:
        return FEATURES * self.rows * ROW_BYTES


def plan_options(
    *, rows: int, batch: int, steps: int, warm_steps: int, shares: Sequence[float]
) -> argparse.ArgumentParser:
    """Return a parser of the options that all scripts of tiers share, with the defaults of one script."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rows", type=int, default=rows, help="rows of all tables; 512 bytes each")
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--steps", type=int, default=steps, help="timed steps of a turn")
    parser.add_argument("--warm-steps", type=int, default=warm_steps)
    parser.add_argument(
        "--turns", type=int, default=3, help="turns with the page cache, and as many with dropped pages"
    )
    parser.add_argument("--shares", type=share_of, nargs="+", default=list(shares))
    parser.add_argument("--dir", type=Path, help="directory on the disk to measure")
    parser.add_argument("--plot", type=Path, help="file of the figure (default: next to the result rows)")
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    return parser


def plan_of(options: argparse.Namespace, *, memory_rows: int | None = None, direct: bool = False) -> Plan:
    """Return the plan of the options; `memory_rows`: rows of all tables in memory, None for as many as in tiers."""
    return Plan(
        rows=options.rows // FEATURES,
        memory_rows=(memory_rows or options.rows) // FEATURES,
        batch=options.batch,
        steps=options.steps,
        warm_steps=options.warm_steps,
        turns=options.turns,
        direct=direct,
    )


class Turns:
    """Turns of tables in tiers and of tables in memory; batches of a skew are the same for all of one size.

    Args:
        plan: The measurement.
        directory: Directory of the files.
    """

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.directory = directory
        self.keys = Keys(plan.rows, plan.batch)
        self.memory_keys = Keys(plan.memory_rows, plan.batch)
        self.memory = Tables(plan.memory_rows, None)
        self.memory.fill()
        self.memory.train(self.memory_keys.batches(1.0, 1, 9))
        self.peer = "in memory"
        if plan.memory_rows != plan.rows:
            self.peer += f", {FEATURES * plan.memory_rows * ROW_BYTES / 1e9:.3g} GB"
        self.disk_reads = disk_reads(directory, plan.table_bytes)
        print(f"the disk: {self.disk_reads:,.0f} random reads of {_PAGE} bytes a second", flush=True)
        self._filled: FilledTables | None = None

    def tiered(self, share: float) -> Tables:
        """Return the tables in tiers with a share of the rows in the fast tier, the most frequent ones."""
        if self._filled is None:
            self._filled = FilledTables(self.directory / "filled", self.plan.rows)
        budget = self._budget(share, self._filled.index_bytes)
        made = Tables(
            self.plan.rows,
            Tiers(host=str(budget), file=str(self.directory / f"rows-{share:g}"), direct=self.plan.direct),
        )
        self._filled.open(made.embedding.tables)
        made.warm(self.keys, share)
        print(f"{share:.3g} of the rows: ready", flush=True)
        return made

    def _budget(self, share: float, index_bytes: int) -> int:
        """Return the bytes of the slots of a share of the rows, plus the bytes of indexes beyond their allowance."""
        rows = FEATURES * self.plan.rows
        slots = int(share * rows)
        if (excess := index_bytes - INDEX_ALLOWANCE) > 0 and share < 1:
            slots = min(rows, int((slots + excess / ROW_BYTES) * (1 + 1 / 64)))  # given up 64ths at a time, without
        return slots * (ROW_BYTES + SLOT_BYTES) + 1  # what their slots take

    def rows_of(self, sides: Mapping[float, Tables], skew: float) -> list[TierRow]:
        """Train tables of several shares and tables in memory in turns; return rows by share and use of the cache."""
        plan = self.plan
        length = plan.steps + _UNTIMED_STEPS
        batches = self.keys.batches(skew, plan.warm_steps + len(plan.caches) * plan.turns * length, 2)
        in_memory = self.memory_keys.batches(skew, length, 2)
        sides = {share: side for share, side in sides.items() if self._is_warm(side, share, skew, batches)}
        turns = [batches[first : first + length] for first in range(plan.warm_steps, len(batches), length)]
        rates: dict[tuple[float, str], list[float]] = {(share, cache): [] for share in sides for cache in plan.caches}
        uses = dict.fromkeys(rates, TierUse())
        memory_rates: dict[str, list[float]] = {cache: [] for cache in plan.caches}
        for number, turn in enumerate(turns):
            cache = plan.caches[
                number // plan.turns
            ]  # not in turns: pages that one turn drops would be missing in the next
            for share, side in sides.items():
                if cache == "dropped":
                    flush(self.directory, drops=True)
                before = side.use
                rates[share, cache].append(rate(side, turn, untimed=_UNTIMED_STEPS))
                uses[share, cache] = uses[share, cache].plus(side.use.minus(before))
            memory_rates[cache].append(rate(self.memory, in_memory, untimed=_UNTIMED_STEPS))
        return [
            self._row(
                sides[share],
                skew,
                cache,
                value=statistics.median(found),
                memory_rate=statistics.median(memory_rates[cache]),
                use=uses[share, cache],
            )
            for (share, cache), found in rates.items()
        ]

    def _is_warm(self, side: Tables, share: float, skew: float, batches: Sequence[Batch]) -> bool:
        try:
            side.train(batches[: self.plan.warm_steps])
        except BudgetError as error:
            print(f"{share:.0%} at Zipf {skew} is left out: {error}", flush=True)
            return False
        return True

    def _row(self, side: Tables, skew: float, cache: str, *, value: float, memory_rate: float, use: TierUse) -> TierRow:
        plan, data = self.plan, side.embedding.arenas[0].data
        steps, slots = plan.turns * (plan.steps + _UNTIMED_STEPS), data.capacity
        return TierRow(
            case=f"{plan.case}, tiers", metric="training", value=value, unit="samples/s", peer=self.peer,
            peer_value=memory_rate,
            limit=min(memory_rate, plan.batch * self.disk_reads / max(1e-9, use.rows_read / steps)),
            skew=skew, share=slots / (FEATURES * plan.rows), page_cache=cache, hit_rate=use.hit_rate,
            rows_read=use.rows_read / steps, rows_written=use.rows_written / steps,
            table_mib=side.embedding.memory_bytes() / 2**20, disk_reads=self.disk_reads,
            rows_mib=slots * ROW_BYTES / 2**20, budget_mib=data.sizes.tiers.fast_bytes / 2**20,
        )  # fmt: skip


def rate(side: Side, batches: Sequence[Batch], *, untimed: int = 0) -> float:
    """Return the samples per second of all steps but `untimed` ones: the first step, and the others at the end."""
    stamps = [time.perf_counter()]
    side.train(batches, lambda: stamps.append(time.perf_counter()))
    first, end = min(1, untimed), len(batches) - max(0, untimed - 1)
    return (end - first) * batches[0].label.shape[0] / (stamps[end] - stamps[first])


def share_of(text: str) -> float:
    """Parse a share of the command line."""
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a share above 0, at most 1")
    return share
