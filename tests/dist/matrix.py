# SPDX-License-Identifier: Apache-2.0
"""The equivalence matrix: tables on 1, 2 and 4 ranks, placed in every way, against one process.

A run trains twelve tables at once, static and dynamic ones and static ones in tiers, read by sums, means, sequences and
weighted sums, and a layer. It is compared with the same batches in one process, table by table.
``python -m tests.dist.matrix [MODE]`` runs everything, or the part of a mode, and writes docs/equivalence.md. With
``--device`` it compares tables on a device instead, of some numbers of ranks with ``--size``
(`tests.dist.device_matrix`).
"""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from terarec.batch import Batch, Jagged
from terarec.dist import (
    ColumnWise,
    DataParallel,
    Hybrid,
    Placement,
    Ranks,
    RowWise,
    ShardingPlan,
    TableRowWise,
    TableWise,
    shard,
    sum_gradients,
)
from terarec.dist.plan import PooledOn, TablePlan
from terarec.dist.shard import ShardedCollection
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError
from terarec.optim import RowOptimizer
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    DynamicTableSpec,
    FeatureSpec,
    FTRLSpec,
    RowOptions,
    RowWiseAdaGradSpec,
    SGDSpec,
    SparseOptimizerSpec,
    TableSpec,
    Tiers,
)
from tests.dist.launch import Raised, run_ranks

