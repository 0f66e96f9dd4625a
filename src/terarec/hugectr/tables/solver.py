"""CreateSolver (3.1 to 25.03)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from terarec.hugectr.enums import AllReduceAlgo, DeviceLayout, LrPolicy_t, MetricsType
from terarec.hugectr.tables.callback import TrainingCallback
from terarec.hugectr.tables.data_source import DataSourceParams
from terarec.hugectr.tables.kinds import TEXT, TRUTH, instance, listed, mapped, member, number, one_of, optional, whole
from terarec.hugectr.tables.record import Record
from terarec.hugectr.tables.schedule import WARM_UP_AND_DECAY, decay_has_steps
from terarec.hugectr.tables.table import Parameter, Status, Table

_ORDER = "it changes in which order a GPU does its work, not what comes out"
_SPEED = "it only chooses how a GPU computes the same"
RELEASES = (
    "2.3", "3.0", "3.1", "3.2", "3.3", "3.4", "3.5", "3.6", "3.7", "3.8", "3.9", "4.0", "4.1", "4.2", "4.3",
    "23.02", "23.04", "23.05", "23.06", "23.08", "23.09", "23.12", "24.04", "24.06", "25.03",
)  # fmt: skip

ROWS = (
    Parameter(name="model_name", kind=TEXT, default="", since="3.2", meaning="name written into the graph JSON"),
    Parameter(name="seed", kind=whole(0), default=0, meaning="seed of weights, dropout and shuffling; 0: random"),
    Parameter(name="lr_policy", kind=member(LrPolicy_t), default=LrPolicy_t.fixed, meaning="how the rate moves"),
    Parameter(name="lr", kind=number(0.0), default=0.001, meaning="base learning rate"),
    *WARM_UP_AND_DECAY,
    Parameter(name="max_eval_batches", kind=whole(1), default=100, meaning="batches of an evaluation"),
    Parameter(name="batchsize_eval", kind=whole(1), default=2048, meaning="samples of an evaluation's batch"),
    Parameter(name="batchsize", kind=whole(1), default=2048, meaning="samples of a batch, over all devices"),
    Parameter(
        name="vvgpu",
        kind=listed(listed(whole(0))),
        default=[[0]],
        meaning="GPUs of every node; training runs on the first that is there, else on the CPU, with the same results",
    ),
    Parameter(
        name="repeat_dataset",
        kind=TRUTH,
        default=True,
        meaning="True: iterations without end, and each evaluation goes on where the last stopped in its data; False: "
        "epochs",
    ),
    Parameter(
        name="use_mixed_precision",
        kind=TRUTH,
        default=False,
        meaning="dense layers in 16 bits, weights in 32: on a GPU fp16 with a scaler and bf16 without, on a CPU bf16 "
        "if it has units for that",
    ),
    Parameter(
        name="enable_tf32_compute",
        kind=TRUTH,
        default=False,
        status=Status.IGNORED,
        why=_SPEED,
        meaning="TF32 products",
    ),
    Parameter(name="scaler", kind=number(0.0), default=1.0, meaning="static scale of the loss"),
    Parameter(
        name="metrics_spec",
        kind=mapped(member(MetricsType), number()),
        default={MetricsType.AUC: 1.0},
        meaning="metrics of an evaluation; AUC's number, once passed, ends the training",
    ),
    Parameter(name="i64_input_key", kind=TRUTH, default=False, meaning="keys of 64 bits in files, else 32"),
    Parameter(
        name="use_algorithm_search", kind=TRUTH, default=True, status=Status.IGNORED, why=_SPEED, meaning="GEMM search"
    ),
    Parameter(
        name="use_cuda_graph", kind=TRUTH, default=True, status=Status.IGNORED, why=_SPEED, meaning="CUDA graphs"
    ),
    Parameter(
        name="gen_loss_summary", kind=TRUTH, default=True, since="3.3", meaning="False: losses are told as 0, unchecked"
    ),
    *(
        Parameter(
            name=name, kind=TRUTH, default=False, since="4.0", status=Status.IGNORED, why=_ORDER, meaning="overlap"
        )
        for name in (
            "train_intra_iteration_overlap",
            "train_inter_iteration_overlap",
            "eval_intra_iteration_overlap",
            "eval_inter_iteration_overlap",
        )
    ),
    Parameter(
        name="device_layout",
        kind=member(DeviceLayout),
        default=DeviceLayout.LocalFirst,
        status=Status.IGNORED,
        why="results do not depend on where a device sits",
        meaning="order of the devices of several nodes",
    ),
    Parameter(
        name="use_embedding_collection",
        kind=TRUTH,
        default=False,
        since="3.7",
        meaning="the model holds an embedding collection",
    ),
    Parameter(
        name="all_reduce_algo",
        kind=member(AllReduceAlgo),
        default=AllReduceAlgo.NCCL,
        status=Status.IGNORED,
        why=_SPEED,
        meaning="how GPUs sum dense gradients",
    ),
    Parameter(
        name="grouped_all_reduce", kind=TRUTH, default=False, status=Status.IGNORED, why=_SPEED, meaning="one exchange"
    ),
    Parameter(
        name="num_iterations_statistics",
        kind=whole(0),
        default=20,
        status=Status.IGNORED,
        why="it only tunes the placement of a hybrid embedding's rows on GPUs",
        meaning="batches that a hybrid embedding counts",
    ),
    Parameter(
        name="perf_logging",
        kind=TRUTH,
        default=False,
        status=Status.IGNORED,
        why="it only adds lines for a benchmark's log",
        meaning="lines for MLPerf",
    ),
    Parameter(
        name="drop_incomplete_batch", kind=TRUTH, default=True, since="3.4", meaning="leave out the last short batch"
    ),
    Parameter(
        name="kafka_brockers",
        kind=TEXT,
        default="",
        since="3.9",
        status=Status.REFUSED,
        why="rows are not sent to Kafka; get_incremental_model hands them out",
        meaning="brokers for dump_incremental_model_2kafka",
    ),
    Parameter(
        name="training_callbacks",
        kind=listed(instance(TrainingCallback)),
        default=[],
        since="23.06",
        meaning="called at the start and the end of training and evaluations",
    ),
    *(
        Parameter(
            name=name,
            kind=TRUTH,
            default=False,
            since=since,
            until=until,
            status=Status.IGNORED,
            why=_ORDER,
            meaning="overlap on a GPU",
            is_positional=False,
        )
        for name, since, until in (
            ("use_holistic_cuda_graph", "3.1", "3.9"),
            ("use_overlapped_pipeline", "3.1", "3.9"),
            ("is_dlrm", "3.1", "3.9"),
            ("async_mlp_wgrad", "3.3", "4.3"),
            ("overlap_lr", "3.3", "3.9"),
            ("overlap_init_wgrad", "3.3", "3.9"),
            ("overlap_ar_a2a", "3.3", "3.9"),
            ("eval_overlap", "3.7", "3.9"),
        )
    ),
    Parameter(
        name="data_source_params",
        kind=optional(instance(DataSourceParams)),
        default=None,
        since="3.5",
        until="4.0",
        is_positional=False,
        meaning="file system of the model files",
    ),
    Parameter(
        name="compat_release",
        kind=one_of(*RELEASES),
        default=RELEASES[-1],
        is_positional=False,
        meaning="terarec's own: the release whose order of training, evaluation, snapshot and messages to follow",
    ),
)


def _one_precision(values: Mapping[str, Any]) -> str | None:
    if values["use_mixed_precision"] and values["enable_tf32_compute"]:
        return "got use_mixed_precision and enable_tf32_compute, expected one of them at most"
    return None


def _no_overlap_in_epochs(values: Mapping[str, Any]) -> str | None:
    overlaps = [row.name for row in ROWS if row.name.endswith("_iteration_overlap") and values.get(row.name)]
    if overlaps and not values["repeat_dataset"]:
        return f"got {overlaps[0]} with repeat_dataset=False, expected no overlap in epochs"
    return None


def batches_are_divisible(values: Mapping[str, Any]) -> str | None:
    """The rule that every device gets the same number of samples."""
    devices = sum(len(node) for node in values["vvgpu"])
    if not devices:
        return f"vvgpu: got {values['vvgpu']}, expected at least one device"
    for name in ("batchsize", "batchsize_eval"):
        if values[name] % devices:
            return f"{name}: got {values[name]}, expected a multiple of the {devices} devices of vvgpu"
    return None


RULES = (decay_has_steps, _one_precision, _no_overlap_in_epochs, batches_are_divisible)
CREATE_SOLVER = Table(name="CreateSolver", meaning="what a training run is", rows=ROWS, rules=RULES)


def _starts_with_a_seed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return bool(args) and isinstance(args[0], int)


# Releases 3.1 and 3.2 know no model_name: their first place is the seed's.
CREATE_SOLVER_3_1 = replace(
    CREATE_SOLVER, rows=ROWS[1:], fits=_starts_with_a_seed, derive=lambda values: {"model_name": ""}
)


class Solver(Record, forms=(CREATE_SOLVER, CREATE_SOLVER_3_1)):
    """What `CreateSolver` makes; every argument is an attribute."""
