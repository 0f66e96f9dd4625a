"""Lookup and row update against `nn.EmbeddingBag` with a torch optimizer, and against the memory's limit.

The limit of a lookup is the time in which the probe of ``row_bandwidth.cpp`` gathers the same bytes of rows, that of an
update the time in which it reads and writes them; writing the lookup's result and reading the gradient are not granted,
so 100 % is not quite reachable. The torch modules share the arena's memory, huge pages included, which favours them.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from record import Row, append_rows, measure, measure_in_turns
from row_bandwidth import row_bandwidth
from torch import Tensor, nn

from terarec.kernels.rows import allocate_rows, initialise_rows
from terarec.ops import BagGradient, BagLayout, RowRule, bag_lookup, row_update_, state_shapes


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


class Setup:
    """The tables, keys and a gradient of a case, for terarec and for torch."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        names = tuple(f"t{index}" for index in range(case.tables))
        self.case = case
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
        self.keys = [_draw(case) for _ in range(case.tables)]
        self.all_keys = torch.cat(self.keys)
        self.bag_offsets = torch.arange(0, case.batch * case.hotness, case.hotness)
        self.offsets = torch.arange(0, self.all_keys.numel() + 1, case.hotness)
        self.grad = torch.randn(case.batch, case.tables * case.width)
        self.grads = [part.contiguous() for part in self.grad.split(case.width, dim=1)]
        views = self.weights.split(case.rows)
        self.bags = [
            nn.EmbeddingBag.from_pretrained(view, freeze=False, mode="sum", sparse=True, include_last_offset=False)
            for view in views
        ]
        self.optimizer = case.optimizer([bag.weight for bag in self.bags])

    def look_up(self) -> Tensor:
        """All lookups in one call."""
        return bag_lookup(self.weights, self.all_keys, self.offsets, self.layout)

    def update(self) -> None:
        """One row update with a fixed gradient."""
        gradient = BagGradient(self.all_keys, self.offsets, self.grad, self.layout)
        row_update_(self.weights, self.state, [gradient], self.case.rule, step=1)

    def step(self) -> None:
        """What a training step costs besides the model."""
        self.look_up()
        self.update()

    def torch_look_up(self) -> list[Tensor]:
        """A call of torch's module for each table."""
        return [bag(keys, self.bag_offsets) for bag, keys in zip(self.bags, self.keys, strict=True)]

    def torch_look_up_only(self) -> None:
        """The same as in evaluation."""
        with torch.no_grad():
            self.torch_look_up()

    def torch_step(self) -> None:
        """Lookup, sparse backward and optimizer of torch."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(self.torch_look_up(), self.grads)
        self.optimizer.step()

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows that a batch looks up, repeats included."""
        return self.all_keys.numel() * self.case.width * 4


def _draw(case: Case) -> Tensor:
    count = case.batch * case.hotness
    if not case.zipf:
        return torch.randint(case.rows, (count,))
    weights = torch.arange(1, case.rows + 1, dtype=torch.float64).pow(-case.zipf)
    return torch.multinomial(weights, count, replacement=True)


def run(case: Case, repeats: int) -> list[Row]:
    setup = Setup(case)
    forward = measure_in_turns({"ours": setup.look_up, "torch": setup.torch_look_up_only}, repeats)
    whole = measure_in_turns({"ours": setup.step, "torch": setup.torch_step}, repeats)
    update = measure(setup.update, repeats)
    limits: dict[str, float | None] = {"gather": None, "modify": None, "step": None}
    if case.is_bound_by_memory:
        probe = row_bandwidth()
        threads = torch.get_num_threads()
        kind = f"{case.width * 4}_bytes_{threads}_threads"
        gather, modify = (setup.row_bytes / probe[f"{access}_{kind}"] * 1e3 for access in ("gather", "modify"))
        limits = {"gather": gather, "modify": modify, "step": gather + modify}
    peer = "nn.EmbeddingBag(sparse=True) a table"
    optimizer = f"{peer} and torch.optim.{type(setup.optimizer).__name__}"
    return [
        Row(case=case.name, metric="lookup", value=forward["ours"].minimum * 1e3, unit="ms", peer=peer,
            peer_value=forward["torch"].minimum * 1e3, limit=limits["gather"]),
        Row(case=case.name, metric=f"{case.rule.kind} update", value=update.minimum * 1e3, unit="ms",
            limit=limits["modify"]),
        Row(case=case.name, metric=f"lookup, backward and {case.rule.kind} update", value=whole["ours"].minimum * 1e3,
            unit="ms", peer=optimizer, peer_value=whole["torch"].minimum * 1e3, limit=limits["step"]),
    ]  # fmt: skip


def run_single_sample(case: Case) -> list[Row]:
    """The cost of a call when there is next to nothing to look up."""
    setup = Setup(case)
    calls = 1000

    def ours() -> None:
        for _ in range(calls):
            setup.look_up()

    def theirs() -> None:
        for _ in range(calls):
            setup.torch_look_up_only()

    times = measure_in_turns({"ours": ours, "torch": theirs}, 5)
    return [
        Row(case=case.name, metric="lookup call", value=times["ours"].minimum * 1e6 / calls, unit="us",
            peer="nn.EmbeddingBag a table", peer_value=times["torch"].minimum * 1e6 / calls)
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of each of the 26 wide tables (512 bytes a row)")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    sgd = RowRule(kind="sgd", lr=0.01)
    adagrad = RowRule(kind="adagrad", lr=0.01, eps=1e-10)
    wide = Case(name=f"26 x {options.rows} x 128, 1 key, batch 16384, uniform", tables=26, rows=options.rows, width=128,
                hotness=1, batch=16384, zipf=0.0, rule=sgd, optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
                is_bound_by_memory=True)  # fmt: skip
    many = Case(name="100 x 8192 x 16, 10 keys, batch 8192, Zipf(1.05)", tables=100, rows=8192, width=16, hotness=10,
                batch=8192, zipf=1.05, rule=adagrad, optimizer=lambda p: torch.optim.Adagrad(p, lr=0.01),
                is_bound_by_memory=False)  # fmt: skip
    single = Case(name="26 x 1000 x 128, 1 key, batch 1", tables=26, rows=1000, width=128, hotness=1, batch=1, zipf=0.0,
                  rule=sgd, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), is_bound_by_memory=False)  # fmt: skip
    append_rows("embedding", run(wide, options.repeats))
    append_rows("embedding", run(many, max(3, options.repeats // 2)))
    append_rows("embedding", run_single_sample(single))


if __name__ == "__main__":
    main()
