# SPDX-License-Identifier: Apache-2.0
"""Compare DLRM on several single-threaded processes with one such process, and count the bytes that they exchange.

The sides take turns; the ranks of one side step together. The limit of the speed is the speed of one process times the
number of ranks. The limit of the bytes is the size of the distinct keys, their vectors and gradients, and a ring
all-reduce of the layers' gradients.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from record import Row, append_rows
from step_sides import WORKLOADS, batches, terarec_model

from terarec.apps.planner import plan_tables
from terarec.batch import Batch, Jagged
from terarec.dist import Ranks, RowWise, ShardingPlan, TableWise, join, same_for_all, shard
from terarec.dist.costs import MachineCosts, TableLoad
from terarec.dist.plan import PooledOn, TablePlan
from terarec.embedding import EmbeddingCollection
from terarec.embedding.tables import record_tables
from terarec.optim import RowOptimizer
from terarec.spec import AdaGradSpec, FeatureSpec, SGDSpec, TableSpec, TrainingSpec
from terarec.train import Optimizers, Trainer
from terarec.train.devices import keep_freed_memory

WORKLOAD = WORKLOADS["gemm"]
CASE = "DLRM 26 x 384,615 x 64, batch 8192, SGD, a thread each"
TRAFFIC = ("exchange of keys", "exchange of vectors", "exchange of gradients", "sum of the layers' gradients")


class Side:
    """Processes that step together.

    Args:
        size: Number of processes.
        words: Options of the workers.
        interpreter: Python that has the libraries of the side.
        script: The program that they run.
    """

    def __init__(
        self, size: int, words: Sequence[str] = (), *, interpreter: str = sys.executable, script: str = __file__
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._processes = [
            subprocess.Popen(
                [interpreter, script, "--worker", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    **({"RANK": str(rank), "WORLD_SIZE": str(size)} if size > 1 else {}),
                },
            )
            for rank in range(size)
        ]
        self.request("ready")

    def request(self, words: str) -> list[float]:
        """Send a command to all processes, and return the numbers that rank 0 answers."""
        return self.ask_all(words)[0]

    def ask_all(self, words: str) -> list[list[float]]:
        """Send a command to all processes, and return the numbers that each answers."""
        self.send(words)
        return self.receive()

    def send(self, words: str) -> None:
        """Send a command to all processes."""
        for process in self._processes:
            assert process.stdin is not None, "it is a pipe"
            process.stdin.write(words + "\n")
            process.stdin.flush()

    def receive(self) -> list[list[float]]:
        """Return the numbers that each process answers to the last command."""
        answers = []
        for process in self._processes:
            assert process.stdout is not None, "it is a pipe"
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"benchmark worker failed: {process.args}")
            answers.append([float(word) for word in line.split()])
        return answers

    def step(self) -> float:
        """Return the seconds of one step of all processes."""
        start = time.perf_counter()
        self.request("step")
        return time.perf_counter() - start

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            assert process.stdin is not None, "it is a pipe"
            process.stdin.close()
            process.wait()


def work(*, is_sharded: bool, is_whole: bool) -> None:
    """Run one process: it steps, or answers the bytes sent since the last question and their lower bound."""
    torch.set_num_threads(1)
    keep_freed_memory()
    ranks = join()
    if ranks.size > 1 or is_sharded:
        with record_tables():
            model = terarec_model(WORKLOAD)
        specs = [s for held in model.modules() if isinstance(held, EmbeddingCollection) for s in held.specs]
        plan = same_for_all(specs, RowWise(), ranks.size)
        if is_whole:
            entries = [TablePlan(table=s.name, placement=TableWise(rank=n % ranks.size)) for n, s in enumerate(specs)]
            plan = ShardingPlan(world_size=ranks.size, tables=tuple(entries))
        shard(model, plan, ranks)
    else:
        model = terarec_model(WORKLOAD)
    trainer = Trainer(model, TrainingSpec(), Optimizers.of(model, SGDSpec(lr=0.1), SGDSpec(lr=0.1)), ranks=ranks)
    held = batches(WORKLOAD)
    number = 0
    for line in sys.stdin:
        words = line.strip()
        if words == "ready":
            print(0, flush=True)
        elif words == "step":
            trainer.train_step(held[number % len(held)], following=held[(number + 1) % len(held)])
            number += 1
            print(0, flush=True)
        else:
            batch, following = held[number % len(held)], held[(number + 1) % len(held)]
            before = [_sent(ranks, name) for name in TRAFFIC]
            trainer.train_step(batch, following=following)
            number += 1
            after = [_sent(ranks, name) for name in TRAFFIC]
            sent = [now - then for now, then in zip(after, before, strict=True)]
            # The keys that were sent are those of the next batch.
            fewest = [fewest_bytes(following, ranks, trainer)[0], *fewest_bytes(batch, ranks, trainer)[1:]]
            print(*sent, *fewest, flush=True)
    ranks.close()


def _sent(ranks: Ranks, name: str) -> int:
    return sum(count for what, count in ranks.sent_bytes.items() if what.startswith(name))


def fewest_bytes(batch: Batch, ranks: Ranks, trainer: Trainer) -> list[float]:
    """Return the lower bound of the bytes that this rank must send, for each of `TRAFFIC`."""
    keys = batch.sparse.keys.view(WORKLOAD.features, WORKLOAD.batch)
    shares = [keys[:, ranks.share(WORKLOAD.batch, rank)] for rank in range(ranks.size)]
    foreign = _foreign(shares[ranks.rank], ranks, owner=None, me=ranks.rank)
    foreign_keys = sum(_foreign(share, ranks, owner=ranks.rank, me=rank) for rank, share in enumerate(shares))
    row = 4 * WORKLOAD.width
    layers = sum(p.nbytes for p in trainer.model.parameters() if p.numel())
    return [8 * foreign, row * foreign_keys, row * foreign, 2 * (ranks.size - 1) / ranks.size * layers]


def _foreign(keys: torch.Tensor, ranks: Ranks, *, owner: int | None, me: int) -> int:
    """Return the distinct keys of a rank's share whose rows other ranks own, or that `owner` owns."""
    found = 0
    for mine in keys:
        owners = mine.unique() % ranks.size
        found += int((owners != me).sum()) if owner is None else int((owners == owner).sum()) * (owner != me)
    return found


