# SPDX-License-Identifier: Apache-2.0
"""`Model.compile`: the graph of a network with its optimizers, trainer, readers and metrics, on a device or ranks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from terarec.data import RankShare
from terarec.dist import Ranks, ShardingPlan, shard
from terarec.embedding.tables import record_tables
from terarec.hugectr.enums import Tensor_t
from terarec.hugectr.errors import IllegalCallError, OutOfBoundError, WrongInputError, as_hugectr_errors
from terarec.hugectr.evaluation import SolverMetrics
from terarec.hugectr.network import Network, NetworkPlan, num_devices
from terarec.hugectr.objects import (
    DataReaderParams,
    EmbeddingTrainingCacheParams,
    ModelOversubscriberParams,
    OptParamsPy,
    Solver,
    SparseEmbedding,
)
from terarec.hugectr.optimizer import optimizer_rule
from terarec.hugectr.processes import ranks, ranks_on
from terarec.hugectr.readers import (
    DataReader,
    async_layout_of,
    check_sample_counts,
    drops_short_batches,
    record_layout,
    shuffle_seed,
    source_opener,
)
from terarec.hugectr.release import release_number
from terarec.hugectr.schedule import base_rate
from terarec.hugectr.sharding import placement, placement_of_rank, sharding_plan
from terarec.hugectr.training_cache import with_cache_tiers, with_folders_of_first
from terarec.kernels.environment import checks_overflow
from terarec.models import GraphModel
from terarec.models.artifact import tables
from terarec.nn.precision import CPU, mixed_precision
from terarec.spec import DenseOptimizerSpec, RecordLayout, TrainingSpec
from terarec.train import Callback, Optimizers, Trainer
from terarec.train.devices import keep_freed_memory

_STATISTICS = 20
"""Batches in which keys are counted for hybrid embeddings where a solver does not say how many."""


class CapacityCheck(Callback):
    """Check after each step that no embedding holds more keys than its workspace has room for.

    Args:
        model: The graph.
        capacities: Name of an embedding -> most keys.
    """

    def __init__(self, model: GraphModel, capacities: Mapping[str, int]) -> None:
        self._checks = [
            (name, list(tables(model.embeddings[name]).values()), most) for name, most in capacities.items()
        ]

    @override
    def on_step(self, trainer: Trainer) -> None:
        """Count the keys."""
        for name, num_keys, most in self._checks:
            count = sum(map(len, num_keys))
            # Each rank holds a part of the rows only.
            if trainer.ranks.size > 1:
                count = int(trainer.ranks.all_reduce_("keys of an embedding", torch.tensor([count])))
            if count > most:
                raise OutOfBoundError(
                    f"SparseEmbedding {name!r}",
                    f"holds {count:,} keys, expected at most {most:,}, for which its workspace or sizes give "
                    "room; give it more (HUGECTR_DISABLE_OVERFLOW_CHECK=1 turns this check off)",
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """The parts of a compiled model.

    Attributes:
        plan: Graph and update rules of the model.
        model: The graph, an ordinary module.
        trainer: Trains `model`.
        train_reader: Reader of training data.
        eval_reader: Reader of evaluation data.
        evaluation: Metrics since they were last read.
        capacity_check: Called after each iteration.
        dense: Rule of the layers.
        layout: Layout of a sample of the data.
        async_layout: Result of `async_layout_of` for the release.
        is_shuffled: Whether the training data is shuffled.
        messages: Messages about requested devices and placements that are not used.
        build_alone: Function that returns a new trainer of such a model in this process alone.
    """

    plan: NetworkPlan
    model: GraphModel
    trainer: Trainer
    train_reader: DataReader
    eval_reader: DataReader
    evaluation: SolverMetrics
    capacity_check: CapacityCheck
    dense: DenseOptimizerSpec
    layout: RecordLayout
    async_layout: tuple[bool, bool]
    is_shuffled: bool
    messages: Sequence[str]
    build_alone: Callable[[], Trainer]

    def tensor(self, name: str, kind: Tensor_t) -> NDArray[np.float32]:
        """Return a tensor of the last iteration; see `Model.check_out_tensor`."""
        if not isinstance(kind, Tensor_t):
            raise WrongInputError(
                "check_out_tensor: tensor_type",
                f"got {kind!r}, expected a member of Tensor_t",
                field="tensor_type",
                received=kind,
            )
        if name not in self.model.shapes:
            raise WrongInputError(
                "check_out_tensor: tensor_name",
                f"got {name!r}, expected one of {', '.join(self.model.shapes)}",
                field="tensor_name",
                received=name,
            )
        output = self.trainer.output if kind is Tensor_t.Train else self.evaluation.tensors
        if not output:
            raise IllegalCallError("check_out_tensor", f"there was no iteration of {kind.name} yet")
        assert isinstance(output, dict)  # of a graph
        tensor: Tensor = output[name].detach()
        if kind is Tensor_t.Train and self.trainer.ranks.size > 1:  # each has its share of the batch
            tensor = torch.cat(self.trainer.ranks.gather_rows(f"tensor {name!r}", tensor))
        array: NDArray[np.float32] = tensor.float().cpu().numpy()
        return array

    def freeze(self, *, dense: bool, embeddings: Iterable[str]) -> None:
        """Freeze the layers or not, and these embeddings alone."""
        for weight in self.model.layers.parameters():
            weight.requires_grad_(not dense)
            if dense:
                weight.grad = None  # optimizers skip parameters without a gradient
        if self.trainer.optimizers.rows is not None:
            # Not `terarec.optim.freeze`, which lets frozen dynamic tables insert no keys: HugeCTR's do.
            frozen = [table for name in embeddings for table in tables(self.model.embeddings[name])]
            self.trainer.optimizers.rows.frozen = frozen


def compile_network(
    network: Network,
    solver: Solver,
    reader: DataReaderParams,
    optimizer: OptParamsPy,
    loss_weights: Mapping[str, float],
    cache: EmbeddingTrainingCacheParams | ModelOversubscriberParams | None = None,
    *,
    cache_folder: str | None = None,
) -> Compiled:
    """Build everything that training needs.

    Args:
        network: The parts of the model.
        solver: The `CreateSolver` object.
        reader: Location and format of the data.
        optimizer: The optimizer of the layers.
        loss_weights: Label -> weight of its loss, for labels whose weight is not the `Input`'s.
        cache: The `CreateETC` or `CreateMOS` object, if any.
        cache_folder: Folder of the files of a `CreateMOS` object; None for those of its sparse models.

    Raises:
        IllegalCallError: There is no `Input`.
        WrongInputError: No loss, an unknown label, shapes or options that do not fit.
    """
    together = ranks()
    if together.size == 1:
        device, message = placement(solver.vvgpu)
    else:
        device, message = placement_of_rank(solver.vvgpu, together)
        together = ranks_on(device)
    messages: list[str] = []
    plan = in_memory = network.plan(loss_weights)
    if cache is not None:
        plan, messages = with_cache_tiers(
            plan,
            cache,
            network.of_type(SparseEmbedding),
            optimizer,
            num_devices=num_devices(solver),
            device=device,
            folder=cache_folder,
        )
        plan = with_folders_of_first(plan, together)
    data = _data(network, plan, solver, reader, together)
    dense = optimizer_rule(optimizer, base_rate(solver, optimizer))
    # With a training cache a workspace is for the rows of one pass.
    capacities = plan.capacities if cache is None and checks_overflow() else {}
    # A seed of 0 is drawn again by every process, so all take that of the first.
    first_seed = together.gather("seed of the model", solver.seed or secrets.randbits(62) + 1)[0]
    build = partial(_trainer, plan, solver, dense, device, first_seed)
    # The first of several processes has all rows for a moment, which a GPU may not have room for, and not
    # in the tiers of its own.
    build_alone = partial(_trainer, in_memory, solver, dense, CPU, first_seed)
    if together.size == 1:
        trainer = build()
    else:
        sharding, moved = _sharding(network, plan, solver, together.size, data.open_counted)
        messages += moved
        trainer = build(together, sharding)
    # `Trainer` takes any module; this one was built from a graph.
    model = trainer.model
    assert isinstance(model, GraphModel)
    return Compiled(
        plan=plan,
        model=model,
        trainer=trainer,
        train_reader=data.train,
        eval_reader=data.evaluation,
        evaluation=SolverMetrics(
            solver.metrics_spec, num_labels=sum(label.dim for label in plan.spec.labels), ranks=together
        ),
        capacity_check=CapacityCheck(model, capacities),
        dense=dense,
        layout=data.layout,
        async_layout=data.async_layout,
        is_shuffled=data.is_shuffled,
        messages=tuple(filter(None, [message, *messages])),
        build_alone=build_alone,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Data:
    """The readers of a model.

    Attributes:
        layout: Layout of a sample of the data.
        async_layout: Result of `async_layout_of` for the release.
        train: Reader of training data.
        evaluation: Reader of evaluation data.
        open_counted: Function that returns another reader of training data, of batches that no ranks share.
        is_shuffled: Whether the training data is shuffled.
    """

    layout: RecordLayout
    async_layout: tuple[bool, bool]
    train: DataReader
    evaluation: DataReader
    open_counted: Callable[[], DataReader]
    is_shuffled: bool


def _data(network: Network, plan: NetworkPlan, solver: Solver, reader: DataReaderParams, together: Ranks) -> _Data:
    """Return the readers, which open no file before `start_data_reading` or `set_source`."""
    check_sample_counts(reader)
    with as_hugectr_errors("compile"):
        layout = record_layout(solver, reader, network.inputs, adds_offsets=plan.adds_offsets)
    release = release_number(solver.compat_release)
    async_layout = async_layout_of(reader.async_param, release, is_one_hot=plan.is_one_hot)
    opener = partial(source_opener, reader, layout, async_layout=async_layout)
    # Spans, so that tensors of ranks one after the other are those of the batch (`Compiled.tensor`).
    share = RankShare(rank=together.rank, size=together.size, is_span=True) if together.size > 1 else None
    data_reader = partial(DataReader, repeat=solver.repeat_dataset, threads=reader.num_workers)
    # Drawn by every process where the solver has no seed, so all take that of the first.
    seed = together.gather("seed of the data", shuffle_seed(solver, reader))[0]
    drops, drops_in_evaluation = drops_short_batches(solver, reader)
    of_training = partial(
        data_reader,
        opener(num_samples=reader.num_samples),
        reader.source[0],
        batch_size=solver.batchsize,
        drop_last=drops,
    )
    with as_hugectr_errors("compile"):
        return _Data(
            layout=layout,
            async_layout=async_layout,
            train=of_training(shuffle_seed=seed, share=share),
            evaluation=data_reader(
                opener(num_samples=reader.eval_num_samples),
                reader.eval_source,
                batch_size=solver.batchsize_eval,
                drop_last=drops_in_evaluation,
                share=share,
            ),
            open_counted=of_training,
            is_shuffled=seed is not None,
        )


def _sharding(
    network: Network, plan: NetworkPlan, solver: Solver, world_size: int, open_counted: Callable[[], DataReader]
) -> tuple[ShardingPlan, list[str]]:
    """Return the placement of the tables on ranks, and messages about it; see `sharding_plan`."""
    # A reader of its own: counting keys must not move the position of training.
    counted = open_counted()
    counted.set_source()
    count = solver.values().get("num_iterations_statistics", _STATISTICS)
    placements = sharding_plan(network, plan.spec, solver.vvgpu, world_size, islice(counted, count))
    counted.close()
    return placements


def _trainer(
    plan: NetworkPlan,
    solver: Solver,
    dense: DenseOptimizerSpec,
    device: torch.device,
    seed: int,
    together: Ranks | None = None,
    sharding: ShardingPlan | None = None,
) -> Trainer:
    """Build the model of `plan` with its optimizers and trainer, sharded over ranks if there are several."""
    keep_freed_memory()
    torch.manual_seed(seed)  # of dropout
    with as_hugectr_errors("compile"):
        if together is None or sharding is None:
            model = GraphModel(plan.spec, seed=seed).to(device)
        else:
            # Tables have one row here: `shard` allocates the part of this rank.
            with record_tables():
                model = GraphModel(plan.spec, seed=seed)
            shard(model, sharding, together).to(device)
        spec = TrainingSpec(
            batch_size=solver.batchsize,
            seed=seed,
            precision=mixed_precision(device, loss_scale=solver.scaler) if solver.use_mixed_precision else "fp32",
            loss_scale=float(solver.scaler),
        )
        optimizers = Optimizers.of(model, dense, plan.rules, seed=seed)
        return Trainer(model, spec, optimizers, check_loss=False, ranks=together)  # a display checks the loss
