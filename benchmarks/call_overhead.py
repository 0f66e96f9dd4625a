# SPDX-License-Identifier: Apache-2.0
"""Measure the overhead of a call: one sample of 26 features, one key each, rows of 16 floats in the caches.

The peers are one `torch.nn.EmbeddingBag` per feature, which is what a user would write, and a single bag over all
features, which is the least that torch can do. The limit of a training call is torch's own backward pass through a bare
leaf; a separate row has the time that the collection adds to it. The layers of a lookup call, from the module down to
the kernel's launcher, are timed in turns with it.
"""

import argparse
import statistics
import timeit
from collections.abc import Callable, Mapping

import torch
from record import Row, append_rows
from torch import Tensor, nn

from terarec.batch import one_hot
from terarec.embedding import EmbeddingCollection
from terarec.kernels.registry import Op, choose
from terarec.ops import BagLayout, bag_lookup
from terarec.optim import RowOptimizer
from terarec.spec import FeatureSpec, SGDSpec, TableSpec

FEATURES, ROWS, WIDTH = 26, 100, 16
CALLS = 200  # calls in one timing
IN_BAGS, IN_ONE = "torch nn.EmbeddingBag, one a feature", "torch nn.EmbeddingBag, one for all"


class Sides:
    """The same lookup by a collection, by a bag for each feature, and by one merged bag."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        names = [f"f{index}" for index in range(FEATURES)]
        self.jagged = one_hot(names, torch.randint(ROWS, (FEATURES, 1)))
        self.grad = torch.randn(1, FEATURES * WIDTH)
        self.collection = EmbeddingCollection(
            [TableSpec(name=name, rows=ROWS, width=WIDTH) for name in names],
            [FeatureSpec(name=name, table=name) for name in names],
        )
        self.optimizer = RowOptimizer(self.collection, SGDSpec(lr=0.01))
        self.bags = [nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True) for _ in names]
        self.merged = nn.EmbeddingBag(ROWS * FEATURES, WIDTH, mode="sum", sparse=True)
        self.keys = list(self.jagged.keys.split(1))
        self.start, self.starts = torch.zeros(1, dtype=torch.int64), torch.arange(FEATURES)

        self.bags_optimizer = torch.optim.SGD([bag.weight for bag in self.bags], lr=0.01)
        self.layout = BagLayout(
            table_names=tuple(names),
            table_base=tuple(range(0, ROWS * FEATURES, ROWS)),
            table_rows=(ROWS,) * FEATURES,
            feature_names=tuple(names),
            feature_table=tuple(range(FEATURES)),
            pooling=("sum",) * FEATURES,
            width=WIDTH,
        )
        self.kernel = choose(Op.BAG_LOOKUP, "cpu")

    def ours(self) -> Tensor:
        """Look up all features in one call."""
        pooled: Tensor = self.collection(self.jagged).pooled
        return pooled

    def op(self) -> Tensor:
        """Call the op that a lookup of the collection calls."""
        return bag_lookup(self.collection.arenas[0].weights, self.jagged.keys, self.jagged.offsets, self.layout)

    def launcher(self) -> Tensor:
        """Call the kernel that the op selects."""
        held = self.jagged
        pooled: Tensor = self.kernel(
            self.collection.arenas[0].weights, held.keys, held.offsets, self.layout.array, True
        )
        return pooled

    def bag_by_bag(self) -> list[Tensor]:
        """Look up by one call for each feature."""
        return [bag(keys, self.start) for bag, keys in zip(self.bags, self.keys, strict=True)]

    def one_bag(self) -> Tensor:
        """Look up in one table by one call."""
        vectors: Tensor = self.merged(self.jagged.keys, self.starts)
        return vectors

    def ours_with_backward(self) -> None:
        """Look up, and run the backward pass without an update."""
        self.ours().backward(self.grad)
        self.collection.take_gradients()

    def ours_with_step(self) -> None:
        """Look up, run the backward pass, and update the rows."""
        self.ours().backward(self.grad)
        self.optimizer.step()

    def bags_with_backward(self) -> None:
        """Look up, and run the backward pass to sparse gradients."""
        torch.autograd.backward(self.bag_by_bag(), list(self.grad.split(WIDTH, dim=1)))
        for bag in self.bags:
            bag.weight.grad = None

    def bags_with_step(self) -> None:
        """Look up, run the backward pass to sparse gradients, and update the rows."""
        torch.autograd.backward(self.bag_by_bag(), list(self.grad.split(WIDTH, dim=1)))
        self.bags_optimizer.step()
        self.bags_optimizer.zero_grad()

    def leaf_with_backward(self) -> None:
        """Run a backward pass of one leaf and nothing else."""
        torch.empty(1, FEATURES * WIDTH).requires_grad_().backward(self.grad)


def microseconds(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median microseconds of a call of each function, timed in turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        timeit.timeit(function, number=CALLS)
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(timeit.timeit(function, number=CALLS) / CALLS * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def lookups(sides: Sides, repeats: int) -> list[Row]:
    """Return the result rows of calls for inference."""
    sides.collection.eval()
    sides_in_turn = {"module": sides.ours, "op": sides.op, "launcher": sides.launcher}
    with torch.inference_mode():
        times = microseconds({**sides_in_turn, "bags": sides.bag_by_bag, "one bag": sides.one_bag}, repeats)
    return [
        _row("lookup", times["module"], IN_BAGS, times["bags"]),
        _row("lookup", times["module"], IN_ONE, times["one bag"]),
        _row("lookup, the op alone", times["op"]),
        _row("lookup, the kernel's launcher alone", times["launcher"]),
    ]


def training_calls(sides: Sides, repeats: int) -> list[Row]:
    """Return the result rows of calls through autograd."""
    sides.collection.train()
    functions: dict[str, Callable[[], object]] = {
        "forward": sides.ours,
        "ours": sides.ours_with_backward,
        "bags": sides.bags_with_backward,
        "leaf": sides.leaf_with_backward,
        "our step": sides.ours_with_step,
        "step of bags": sides.bags_with_step,
    }
    times = microseconds(functions, repeats)
    return [
        _row("lookup that trains, forward", times["forward"]),
        _row("lookup and backward", times["ours"], IN_BAGS, times["bags"], limit=times["leaf"]),
        _row("lookup and backward, beyond a leaf's", times["ours"] - times["leaf"]),
        _row("lookup, backward and SGD", times["our step"], IN_BAGS, times["step of bags"], limit=times["leaf"]),
    ]


def _row(metric: str, value: float, peer: str = "", peer_value: float | None = None, limit: float | None = None) -> Row:
    case = f"call of 1 sample, {FEATURES} features x {WIDTH}"
    return Row(case=case, metric=metric, value=value, unit="us", peer=peer, peer_value=peer_value, limit=limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=21)
    repeats, sides = parser.parse_args().repeats, Sides()
    append_rows("call_overhead", lookups(sides, repeats) + training_calls(sides, repeats))


if __name__ == "__main__":
    main()
