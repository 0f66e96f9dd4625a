# SPDX-License-Identifier: Apache-2.0
"""Run one rank of the TorchRec side of scale_out.py on gloo, in the interpreter of `.venv-peers`.

The model is TorchRec's DLRM with the same layers, which are under DistributedDataParallel, and SGD for layers and
tables. Whole tables are placed on the ranks in turn: TorchRec has no row-wise placement on CPUs. The program answers
the commands of `scale_out.Side`.
"""

import os
import sys

import torch
from torch import distributed
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingType
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

FEATURES, ROWS, WIDTH, BATCH, NUM_DENSE, NUM_BATCHES = 26, 10_000_000 // 26, 64, 8192, 13, 4
BOTTOM, TOP = [512, 256, 64], [1024, 1024, 512, 256, 1]
NAMES = [f"f{number}" for number in range(FEATURES)]
CPU = torch.device("cpu")


def model(size: int) -> DistributedModelParallel:
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[name]) for name in NAMES
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
    dlrm = DLRM(bags, NUM_DENSE, BOTTOM, TOP, dense_device=CPU)
    sharders = [EmbeddingBagCollectionSharder()]
    whole = {name: ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value]) for name in NAMES}
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=size, compute_device="cpu"), constraints=whole)
    plan = planner.collective_plan(dlrm, sharders, distributed.group.WORLD)
    return DistributedModelParallel(dlrm, device=CPU, plan=plan, sharders=sharders)


def batches(rank: int, size: int) -> list[tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    found = []
    for _ in range(NUM_BATCHES):
        dense = torch.randn(BATCH, NUM_DENSE, generator=generator)[mine]
        label = torch.randint(0, 2, (BATCH, 1), generator=generator).float()[mine]
        keys = torch.randint(0, ROWS, (FEATURES * BATCH,), generator=generator).view(FEATURES, BATCH)[:, mine]
        lengths = torch.ones(keys.numel(), dtype=torch.int32)
        found.append((dense, KeyedJaggedTensor(keys=NAMES, values=keys.flatten(), lengths=lengths), label))
    return found


def main() -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group("gloo")
    sharded = model(size)
    dense = torch.optim.SGD([p for name, p in sharded.named_parameters() if "embedding_bags" not in name], lr=0.1)
    samples = batches(rank, size)
    number = 0
    for line in sys.stdin:
        if line.strip() == "step":
            floats, keys, label = samples[number % NUM_BATCHES]
            number += 1
            dense.zero_grad()
            logits = sharded(floats, keys)
            torch.nn.functional.binary_cross_entropy_with_logits(logits, label).backward()
            dense.step()
        print(0, flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