CPU = torch.device("cpu")
STEPS = 20
FEW_STEPS = 7
"""Of the chosen cells; after 6 the shares of a batch have been cut in every way."""
BATCH = 32
WIDTH = 8
KEYS = 60
POOLINGS = ("sum", "mean", "sequence", "weighted")
KINDS = ("static", "dynamic", "tiers")
FAST_ROWS = 160
"""Of the 240 rows of the four tables in tiers, those that memory has room for; a batch has about 120."""
ROW_BYTES = 3 * 4 * WIDTH + 64
"""Weights, two states of Adam, and what tiers note."""
HOST_TIERS = Tiers(host=f"{FAST_ROWS * ROW_BYTES}")
MODES = ("deterministic", "fp32", "bf16 wire", "pooled there")
TOLERANCES = {"deterministic": 0.0, "fp32": 1e-6, "bf16 wire": 1e-2, "pooled there": 1e-6}
"""Largest difference of a weight from one process, relative to the table's largest weight."""
CLIP_NORM = 0.1
"""Bound of the norm of a row's gradient, which some rows of a batch exceed and others do not."""
SIZES = (1, 2, 4)
PLACEMENTS: dict[str, Placement] = {
    "data-parallel": DataParallel(),
    "table-wise": TableWise(rank=0),
    "row-wise": RowWise(),
    "column-wise": ColumnWise(),
    "table-row-wise": TableRowWise(node=0),
    "hybrid": Hybrid(hot_keys=(0, 3, 5, 59)),
}
OPTIMIZERS: dict[str, SparseOptimizerSpec] = {
    "SGD": SGDSpec(lr=0.1),
    "AdaGrad": AdaGradSpec(lr=0.05, initial_accumulator=0.1),
    "row-wise AdaGrad": RowWiseAdaGradSpec(lr=0.05, initial_accumulator=0.1),
    "Adam": AdamSpec(lr=0.01, eps=1e-3),
    "FTRL": FTRLSpec(lr=0.05, l1=0.0, l2=0.0),
    "clipped AdaGrad": AdaGradSpec(lr=0.05, initial_accumulator=0.1, rows=RowOptions(clip_norm=CLIP_NORM)),
}
NAMES = tuple(f"{pooling}.{kind}" for pooling, kind in product(POOLINGS, KINDS))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: twelve cells of the matrix, one for each table.

    Attributes:
        size: Number of ranks.
        placement: Name of the placement of all tables.
        optimizer: Name of the rule of all tables.
        mode: One of `MODES`.
    """

    size: int
    placement: str
    optimizer: str
    mode: str


def cases() -> Iterator[Case]:
    """Yield all runs."""
    for size, placement, optimizer, mode in product(SIZES, PLACEMENTS, OPTIMIZERS, MODES):
        yield Case(size=size, placement=placement, optimizer=optimizer, mode=mode)


def chosen_cases() -> list[Case]:
    """Return the runs of every suite: each placement with equal bits and without, and each optimizer and mode."""
    found = [Case(size=1, placement="row-wise", optimizer="Adam", mode="deterministic")]
    # In this order, the rules that take whole rows come upon rows cut by column.
    rules = ["clipped AdaGrad", "row-wise AdaGrad", "Adam", "FTRL", "SGD", "AdaGrad"]
    for p, placement in enumerate(PLACEMENTS):
        for m, mode in enumerate(("deterministic", ("fp32", "bf16 wire")[p % 2])):
            rule = rules[(2 * p + m) % len(rules)]
            found.append(Case(size=(2, 4)[(p + m) % 2], placement=placement, optimizer=rule, mode=mode))
        found.append(Case(size=(4, 2)[p % 2], placement=placement, optimizer=rules[p % len(rules)], mode=MODES[3]))
    return found


class Model(nn.Module):
    """Tables whose vectors are scaled column by column and compared with a sample's label.

    Its arithmetic is by element, so that a sample's gradients have the same bits in a batch of any size: matrix
    products and functions such as exp do not give that.

    Args:
        trains_layer: Whether the scales are trained.
        files: Directory of the files of tiers; None for tables in memory alone, whose rows have the same bits.
        names: Tables and features.
        tiers: Budgets of the tiers, without their directory.
    """

    def __init__(
        self,
        *,
        trains_layer: bool,
        files: Path | None = None,
        names: Sequence[str] = NAMES,
        tiers: Tiers = HOST_TIERS,
    ) -> None:
        super().__init__()
        self.names = tuple(names)
        in_tiers = None if files is None else replace(tiers, file=str(files))
        tables = [
            DynamicTableSpec(name=name, width=WIDTH)
            if name.endswith("dynamic")
            else TableSpec(name=name, rows=KEYS, width=WIDTH, tiers=in_tiers if name.endswith("tiers") else None)
            for name in names
        ]
        features = [FeatureSpec(name=name, table=name, pooling=pooling_of(name)) for name in names]
        self.tables: nn.Module = EmbeddingCollection(tables, features, seed=5)
        generator = torch.Generator().manual_seed(1)
        scales = torch.randn(len(names) * WIDTH, generator=generator)
        self.scales = nn.Parameter(scales, requires_grad=trains_layer)

    def forward(self, jagged: Jagged, labels: Tensor) -> Tensor:
        """Return the sum of the squared differences."""
        out = self.tables(jagged)
        columns = out.pooled.shape[1]
        loss: Tensor = (out.pooled * self.scales[:columns] - labels[:, None]).square().sum()
        for number, name in enumerate(sorted(out.sequences)):  # by name, since their order is that of lookups
            held, first = out.sequences[name], columns + number * WIDTH
            of_keys = labels.repeat_interleave(held.offsets.diff(), output_size=len(held.values))[:, None]
            loss = loss + (held.values * self.scales[first : first + WIDTH] - of_keys).square().sum()
        return loss


def pooling_of(name: str) -> Any:
    return {"weighted": "sum", "sequence": "none"}.get(name.split(".")[0], name.split(".")[0])


@dataclass(frozen=True)
class Samples:
    """A batch of all ranks: features, lengths [S, B] of bags, keys and weights of each feature, and labels [B]."""

    names: tuple[str, ...]
    lengths: Tensor
    keys: list[Tensor]
    weights: list[Tensor]
    labels: Tensor

    def part(self, first: int, stop: int) -> tuple[Jagged, Tensor]:
        """Return the samples ``first <= b < stop``."""
        keys, weights = [], []
        for lengths, held, factors in zip(self.lengths, self.keys, self.weights, strict=True):
            ends = [0, *lengths.cumsum(0).tolist()]
            keys.append(held[ends[first] : ends[stop]])
            weights.append(factors[ends[first] : ends[stop]])
        lengths = self.lengths[:, first:stop].flatten()
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        jagged = Jagged(names=self.names, keys=torch.cat(keys), offsets=offsets, weights=torch.cat(weights))
        return jagged, self.labels[first:stop]


def samples(step: int, names: Sequence[str] = NAMES) -> Samples:
    """Return the batch of a step: skewed keys that repeat, empty bags, weights of the weighted features."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(names), BATCH), generator=generator)
    keys, weights = [], []
    for name, mine in zip(names, lengths, strict=True):
        count = int(mine.sum())
        share = torch.rand(count, generator=generator)
        keys.append((KEYS * share * share).long())
        factors = torch.rand(count, generator=generator) + 0.5
        weights.append(factors if name.startswith("weighted") else torch.ones(count))
    return Samples(tuple(names), lengths, keys, weights, (torch.rand(BATCH, generator=generator) < 0.4).float())


