# SPDX-License-Identifier: Apache-2.0
"""The equivalence matrix on a device: tables on ranks whose rows, keys, vectors and gradients are on a device.

They are compared with one process on the CPU, table by table, as in `tests.dist.matrix`, whose runs these are. Tables
in tiers, whose fast tier is on the device, have runs of their own, since the host waits in their lookups: it chooses
the rows that move. On the "simulated" device copies and waits of the host in a step are counted. On "cpu" the
keys are sorted as on a device. ``python -m tests.dist.matrix --device DEVICE [--quick] [--json]`` runs it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from terarec.dist import Ranks, join, lookups
from terarec.dist.sorting import sorted_keys
from terarec.spec import Tiers
from tests.dist.launch import Raised, run_ranks
from tests.dist.matrix import (
    CPU,
    FAST_ROWS,
    FEW_STEPS,
    HOST_TIERS,
    MODES,
    NAMES,
    OPTIMIZERS,
    PLACEMENTS,
    ROW_BYTES,
    SIZES,
    STEPS,
    TOLERANCES,
    Case,
    Model,
    cases,
    differences,
    expected_rows,
    merged,
    plan_of,
    rejection,
    rows_of,
    train,
)
from tests.simulated_device import device as simulated
from tests.simulated_device.group import register_group

TABLES = tuple(name for name in NAMES if not name.endswith("tiers"))
"""The tables of a run, each a cell."""
IN_TIERS = tuple(name for name in NAMES if name.endswith("tiers"))
"""The tables of runs whose fast tier is on the device; the host, which chooses the rows that move, waits in them."""
SPREAD = ("table-wise", "row-wise", "table-row-wise")
"""Placements that leave a rank the fewer rows the more ranks there are."""
WARM_UP = 2
"""Steps that are not counted: numbers that do not change come to the device once."""


class Summary(NamedTuple):
    """The results of cells.

    Attributes:
        cells: Cells that were run: tables of runs.
        worst: Largest difference of a weight, relative to the table's largest weight, but for the 16-bit wire.
        worst_bf16: That of the 16-bit wire.
        missing: Cells that were not run.
        copies_per_step: Most copies and waits in a step, on any rank, without the copy of the batch and the work of
            kernels, in whose place others run on a GPU.
        failed: What was above its bound, or failed.
    """

    cells: int
    worst: float
    worst_bf16: float
    missing: int
    copies_per_step: int
    failed: list[str]

    def plus(self, further: Summary) -> Summary:
        """Return the results with those of further cells."""
        return Summary(
            self.cells + further.cells,
            max(self.worst, further.worst),
            max(self.worst_bf16, further.worst_bf16),
            self.missing + further.missing,
            max(self.copies_per_step, further.copies_per_step),
            self.failed + further.failed,
        )


def quick_cases() -> list[Case]:
    """Return runs with each placement in each mode, and all sizes and optimizers."""
    chosen = []
    for number, (placement, mode) in enumerate(product(PLACEMENTS, MODES)):
        for again in range(2):
            rule = list(OPTIMIZERS)[(number + 3 * again + number // len(MODES)) % len(OPTIMIZERS)]
            size = SIZES[(1 + number + again + number // len(MODES)) % len(SIZES)]
            chosen.append(Case(size=size, placement=placement, optimizer=rule, mode=mode))
    return [case for case in chosen if not rejection(case)]


def tiered_cases() -> list[Case]:
    """Return a run of tables in tiers for each placement."""
    modes = ("deterministic", "fp32", "pooled there", "deterministic", "bf16 wire", "fp32")
    return [
        Case(size=SIZES[1 + number % 2], placement=placement, optimizer=rule, mode=mode)
        for number, (placement, rule, mode) in enumerate(zip(PLACEMENTS, OPTIMIZERS, modes, strict=True))
    ]


class Cells(NamedTuple):
    """Cells to run.

    Attributes:
        cases: The cases.
        steps: Steps of each.
        where: "cpu", "cuda", or the library of the simulated device.
        shares_device: Whether tensors go through host memory, as those of ranks that share a GPU.
        tables: The tables of a case, each a cell.
    """

    cases: Sequence[Case]
    steps: int
    where: str | Path
    shares_device: bool = False
    tables: tuple[str, ...] = TABLES

    def train(self, ranks: Ranks, case: Case | None, rule: str, files: Path | None = None, **options: Any) -> Model:
        """Train a case, or one process for None; see `tests.dist.matrix.train`."""
        tiers = HOST_TIERS
        if case is not None and self.where != "cpu":
            # A placement by row leaves a rank fewer rows, of which all would fit.
            fast = FAST_ROWS // case.size if case.placement in SPREAD else FAST_ROWS
            tiers = Tiers(device=f"{fast * ROW_BYTES}", host=f"{fast // 4 * ROW_BYTES}")
        plan = None if case is None else plan_of(case, self.tables)
        return train(
            ranks, plan, OPTIMIZERS[rule], steps=self.steps, names=self.tables, files=files, tiers=tiers, **options
        )


def run(
    todo: Sequence[Case],
    steps: int,
    where: str | Path,
    *,
    shares_device: bool = False,
    tables: tuple[str, ...] = TABLES,
) -> tuple[Summary, dict[Case, Any]]:
    """Run cases on as many processes as the largest takes; see `Cells` for the arguments.

    Returns:
        The summary, and for each case the differences by table, or its error.
    """
    cells = Cells(list(todo), steps, where, shares_device, tables)
    size = max(case.size for case in todo)
    expected = _expected(steps, where, tables, frozenset(case.optimizer for case in todo))
    with TemporaryDirectory() as files:
        results = run_ranks(size, _run_cases, cells, expected, Path(files), joins=False)
    broken = [f"rank {rank}: {result}" for rank, result in enumerate(results) if isinstance(result, Raised | str)]
    if broken:
        return Summary(0, 0.0, 0.0, len(todo) * len(tables), 0, broken), {}
    found: dict[Case, Any] = {}
    copies: dict[Case, int] = {}
    for number, case in enumerate(todo):
        parts = [result[number] for result in results[: case.size]]
        errors = [part for part in parts if isinstance(part, str)]
        found[case] = errors[0] if errors else merged([part for part, _ in parts])
        copies[case] = 0 if errors else max(count for _, count in parts)
    return _summed(found, copies, len(tables)), found


@cache
def _expected(
    steps: int, where: str | Path, tables: tuple[str, ...], rules: frozenset[str]
) -> dict[tuple[str, bool], dict[str, tuple[Tensor, Tensor]]]:
    """Return the rows of one process, which pieces of the matrix share: optimizer and whether layers train -> rows."""
    expected = expected_rows(steps, tables, rules)
    if where != "cpu":
        # Sums of other kernels have other last bits: equal ones are those of one process on the device.
        (of_device,) = run_ranks(1, _expected_on_device, Cells([], steps, where, tables=tables), rules, joins=False)
        assert isinstance(of_device, dict), of_device
        expected |= of_device
    return expected


def _summed(found: dict[Case, Any], copies: dict[Case, int], num_tables: int) -> Summary:
    cells, missing, worst = 0, 0, {True: 0.0, False: 0.0}
    failed = []
    for case, result in found.items():
        if isinstance(result, str):
            missing += num_tables
            failed.append(f"{case}: {result}")
            continue
        cells += num_tables
        is_narrow = case.mode == "bf16 wire"
        worst[is_narrow] = max([worst[is_narrow], *result.values()])
        failed += [f"{case}, {name}: {value}" for name, value in result.items() if value > TOLERANCES[case.mode]]
    most = max(copies.values(), default=0)
    return Summary(cells, worst[False], worst[True], missing, most, failed)


def device_of(where: str | Path) -> torch.device:
    """Return the device of this process: "cpu", "cuda", or the one whose backend is in a library."""
    if where == "cpu":
        # The way of a device, in host memory.
        lookups.hashed_keys = sorted_keys
        return CPU
    if where == "cuda":
        return torch.device("cuda", 0)
    device = simulated.register(Path(where))
    simulated.treat_as_gpu()
    simulated.count_accesses()
    register_group(device.type)
    return device


def _expected_on_device(
    _: int, cells: Cells, rules: Collection[str]
) -> dict[tuple[str, bool], dict[str, tuple[Tensor, Tensor]]]:
    """Train in one process on the device, as deterministic cases do: optimizer and False -> `rows_of`."""
    device = device_of(cells.where)
    return {
        (rule, False): rows_of(cells.train(Ranks(), None, rule, trains_layer=False, device=device)) for rule in rules
    }


def _run_cases(rank: int, cells: Cells, expected: dict[tuple[str, bool], Any], files: Path) -> list[Any]:
    """Run cases on this rank; return for each the differences and the copies of a step, or its error."""
    device = device_of(cells.where)
    ranks = join(link_timeout=200.0, device=device, shares_device=cells.shares_device)
    groups = {size: ranks.subset(list(range(size))) for size in SIZES if size < ranks.size} | {ranks.size: ranks}
    results: list[Any] = []
    for number, case in enumerate(cells.cases):
        group = groups[case.size]
        results.append(None if group is None else _run_case(group, cells, case, expected, device, files / str(number)))
    ranks.barrier("end")
    ranks.close()
    return results


def _run_case(
    ranks: Ranks, cells: Cells, case: Case, expected: dict[tuple[str, bool], Any], device: torch.device, files: Path
) -> Any:
    trains_layer = case.mode != "deterministic"  # sums of gradients of layers have another order
    counted: list[int] = []
    try:
        model = cells.train(
            ranks,
            case,
            case.optimizer,
            files if cells.tables == IN_TIERS else None,
            trains_layer=trains_layer,
            device=device,
            around_step=partial(_counting, counted, device),
        )
        return differences(ranks, model, expected[case.optimizer, trains_layer]), max(counted[WARM_UP:], default=0)
    except Exception as error:
        if device == CPU:
            raise
        return f"{type(error).__name__}: {error}"


@contextmanager
def _counting(counted: list[int], device: torch.device) -> Iterator[None]:
    """Add the copies and waits of what runs inside to the list."""
    if device.type != simulated.NAME:
        yield
        return
    before = simulated.counts()
    yield
    counted.append(sum(simulated.counts().since(before)))


def pieces(todo: Sequence[Case], *, is_quick: bool) -> list[list[Case]]:
    """Return the runs in pieces, each of some minutes: by mode, size and placement, or all at once if they are few."""
    if is_quick:
        return [list(todo)] if todo else []
    by_piece: dict[tuple[str, int, str], list[Case]] = {}
    for case in todo:
        by_piece.setdefault((case.mode, case.size, case.placement), []).append(case)
    return list(by_piece.values())


def main(device: str, *, modes: Sequence[str], sizes: Sequence[int], is_quick: bool, is_json: bool) -> None:
    """Run the matrix in pieces, print what is wrong and then the summary; exit with 1 where something is.

    Args:
        device: "cpu", "cuda" or "simulated".
        modes: The modes that are run.
        sizes: The numbers of ranks that are run.
        is_quick: Whether to run some of the cells.
        is_json: Whether to print the summary and what is wrong alone.
    """
    begin = time.monotonic()
    where: str | Path = device
    if device == simulated.NAME:
        if reason := simulated.missing_to_build():
            raise SystemExit(reason)
        simulated.BUILT.mkdir(parents=True, exist_ok=True)
        where = simulated.build(simulated.BUILT)
    steps, summary = FEW_STEPS if is_quick else STEPS, Summary(0, 0.0, 0.0, 0, 0, [])
    every = [case for case in cases() if not rejection(case)]
    for tables, chosen in ((TABLES, quick_cases()), (IN_TIERS, tiered_cases())):
        todo = [case for case in (chosen if is_quick else every) if case.mode in modes and case.size in sizes]
        for piece in pieces(todo, is_quick=is_quick):
            try:
                of_piece, found = run(piece, steps, where, tables=tables)
            except TimeoutError as error:
                of_piece, found = Summary(0, 0.0, 0.0, len(piece) * len(tables), 0, [f"{piece[0]}, ...: {error}"]), {}
            # In steps of tables in tiers the host chooses rows and waits.
            summary = summary.plus(of_piece._replace(copies_per_step=0) if tables == IN_TIERS else of_piece)
            if not is_json:
                for case, result in found.items():
                    print(case, result)
                print(f"{summary.cells} cells after {time.monotonic() - begin:.0f} s", flush=True)
    for line in summary.failed:
        print(line, file=sys.stderr)
    print(json.dumps({name: value for name, value in summary._asdict().items() if name != "failed"}))
    if summary.failed:
        raise SystemExit(1)
