# SPDX-License-Identifier: Apache-2.0
"""Compare exact retrieval metrics of all users over all items, with seen items masked, with torch and faiss.

Our side is `terarec.metrics.evaluate_retrieval`, which computes Recall, NDCG, HitRate and MRR. The peers compute only
Recall, which must be equal: a script that masks the whole matrix of scores and calls `torch.topk`; the same by blocks
with a full sort; and faiss' exact index (`IndexFlatIP`), searched for k items plus as many as the longest list of seen
items, which are then left out. Faiss runs in the interpreter of `.venv-peers`, if it is installed there
(``make peers``). The limit is the product of the vectors alone, in the same blocks as ours. Runs are in turns; the
figure is the median.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from record import Row, append_rows, measure_in_turns
from torch import Tensor

from terarec.metrics import evaluate_retrieval
from terarec.metrics.ranking import BLOCK_BYTES
from terarec.ragged import Ragged

SEEN, RELEVANT, WIDTH, LENGTH = 20, 5, 64, 10
PEERS = Path(__file__).resolve().parents[1] / ".venv-peers" / "bin" / "python"
Pairs = npt.NDArray[np.int64]


def pairs_of(num_users: int, num_items: int, mean: int, seed: int) -> Pairs:
    """Return distinct (user, item) pairs [N, 2] in rising order; popular items are in many of them."""
    rng = np.random.default_rng(seed)
    users = np.repeat(np.arange(num_users), rng.poisson(mean, num_users))
    items = (num_items * rng.random(len(users)) ** 3).astype(np.int64)
    return np.unique(np.stack([users, items], axis=1), axis=0)


def lists_of(pairs: Pairs, num_users: int) -> Ragged[np.ndarray, np.ndarray]:
    """Return the items of each user as lists."""
    offsets = np.concatenate([[0], np.bincount(pairs[:, 0], minlength=num_users).cumsum()])
    return Ragged(pairs[:, 1], offsets)


def recall_of(found: Tensor, relevant: Pairs, num_items: int) -> float:
    """Return the mean recall: the share of a user's relevant items that is in `found` [U, K]."""
    users = torch.from_numpy(relevant[:, 0])
    hits = (found[users] == torch.from_numpy(relevant[:, 1])[:, None]).any(dim=1).numpy()
    counts = np.bincount(relevant[:, 0], minlength=len(found))
    shares = np.bincount(relevant[:, 0], hits, len(found))[counts > 0] / counts[counts > 0]
    return float(shares.mean())


def by_topk(users: Tensor, items: Tensor, seen: Pairs) -> Tensor:
    """Mask the whole matrix of scores, and call `torch.topk`."""
    scores = users @ items.T
    scores[seen[:, 0], seen[:, 1]] = -torch.inf
    return scores.topk(LENGTH).indices


def by_sort(users: Tensor, items: Tensor, seen: Pairs, block: int = 1024) -> Tensor:
    """Mask and sort the scores of blocks of users."""
    found = []
    for start in range(0, len(users), block):
        scores = users[start : start + block] @ items.T
        of_block = seen[(seen[:, 0] >= start) & (seen[:, 0] < start + block)]
        scores[of_block[:, 0] - start, of_block[:, 1]] = -torch.inf
        found.append(scores.argsort(dim=1, descending=True)[:, :LENGTH])
    return torch.cat(found)


def faiss(users: Tensor, items: Tensor, seen: Pairs, repeats: int) -> tuple[float, Tensor] | None:
    """Return the median seconds and the items of faiss; None if it is not installed."""
    if not PEERS.exists():
        return None
    script = Path(__file__).with_name("retrieval_faiss.py")
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "in.npz", users=users.numpy(), items=items.numpy(), seen=seen)
        command = [str(PEERS), str(script), folder, str(LENGTH), str(repeats)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            print(f"faiss left out: {result.stderr.strip().splitlines()[-1]}", file=sys.stderr, flush=True)
            return None
        return json.loads(result.stdout), torch.from_numpy(np.load(Path(folder) / "out.npy"))


def products(users: Tensor, items: Tensor) -> Callable[[], None]:
    """Compute the products of all vectors, in the same blocks as ours."""
    block = BLOCK_BYTES // (4 * len(items))
    held = torch.empty(block, len(items))

    def run() -> None:
        for part in users.split(block):
            torch.mm(part, items.T, out=held[: len(part)])

    return run


def rows_of(num_users: int, num_items: int, repeats: int, *, with_sort: bool) -> list[Row]:
    """Return the figures for this many users and items."""
    torch.manual_seed(0)
    users, items = torch.randn(num_users, WIDTH), torch.randn(num_items, WIDTH)
    seen = pairs_of(num_users, num_items, SEEN, seed=1)
    relevant = pairs_of(num_users, num_items, RELEVANT, seed=2)
    seen_codes, relevant_codes = (pairs @ np.array([num_items, 1]) for pairs in (seen, relevant))
    relevant = relevant[~np.isin(relevant_codes, seen_codes)]
    seen_lists, relevant_lists = lists_of(seen, num_users), lists_of(relevant, num_users)
    recalls: dict[str, float] = {}

    def ours() -> None:
        found = evaluate_retrieval(users, items, relevant_lists, seen=seen_lists, k=[LENGTH])
        recalls["ours"] = found.values[f"recall@{LENGTH}"]

    def peer(name: str, function: Callable[[Tensor, Tensor, Pairs], Tensor]) -> Callable[[], None]:
        def run() -> None:
            recalls[name] = recall_of(function(users, items, seen), relevant, num_items)

        return run

    sides = {"ours": ours, "product": products(users, items), "torch.topk": peer("torch.topk", by_topk)}
    if with_sort:
        sides["torch.argsort"] = peer("torch.argsort", by_sort)
    seconds = {name: timing.median for name, timing in measure_in_turns(sides, repeats).items()}
    limit, own = seconds.pop("product"), seconds.pop("ours")
    from_faiss = faiss(users, items, seen, repeats)
    if from_faiss is not None:
        seconds["faiss IndexFlatIP"] = from_faiss[0]
        recalls["faiss IndexFlatIP"] = recall_of(from_faiss[1], relevant, num_items)
    spread = max(recalls.values()) - min(recalls.values())
    assert spread < 1e-3 * statistics.mean(recalls.values()), recalls
    case = f"retrieval, {num_users} users x {num_items} items, D={WIDTH}, {SEEN} seen, k={LENGTH}"
    return [
        Row(case=case, metric="evaluation", value=own, unit="s", peer=name, peer_value=value, limit=limit)
        for name, value in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=30_000)
    parser.add_argument("--items", type=int, default=40_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without-sort", action="store_true", help="without the full sort, which takes minutes")
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    chosen = parser.parse_args()
    rows = rows_of(chosen.users, chosen.items, chosen.repeats, with_sort=not chosen.without_sort)
    append_rows("retrieval", rows, dry=chosen.dry)


if __name__ == "__main__":
    main()
