# SPDX-License-Identifier: Apache-2.0
"""Compare lookups and row updates with `nn.EmbeddingBag` and a torch optimizer, and with the memory's limit.

The limit of a lookup is the time in which the probe of ``row_probe.cpp`` reads the same rows of the same arena in the
same order. The limit of an update is the time in which it reads and writes each of these rows once. The probe and the
kernel take turns. These limits leave out that a lookup also writes its result and an update also reads the gradient, so
neither can reach 100 %. Separate results rows ("its result granted", "reading its gradient granted") have the limit of
a probe that does this too: it copies the rows to a result, or reads all gradients in place. Both sides take turns if
both fit in memory; otherwise one runs after the other.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from record import Row, append_rows, measure_in_turns
from row_probe import COPY, MODIFY, READ, row_visitor
from torch import Tensor, nn

from terarec.kernels.rows import allocate_rows, initialise_rows
from terarec.ops import BagLayout, bag_lookup
from terarec.ops.row_update import BagGradient, RowRule, row_rule, row_update_, state_shapes


@dataclass(frozen=True, kw_only=True)
class Case:
    """Tables of one size, each looked up by one feature, summed."""

    name: str
    tables: int
    rows: int
    width: int
    hotness: int
    batch: int
    zipf: float  # exponent; 0 is uniform
    rule: RowRule
    optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer]
    is_bound_by_memory: bool


class Inputs:
    """The keys and a gradient of a case, for both sides."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.keys = [_draw(case) for _ in range(case.tables)]
        self.all_keys = torch.cat(self.keys)
        self.offsets = torch.arange(0, self.all_keys.numel() + 1, case.hotness)
        self.bag_offsets = self.offsets[: case.batch]
        self.grad = torch.randn(case.batch, case.tables * case.width)
        self.grads = [part.contiguous() for part in self.grad.split(case.width, dim=1)]

    def places(self, case: Case) -> Tensor:
        """Return the position of each key's gradient, in vectors: by sample, and by feature within a sample."""
        bags = torch.arange(case.tables * case.batch).view(case.batch, case.tables).T.flatten()
        return bags.repeat_interleave(case.hotness)


class Ours:
    """The case in terarec: one arena, one call."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        names = tuple(f"t{index}" for index in range(case.tables))
        self.rule = case.rule
        self.inputs = inputs
        self.layout = BagLayout(
            table_names=names,
            table_base=tuple(index * case.rows for index in range(case.tables)),
            table_rows=(case.rows,) * case.tables,
            feature_names=names,
            feature_table=tuple(range(case.tables)),
            pooling=("sum",) * case.tables,
            width=case.width,
        )
        arena = allocate_rows((case.tables * case.rows, case.width))
        initialise_rows(arena, table="t", seed=0, initializer="uniform", scale=0.01)
        self.weights = torch.from_numpy(arena)
        shapes = state_shapes(case.rule.kind, *arena.shape)
        self.state = tuple(torch.from_numpy(allocate_rows(shape)) for _, shape in shapes)

    def look_up(self) -> Tensor:
        """Look up in one call."""
        return bag_lookup(self.weights, self.inputs.all_keys, self.inputs.offsets, self.layout)

    def update(self) -> None:
        """Update the rows once."""
        gradient = BagGradient(self.inputs.all_keys, self.inputs.offsets, self.inputs.grad, self.layout)
        row_update_(self.weights, self.state, [gradient], self.rule, step=1)

    def step(self) -> None:
        """Run the part of a training step that the tables take: lookup, backward and update."""
        self.look_up()
        self.update()


class Torch:
    """The case in PyTorch: a module for each table."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self.inputs = inputs
        self.bags = [
            nn.EmbeddingBag.from_pretrained(
                torch.empty(case.rows, case.width).fill_(0.01), freeze=False, mode="sum", sparse=True
            )
            for _ in range(case.tables)
        ]
        self.optimizer = case.optimizer([bag.weight for bag in self.bags])

    def bag_by_bag(self) -> list[Tensor]:
        """Look up by one call for each table."""
        return [bag(keys, self.inputs.bag_offsets) for bag, keys in zip(self.bags, self.inputs.keys, strict=True)]

    def look_up(self) -> None:
        """Look up as in evaluation."""
        with torch.no_grad():
            self.bag_by_bag()

    def step(self) -> None:
        """Lookup, sparse backward and optimizer."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(self.bag_by_bag(), self.inputs.grads)
        self.optimizer.step()


def _draw(case: Case) -> Tensor:
    count = case.batch * case.hotness
    if not case.zipf:
        return torch.randint(case.rows, (count,))
    weights = torch.arange(1, case.rows + 1, dtype=torch.float64).pow(-case.zipf)
    return torch.multinomial(weights, count, replacement=True)


def limits(case: Case, inputs: Inputs, ours: Ours) -> dict[str, dict[str, Callable[[], object]]]:
    """Return the probes that limit a lookup and an update; none if the tables fit in the caches."""
    if not case.is_bound_by_memory:
        return {"lookup": {}, "update": {}}
    rows = inputs.all_keys + (torch.arange(case.tables) * case.rows).repeat_interleave(case.batch * case.hotness)
    _, first = np.unique(rows.numpy(), return_index=True)
    distinct = rows[torch.from_numpy(np.sort(first))]
    dense = torch.from_numpy(allocate_rows((rows.numel(), case.width)))
    return {
        "lookup": {
            "read": row_visitor(READ, ours.weights, rows),
            "copy": row_visitor(COPY, ours.weights, rows, dense=dense),
        },
        "update": {
            "modify": row_visitor(MODIFY, ours.weights, distinct),
            "gradient": row_visitor(READ, inputs.grad.view(-1, case.width), inputs.places(case)),
        },
    }


def time_both(case: Case, inputs: Inputs, repeats: int) -> dict[str, float]:
    """Return the median milliseconds of each side's lookup and step, of our update alone, and of the probes."""
    table_bytes = case.tables * case.rows * case.width * 4
    fit_together = 2 * table_bytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // 2
    theirs = Torch(case, inputs)
    of_lookup, of_step = {"torch lookup": theirs.look_up}, {"torch step": theirs.step}
    times = {}
    if not fit_together:
        times = measure_in_turns(of_lookup, repeats) | measure_in_turns(of_step, repeats)
        of_lookup, of_step = {}, {}
        del theirs
    ours = Ours(case, inputs)
    visits = limits(case, inputs, ours)
    times |= measure_in_turns({"lookup": ours.look_up, **visits["lookup"], **of_lookup}, repeats)
    times |= measure_in_turns({"update": ours.update, **visits["update"]}, repeats)
    times |= measure_in_turns({"step": ours.step, **of_step}, repeats)
    return {name: timing.median * 1e3 for name, timing in times.items()}


