"""What a call costs besides the work: one sample of 26 features, one key each, rows of 16 floats in the caches.

Peers are a `torch.nn.EmbeddingBag` for each feature, what a user would write, and one bag over all of them, the least
that torch can do. The limit of a training call is the same backward pass through a bare leaf, which is torch's own: a
row of its own says what the collection adds to it.
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
from terarec.spec import FeatureSpec, TableSpec

FEATURES, ROWS, WIDTH = 26, 100, 16
CALLS = 500  # in one timing


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
        self.bags = [nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True) for _ in names]
        self.merged = nn.EmbeddingBag(ROWS * FEATURES, WIDTH, mode="sum", sparse=True)
        self.keys = list(self.jagged.keys.split(1))
        self.start, self.starts = torch.zeros(1, dtype=torch.int64), torch.arange(FEATURES)

    def ours(self) -> Tensor:
        """All features in one call."""
        pooled: Tensor = self.collection(self.jagged).pooled
        return pooled

    def bag_by_bag(self) -> list[Tensor]:
        """A call for each feature."""
        return [bag(keys, self.start) for bag, keys in zip(self.bags, self.keys, strict=True)]

    def one_bag(self) -> Tensor:
        """One call over one table."""
        vectors: Tensor = self.merged(self.jagged.keys, self.starts)
        return vectors

    def ours_with_backward(self) -> None:
        """Lookup, and the gradient put aside."""
        self.ours().backward(self.grad)
        self.collection.take_gradients()

    def bags_with_backward(self) -> None:
        """Lookups, and sparse gradients."""
        torch.autograd.backward(self.bag_by_bag(), list(self.grad.split(WIDTH, dim=1)))
        for bag in self.bags:
            bag.weight.grad = None

    def leaf_with_backward(self) -> None:
        """A backward pass of one leaf and nothing else."""
        torch.empty(1, FEATURES * WIDTH).requires_grad_().backward(self.grad)


def microseconds(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median microseconds a call of each, timed in turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        timeit.timeit(function, number=CALLS)
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(timeit.timeit(function, number=CALLS) / CALLS * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def rows(repeats: int) -> list[Row]:
    sides = Sides()
    sides.collection.eval()
    with torch.inference_mode():
        looked_up = microseconds({"ours": sides.ours, "bags": sides.bag_by_bag, "one bag": sides.one_bag}, repeats)
    sides.collection.train()
    learnt = microseconds(
        {"ours": sides.ours_with_backward, "bags": sides.bags_with_backward, "leaf": sides.leaf_with_backward}, repeats
    )
    case = f"call of 1 sample, {FEATURES} features x {WIDTH}"
    in_bags, in_one = "torch nn.EmbeddingBag, one a feature", "torch nn.EmbeddingBag, one for all"
    return [
        _row(case, "lookup", looked_up["ours"], in_bags, looked_up["bags"]),
        _row(case, "lookup", looked_up["ours"], in_one, looked_up["one bag"]),
        _row(case, "lookup and backward", learnt["ours"], in_bags, learnt["bags"], limit=learnt["leaf"]),
        Row(case=case, metric="lookup and backward, beyond a leaf's", value=learnt["ours"] - learnt["leaf"], unit="us"),
    ]


def _row(case: str, metric: str, value: float, peer: str, peer_value: float, limit: float | None = None) -> Row:
    return Row(case=case, metric=metric, value=value, unit="us", peer=peer, peer_value=peer_value, limit=limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=21)
    append_rows("call_overhead", rows(parser.parse_args().repeats))


if __name__ == "__main__":
    main()