def measure(sides: dict[str, Side], repeats: int) -> dict[str, float]:
    """Return the median seconds of a step of each side."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side.step()
    for _ in range(repeats):
        for name, side in sides.items():
            seconds[name].append(side.step())
    return {name: statistics.median(values) for name, values in seconds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--case", choices=("speed", "placed", "skew", "bags", "torchrec"), default="speed")
    parser.add_argument("--peer-python", default=str(Path(__file__).parents[1] / ".venv-peers" / "bin" / "python"))
    parser.add_argument("--skewed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sharded", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bags", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args(arguments)
    if options.worker:
        if options.bags:
            work_on_bags()
        elif options.skewed:
            work_on_skew()
        else:
            work(is_sharded=options.sharded, is_whole=options.whole)
        return
    rows = {
        "speed": lambda: speed_rows(options.ranks, options.repeats),
        "placed": lambda: placed_rows(options.repeats),
        "skew": lambda: skew_rows(options.ranks, options.repeats),
        "bags": lambda: bag_rows(options.ranks, options.repeats),
        "torchrec": lambda: torchrec_rows(options.ranks, options.repeats, options.peer_python),
    }[options.case]()
    append_rows("scale_out", rows, dry=options.dry)


SKEWED_ROWS = (1_000_000, 300_000, 100_000, 30_000, 10_000, 3_000, 1_000, 300)
SKEWED_WIDTH = 32
ZIPF = 1.2
SKEW_CASE = (
    f"{len(SKEWED_ROWS)} tables of 1,000,000 to 300 rows x {SKEWED_WIDTH}, AdaGrad, keys by Zipf {ZIPF}, batch 8192"
)


def skewed_keys(rows: int, batch: int, generator: torch.Generator) -> torch.Tensor:
    """Return keys int64[batch], where the probability of key k is proportional to (k + 1) ** -`ZIPF`."""
    cumulated = torch.arange(1, rows + 1, dtype=torch.float64).pow(-ZIPF).cumsum(0)
    drawn = torch.rand(batch, generator=generator, dtype=torch.float64) * cumulated[-1]
    return torch.searchsorted(cumulated, drawn).clamp_(max=rows - 1)


def work_on_skew() -> None:
    """Run one process that trains only tables, by the planner's plan; it answers the CPU seconds of some steps."""
    torch.set_num_threads(1)
    keep_freed_memory()
    ranks = join()
    batch = WORKLOAD.batch
    specs = [TableSpec(name=f"C{n}", rows=rows, width=SKEWED_WIDTH) for n, rows in enumerate(SKEWED_ROWS)]
    features = [FeatureSpec(name=spec.name, table=spec.name) for spec in specs]
    generator = torch.Generator().manual_seed(0)
    held = [[skewed_keys(rows, batch, generator) for rows in SKEWED_ROWS] for _ in range(4)]
    loads = [
        TableLoad(
            spec=spec,
            rows=spec.rows,
            num_bytes=spec.rows * 8 * SKEWED_WIDTH,
            row_bytes=8 * SKEWED_WIDTH,
            batches=[[keys[n][ranks.share(batch, rank)].unique() for rank in range(ranks.size)] for keys in held],
        )
        for n, spec in enumerate(specs)
    ]
    planned = plan_tables(loads, ranks.size, MachineCosts())
    tables = shard(EmbeddingCollection(specs, features), planned.plan, ranks)
    optimizer = RowOptimizer(tables, AdaGradSpec(lr=0.01))
    mine = ranks.share(batch)
    offsets = torch.arange(len(specs) * (mine.stop - mine.start) + 1)
    names = tuple(spec.name for spec in specs)
    inputs = [Jagged(names=names, keys=torch.cat([k[mine] for k in keys]), offsets=offsets) for keys in held]
    for line in sys.stdin:
        start = time.process_time()
        for number in range(0 if line.strip() == "ready" else int(line)):
            pooled = tables(inputs[number % len(inputs)]).pooled
            pooled.square().mean().backward()
            optimizer.step()
        print(time.process_time() - start, planned.slowest_over_mean, flush=True)
    ranks.close()