def run(case: Case, repeats: int) -> list[Row]:
    """Return the rows of one case."""
    times = time_both(case, Inputs(case), repeats)
    peer = "nn.EmbeddingBag(sparse=True) a table"
    rule = case.rule.kind
    rows = [
        Row(case=case.name, metric="lookup", value=times["lookup"], unit="ms", peer=peer,
            peer_value=times["torch lookup"], limit=times.get("read")),
        Row(case=case.name, metric=f"{rule} update", value=times["update"], unit="ms", limit=times.get("modify")),
        Row(case=case.name, metric=f"lookup, backward and {rule} update", value=times["step"], unit="ms",
            peer=f"{peer} and torch.optim", peer_value=times["torch step"],
            limit=times["read"] + times["modify"] if case.is_bound_by_memory else None),
    ]  # fmt: skip
    if case.is_bound_by_memory:
        granted = {
            "lookup, its result granted": ("lookup", times["copy"]),
            f"{rule} update, reading its gradient granted": ("update", times["modify"] + times["gradient"]),
        }
        rows += [
            Row(case=case.name, metric=metric, value=times[ours], unit="ms", limit=limit)
            for metric, (ours, limit) in granted.items()
        ]
    return rows


def run_adam(case: Case, repeats: int) -> list[Row]:
    """Compare an update by Adam, which reads and writes two states besides the row, with one by the case's rule."""
    adam = replace(case, rule=row_rule("adam", lr=0.01, eps=1e-8, beta1=0.9, beta2=0.999))
    inputs = Inputs(case)
    updates = {side.rule.kind: Ours(side, inputs).update for side in (case, adam)}
    times = {name: timing.median * 1e3 for name, timing in measure_in_turns(updates, repeats).items()}
    peer = f"terarec's {case.rule.kind} update"
    return [Row(case=case.name, metric="adam update", value=times["adam"], unit="ms", peer=peer,
                peer_value=times[case.rule.kind])]  # fmt: skip


def run_single_sample(case: Case) -> list[Row]:
    """Return the time of a call with almost nothing to look up."""
    inputs = Inputs(case)
    ours, theirs = Ours(case, inputs), Torch(case, inputs)
    calls = 1000

    def repeated(function: Callable[[], object]) -> Callable[[], None]:
        def run_calls() -> None:
            for _ in range(calls):
                function()

        return run_calls

    times = measure_in_turns({"ours": repeated(ours.look_up), "torch": repeated(theirs.look_up)}, 5)
    microseconds = {name: timing.median * 1e6 / calls for name, timing in times.items()}
    return [
        Row(case=case.name, metric="lookup call", value=microseconds["ours"], unit="us",
            peer="nn.EmbeddingBag a table", peer_value=microseconds["torch"])
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="rows of each of the 26 wide tables (512 bytes a row)"
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[8192, 16384], help="of the wide tables")
    parser.add_argument("--only-wide", action="store_true", help="not the other cases")
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    sgd = row_rule("sgd", lr=0.01)
    adagrad = row_rule("adagrad", lr=0.01, eps=1e-10)
    wide = [
        Case(name=f"26 x {options.rows} x 128, 1 key, batch {batch}, {keys}", tables=26, rows=options.rows, width=128,
             hotness=1, batch=batch, zipf=exponent, rule=sgd, optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
             is_bound_by_memory=True)
        for keys, exponent in (("uniform", 0.0), ("Zipf(1.05)", 1.05))
        for batch in options.batch
    ]  # fmt: skip
    many = Case(name="100 x 8192 x 16, 10 keys, batch 8192, Zipf(1.05)", tables=100, rows=8192, width=16, hotness=10,
                batch=8192, zipf=1.05, rule=adagrad, optimizer=lambda p: torch.optim.Adagrad(p, lr=0.01),
                is_bound_by_memory=False)  # fmt: skip
    small = [replace(case, name=f"26 x 200000 x 128, 1 key, batch {case.batch}, {keys}", rows=200_000)
             for case, keys in ((wide[0], "uniform"), (wide[-1], "Zipf(1.05)"))]  # fmt: skip
    single = Case(name="26 x 1000 x 128, 1 key, batch 1", tables=26, rows=1000, width=128, hotness=1, batch=1, zipf=0.0,
                  rule=sgd, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), is_bound_by_memory=False)  # fmt: skip
    for case in wide:
        append_rows("embedding", run(case, options.repeats))
    if options.only_wide:
        return
    for case in small:
        append_rows("embedding", run_adam(case, options.repeats))
    append_rows("embedding", run(many, max(3, options.repeats // 2)))
    append_rows("embedding", run_single_sample(single))


if __name__ == "__main__":
    main()
