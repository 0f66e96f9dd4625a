# SPDX-License-Identifier: Apache-2.0
"""Print the TorchRec figures of hash_index.py as JSON; runs in the interpreter of `.venv-peers`.

`MCHManagedCollisionModule` keeps its keys sorted and sorts them again at each insertion. Its table has a fixed size,
here of 1.5 slots per key, so that nothing is evicted. It gets the keys in four calls at most, which favours it. (Its
multi-probe hash, `HashZchManagedCollisionModule`, inserts keys only on a GPU.)
"""

import json
import statistics
import sys
import time

import torch
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

BATCH = 26 * 16384
SEARCHED = 1 << 20
REPEATS = 5


def feature(keys: torch.Tensor) -> dict[str, JaggedTensor]:
    return {"key": JaggedTensor(values=keys, lengths=torch.ones(keys.numel(), dtype=torch.int64))}


def main(count: int) -> None:
    keys = torch.randint(0, 2**63 - 1, (count,), generator=torch.Generator().manual_seed(0))
    module = MCHManagedCollisionModule(
        zch_size=count + count // 2,
        device=torch.device("cpu"),
        eviction_policy=DistanceLFU_EvictionPolicy(),
        eviction_interval=1,
    )
    module.train()
    start = time.perf_counter()
    for batch in torch.split(keys, max(BATCH, -(-count // 4))):
        module.profile(feature(batch))
        module.evict()
    insert = count / (time.perf_counter() - start) / 1e6
    module.eval()
    searched = feature(keys[torch.randint(count, (SEARCHED,))])
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        module.remap(searched)
        seconds.append(time.perf_counter() - start)
    found = module.remap(searched)["key"].values()
    assert found.unique().numel() == searched["key"].values().unique().numel(), "not every key has a row of its own"
    print(json.dumps({"insert": insert, "find": SEARCHED / statistics.median(seconds) / 1e6}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