def skew_rows(size: int, repeats: int) -> list[Row]:
    """Measure the CPU time of the slowest rank over the mean, in the median of blocks of steps."""
    side = Side(size, ["--skewed"])
    side.request("3")
    found = []
    for _ in range(repeats):
        answers = side.ask_all("10")
        seconds = [answer[0] for answer in answers]
        found.append(max(seconds) * size / sum(seconds))
    side.close()
    case = f"{SKEW_CASE}, {size} ranks by the planner"
    return [
        Row(case=case, metric="CPU time of the slowest rank over the mean", value=statistics.median(found), unit="x",
            peer="planned", peer_value=answers[0][1]),
    ]  # fmt: skip


BAG = 20
BAG_ROWS, BAG_BATCH, BAG_WIDTH = 1_000_000, 8192, 64
BAG_CASE = f"2 tables x {BAG_ROWS:,} x {BAG_WIDTH} by row, bags of {BAG} keys by Zipf {ZIPF}, SGD, batch {BAG_BATCH}"
POOLINGS: tuple[PooledOn, ...] = ("samples", "rows")


def work_on_bags() -> None:
    """Run one process that trains tables of bags; it answers a step's seconds and sent bytes, by which ranks pool."""
    torch.set_num_threads(1)
    keep_freed_memory()
    ranks = join()
    specs = [TableSpec(name=f"C{n}", rows=BAG_ROWS, width=BAG_WIDTH) for n in range(2)]
    features = [FeatureSpec(name=spec.name, table=spec.name) for spec in specs]
    mine, generator = ranks.share(BAG_BATCH), torch.Generator().manual_seed(0)
    keys = [skewed_keys(BAG_ROWS, BAG_BATCH * BAG, generator).view(BAG_BATCH, BAG)[mine] for _ in specs]
    bags = len(specs) * (mine.stop - mine.start)
    names = tuple(spec.name for spec in specs)
    jagged = Jagged(names=names, keys=torch.stack(keys).flatten(), offsets=torch.arange(bags + 1) * BAG)
    sides = {}
    for pooling in POOLINGS:
        entries = tuple(TablePlan(table=spec.name, placement=RowWise(), pooling=pooling) for spec in specs)
        with record_tables():
            collection = EmbeddingCollection(specs, features)
        tables = shard(collection, ShardingPlan(world_size=ranks.size, tables=entries), ranks)
        sides[pooling] = tables, RowOptimizer(tables, SGDSpec(lr=0.01))
    for line in sys.stdin:
        if line.strip() == "ready":
            print(0, flush=True)
            continue
        tables, optimizer = sides[POOLINGS[line.strip() == "rows"]]
        before, start = sum(ranks.sent_bytes.values()), time.perf_counter()
        tables(jagged).pooled.square().mean().backward()
        optimizer.step()
        print(time.perf_counter() - start, sum(ranks.sent_bytes.values()) - before, flush=True)
    ranks.close()