def cuts(step: int, size: int) -> list[int]:
    """Return where the batch is cut into the samples of the ranks: uneven ones, and now and then none for a rank."""
    if size == 1:
        return [0, BATCH]
    generator = torch.Generator().manual_seed(1000 + step)
    inner = torch.randint(0, BATCH + 1, (size - 1,), generator=generator).sort().values.tolist()
    if step % 5 == size % 5:
        inner[-1] = BATCH  # nothing is left for the last rank
    return [0, *inner, BATCH]


def train(
    ranks: Ranks,
    plan: ShardingPlan | None,
    optimizer: SparseOptimizerSpec,
    *,
    trains_layer: bool,
    steps: int,
    files: Path | None = None,
    names: Sequence[str] = NAMES,
    tiers: Tiers = HOST_TIERS,
    device: torch.device = CPU,
    around_step: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Model:
    """Train and return the model.

    Args:
        ranks: The ranks.
        plan: Placements of the tables; None for one process.
        optimizer: Rule of the tables.
        trains_layer: Whether the layer is trained.
        steps: Number of steps.
        files: Directory of the files of tiers; None for tables in memory alone.
        names: Tables and features.
        tiers: Budgets of the tiers, without their directory.
        device: Device of the model.
        around_step: Makes the context of a step, without the copy of its batch.
    """
    model = Model(trains_layer=trains_layer, files=files, names=names, tiers=tiers)
    if plan is not None:
        shard(model, plan, ranks)
    model.to(device)
    rows = RowOptimizer(model, optimizer)
    dense = torch.optim.SGD([model.scales], lr=0.05)
    for step in range(steps):
        ranks.step = step + 1
        at = cuts(step, ranks.size)
        jagged, labels = samples(step, names).part(at[ranks.rank], at[ranks.rank + 1])
        batch = Batch(dense=labels[:, None], label=labels[:, None], sparse=jagged).to(device)
        with around_step():
            loss = model(batch.sparse, batch.label[:, 0]) / BATCH
            dense.zero_grad()
            loss.backward()
            sum_gradients(ranks, [model.scales])
            rows.step()
            dense.step()
    return model


def rows_of(model: Model) -> dict[str, tuple[Tensor, Tensor]]:
    """Return keys and weights of each table of a model of one process, and the layer's."""
    assert isinstance(model.tables, EmbeddingCollection)
    found = {"layer": (torch.arange(len(model.names) * WIDTH), model.scales.detach().cpu().clone())}
    for name, table in model.tables.tables.items():
        keys = table.keys()
        found[name] = keys.cpu(), table.export(keys).weights.cpu()
    return found


def held_rows(model: Model, rank: int) -> dict[str, tuple[Tensor, slice, Tensor]]:
    """Return keys, columns and weights of the part of each table on a rank, and the layer's."""
    assert isinstance(model.tables, ShardedCollection)
    found = {"layer": (torch.arange(len(model.names) * WIDTH), slice(None), model.scales.detach().cpu().clone())}
    for table in model.tables.placed:
        name = table.spec.name
        part = model.tables.local.tables[name]
        if isinstance(table.spec, DynamicTableSpec):
            rows = keys = part.keys().cpu()
        else:
            rows, keys = table.keys_on(rank, 0, len(part))
        if table.by_column and rank not in table.ranks:
            rows = keys = keys[:0]
        found[name] = keys, table.columns(rank), part.export(rows).weights.cpu()
    return found


def expected_rows(
    steps: int, names: Sequence[str] = NAMES, optimizers: Collection[str] = tuple(OPTIMIZERS)
) -> dict[tuple[str, bool], dict[str, tuple[Tensor, Tensor]]]:
    """Train in one process on the CPU: optimizer and whether the layer is trained -> `rows_of`."""
    return {
        (rule, trains_layer): rows_of(
            train(Ranks(), None, OPTIMIZERS[rule], trains_layer=trains_layer, steps=steps, names=names)
        )
        for rule in optimizers
        for trains_layer in (False, True)
    }


def plan_of(case: Case, names: Sequence[str] = NAMES) -> ShardingPlan:
    """Return the plan of a run; the tables of "table-wise" are on several ranks."""
    entries = []
    for number, name in enumerate(names):
        placement = PLACEMENTS[case.placement]
        if isinstance(placement, TableWise):
            placement = TableWise(rank=number % case.size)
        if isinstance(placement, TableRowWise):
            placement = TableRowWise(node=number % max(1, case.size // 2))
        pooled_there = case.mode == "pooled there" and name.split(".")[0] in ("sum", "mean", "weighted")
        pooling: PooledOn = "rows" if pooled_there else "samples"
        entries.append(TablePlan(table=name, placement=placement, pooling=pooling))
    return ShardingPlan(
        world_size=case.size,
        tables=tuple(entries),
        ranks_per_node=min(case.size, 2),
        wire="bfloat16" if case.mode == "bf16 wire" else "float32",
        deterministic=case.mode == "deterministic",
    )


def rejection(case: Case) -> str:
    """Return why a cell does not exist; empty if it does."""
    if case.mode == "pooled there" and case.placement in ("data-parallel", "hybrid"):
        return "rejected: copies pool on the ranks of the samples"
    return ""


def run_case(
    ranks: Ranks, case: Case, expected: dict[tuple[str, bool], Any], steps: int, files: Path
) -> dict[str, float | str]:
    """Run a case; return the relative difference of each table's part on this rank and the layer's, or a rejection."""
    trains_layer = case.mode != "deterministic"  # sums of gradients of layers have another order
    try:
        rule = OPTIMIZERS[case.optimizer]
        model = train(ranks, plan_of(case), rule, trains_layer=trains_layer, steps=steps, files=files)
    except ConfigError as error:
        return dict.fromkeys((*NAMES, "layer"), f"rejected: {error}")
    return differences(ranks, model, expected[case.optimizer, trains_layer])


def differences(ranks: Ranks, model: Model, expected: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float | str]:
    """Return the relative difference of each table's part on this rank and the layer's from one process."""
    found: dict[str, float | str] = {}
    rows = held_rows(model, ranks.rank)
    for name, (keys, columns, weights) in rows.items():
        every, whole = expected[name]
        place = torch.searchsorted(every, keys)
        assert torch.equal(every[place], keys), f"{name}: other keys than one process has"
        difference = (weights - whole[place][..., columns]).abs().max().item() if keys.numel() else 0.0
        found[name] = difference / whole.abs().max().item()
    counts = torch.tensor([float(rows[name][0].numel()) for name in model.names])
    total = ranks.all_reduce_("count of rows", counts).tolist()
    for name, count in zip(model.names, total, strict=True):
        assert count >= expected[name][0].numel(), f"{name}: {count} rows, expected {expected[name][0].numel()}"
    return found


def run_cases(
    ranks: Ranks, todo: list[Case], expected: dict[tuple[str, bool], Any], steps: int, files: Path
) -> list[dict[str, float | str]]:
    """Run cases on as many of these ranks as each takes; the results of ranks that a case leaves out are empty."""
    groups = {size: ranks.subset(list(range(size))) for size in SIZES if size < ranks.size} | {ranks.size: ranks}
    results: list[dict[str, float | str]] = []
    for number, case in enumerate(todo):
        group = groups[case.size]
        results.append({} if group is None else run_case(group, case, expected, steps, files / str(number)))
    ranks.barrier("end")
    return results


def merged(parts: list[dict[str, float | str]]) -> dict[str, float | str]:
    """Return for each table the largest difference over the ranks, or the rejection."""
    found: dict[str, float | str] = {}
    for part in parts:
        for name, value in part.items():
            before = found.get(name, 0.0)
            found[name] = value if isinstance(value, str) or isinstance(before, str) else max(before, value)
    return found


PAGE = Path(__file__).parents[2] / "docs" / "equivalence.md"
_HEAD = f"""# Equivalence of ranks

Tables on 1, 2 and 4 ranks against one process, after {STEPS} steps with repeated keys, empty bags, uneven shares of the
batch and ranks without samples. A cell is the largest difference of a weight from one process, relative to the table's
largest weight; `=` says that all bits are equal, `rejected` that the combination raises an error
([placements](scale-out.md#placements)), `missing` that it was not run. A run also trains a layer whose gradients are
summed over the ranks, but in deterministic mode, whose rows need equal bits from the layers. In "pooled there" the
ranks of the rows pool the bags, but those of sequences. "clipped AdaGrad" has
`clip_norm={CLIP_NORM:g}`, which bounds some gradients.
`tiers` are static tables with two thirds of the rows in memory.

`python -m tests.dist.matrix` makes this page; the test suite runs a part of it, and `make test-all` everything.
"""
_COLUMNS = list(product(SIZES, OPTIMIZERS))


def page(found: dict[Case, dict[str, float | str]], before: str = "") -> str:
    """Return the page of results; parts of modes that were not run are those of the page before."""
    parts = [_HEAD]
    for mode in MODES:
        bound = TOLERANCES[mode]
        old = re.search(rf"^## {mode}:.*?(?=^## |\Z)", before, re.DOTALL | re.IGNORECASE | re.MULTILINE)
        if old is not None and not any(case.mode == mode for case in found):
            parts.append(old[0].rstrip("\n") + "\n")
            continue
        parts.append(f"## {mode[0].upper()}{mode[1:]}: {f'at most {bound:g}' if bound else 'equal bits'}\n")
        parts.append(f"| placement | pooling | table | {' | '.join(f'{o}, {r}' for r, o in _COLUMNS)} |")
        parts.append(f"|{'---|' * (3 + len(_COLUMNS))}")
        for placement, pooling, kind in product(PLACEMENTS, POOLINGS, KINDS):
            cells = [
                _cell(found.get(Case(size=size, placement=placement, optimizer=rule, mode=mode)), f"{pooling}.{kind}")
                for size, rule in _COLUMNS
            ]
            parts.append(f"| {placement} | {pooling} | {kind} | {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)


def _cell(result: dict[str, float | str] | None, name: str) -> str:
    if result is None:
        return "missing"
    value = result[name]
    return "rejected" if isinstance(value, str) else f"{value:.0e}" if value else "="


def run(todo: list[Case], steps: int = STEPS) -> dict[Case, dict[str, float | str]]:
    """Run cases on as many processes as the largest takes."""
    with TemporaryDirectory() as files:
        size = max(case.size for case in todo)
        results = run_ranks(size, run_cases, todo, expected_rows(steps), steps, Path(files))
    failed = [result for result in results if isinstance(result, Raised | str)]
    assert not failed, failed
    return {case: merged([result[number] for result in results]) for number, case in enumerate(todo)}


def main(modes: Sequence[str]) -> None:
    """Run the parts of the modes and write the page."""
    everything: dict[Case, dict[str, float | str]] = {}
    for mode, size in product(modes, SIZES):
        everything |= run([case for case in cases() if (case.mode, case.size) == (mode, size)])
    PAGE.write_text(page(everything, PAGE.read_text()))
    worst = {
        mode: max(
            (v for c, r in everything.items() if c.mode == mode for v in r.values() if isinstance(v, float)),
            default=0.0,
        )
        for mode in modes
    }
    print(len(everything), "runs,", len(everything) * len(NAMES), "cells; largest differences:", worst)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("modes", nargs="*", metavar="MODE", help=f"of {', '.join(MODES)}; all unless given")
    parser.add_argument("--device", choices=("cpu", "cuda", "simulated"), help="compare tables on this device")
    parser.add_argument("--size", type=int, choices=SIZES, action="append", help="of a device; all unless given")
    parser.add_argument("--quick", action="store_true", help="some of the cells of a device")
    parser.add_argument("--json", action="store_true", help="print only the summary of a device")
    options = parser.parse_args()
    if unknown := set(options.modes) - set(MODES):
        parser.error(f"MODE: got {', '.join(sorted(unknown))}, expected some of {', '.join(MODES)}")
    if options.device is None:
        if options.size or options.quick or options.json:
            parser.error("--size, --quick and --json need --device")
        main(options.modes or MODES)
    else:
        from tests.dist import device_matrix  # which imports this module

        device_matrix.main(
            options.device,
            modes=options.modes or MODES,
            sizes=options.size or SIZES,
            is_quick=options.quick,
            is_json=options.json,
        )