def bag_rows(size: int, repeats: int) -> list[Row]:
    """Measure the bytes and time of a step, with bags pooled by the ranks of the rows or of the samples."""
    side = Side(size, ["--bags"])
    seconds: dict[str, list[float]] = {pooling: [] for pooling in POOLINGS}
    sent: dict[str, float] = {}
    for number in range(repeats + 1):
        for pooling in POOLINGS:
            answers = side.ask_all(pooling)
            sent[pooling] = sum(answer[1] for answer in answers) / 2**20
            if number:
                seconds[pooling].append(max(answer[0] for answer in answers))
    side.close()
    case, peer = f"{BAG_CASE}, {size} ranks, pooled by those of the rows", "pooled by the ranks of the samples"
    there, here = (statistics.median(seconds[pooling]) for pooling in ("rows", "samples"))
    return [
        Row(case=case, metric="bytes of a step", value=sent["rows"], unit="MiB", peer=peer, peer_value=sent["samples"]),
        Row(case=case, metric="step", value=1e3 * there, unit="ms", peer=peer, peer_value=1e3 * here),
    ]


def speed_rows(size: int, repeats: int) -> list[Row]:
    """Measure the speed of several ranks and the bytes that one rank sends."""
    sides = {"one": Side(1), "ranks": Side(size, ["--sharded"])}
    seconds = measure(sides, repeats)
    counted = sides["ranks"].request("bytes")
    for side in sides.values():
        side.close()
    case = f"{CASE}, {size} ranks by row"
    speed = Row(
        case=case,
        metric="speed over one process",
        value=seconds["one"] / seconds["ranks"],
        unit="x",
        limit=float(size),
    )
    traffic = [
        Row(
            case=case,
            metric=f"bytes a rank sends, {name}",
            value=value / 2**20,
            unit="MiB",
            limit=least / 2**20,
        )
        for name, value, least in zip(TRAFFIC, counted[: len(TRAFFIC)], counted[len(TRAFFIC) :], strict=True)
    ]
    return [speed, *traffic]


def placed_rows(repeats: int) -> list[Row]:
    """Measure the overhead of the exchange with a single rank."""
    sides = {"one": Side(1), "placed": Side(1, ["--sharded"])}
    seconds = measure(sides, repeats)
    for side in sides.values():
        side.close()
    return [
        Row(
            case=f"{CASE}, tables placed on one rank",
            metric="training step",
            value=seconds["placed"] * 1e3,
            unit="ms",
            peer="not placed",
            peer_value=seconds["one"] * 1e3,
        )
    ]


def torchrec_rows(size: int, repeats: int, interpreter: str) -> list[Row]:
    """Compare a step of several ranks with TorchRec's, and its bytes on the loopback device.

    Run it in a separate network namespace (``unshare -n sh -c "ip link set lo up; ..."``) without other traffic.
    """
    script = str(Path(__file__).with_name("scale_out_torchrec.py"))
    sides = {
        "terarec": Side(size, ["--sharded", "--whole"]),
        "torchrec": Side(size, ["--sharded"], interpreter=interpreter, script=script),
    }
    seconds = measure(sides, repeats)
    sent = {}
    for name, side in sides.items():
        before = _loopback_bytes()
        side.step()
        sent[name] = (_loopback_bytes() - before) / 2**20
        side.close()
    case = f"{CASE}, {size} ranks, tables whole in turn"
    return [
        Row(
            case=case,
            metric=metric,
            value=values["terarec"] * factor,
            unit=unit,
            peer="torchrec",
            peer_value=values["torchrec"] * factor,
        )
        for metric, values, factor, unit in (
            ("training step", seconds, 1e3, "ms"),
            ("bytes on the loopback device in a step, all ranks", sent, 1.0, "MiB"),
        )
    ]


def _loopback_bytes() -> int:
    """Return the bytes sent so far over the loopback device of this network namespace, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise SystemExit("no loopback device")


if __name__ == "__main__":
    main()
