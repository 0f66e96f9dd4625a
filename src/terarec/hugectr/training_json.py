"""Training files of 2.3 to 3.0: clauses solver, optimizer and layers in one JSON file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from terarec.hugectr.enums import Check_t, DataReaderType_t, MetricsType
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.graph_json import Part, read_parts
from terarec.hugectr.json_files import JsonObject, read_json, read_optimizer_with_schedule
from terarec.hugectr.objects import DataReaderParams, OptimizerWithSchedule, SolverConfig
from terarec.hugectr.schedule import LearningRateScheduler
from terarec.hugectr.schema.table import REQUIRED
from terarec.hugectr.schema.types import (
    BOOL,
    STRING,
    Type,
    either,
    integer,
    list_of,
    member_name,
    number,
    one_of,
    scalar_or_list,
)
from terarec.spec.quoting import quoted


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the clause whose value is an unchanged parameter of `solver_parser_helper`, or of the run.

    Attributes:
        name: The key.
        parameter: Name of the parameter.
        kind: Type of the value.
        default: Value of a missing key.
    """

    name: str
    parameter: str
    kind: Type[Any]
    default: Any = REQUIRED


KEYS = (
    Key("batchsize", "batchsize", integer(1)),
    Key("display", "display", integer(1)),
    Key("snapshot", "snapshot", integer(1)),
    Key("eval_interval", "eval_interval", integer(0), 0),
    Key("snapshot_prefix", "snapshot_prefix", STRING),
    Key("dense_model_file", "model_file", STRING, ""),
    Key("dense_opt_states_file", "dense_opt_states_file", STRING, ""),
    Key("sparse_model_file", "embedding_files", scalar_or_list(STRING), []),
    Key("sparse_opt_states_file", "sparse_opt_states_file", scalar_or_list(STRING), []),
    Key("algorithm_search", "use_algorithm_search", BOOL, True),
    Key("cuda_graph", "use_cuda_graph", BOOL, True),
    Key("enable_tf32_compute", "enable_tf32_compute", BOOL, False),
    Key("export_predictions_prefix", "export_predictions_prefix", STRING, ""),
)
"""Keys that need no translation."""

LR_POLICY = one_of("fixed")
GPU = either(list_of(integer(0)), list_of(list_of(integer(0))))
METRICS = list_of(STRING)
KEY_TYPES = one_of("I32", "I64")
MIXED_PRECISION = one_of(128, 256, 512, 1024)
THRESHOLD = number()
"""``auc_threshold``, which HugeCTR's own tests read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The clauses of a training file besides its solver.

    Attributes:
        optimizer: With the learning rate and its schedule.
        reader: Location of the data.
        parts: The `Input`, the embeddings and the layers, in their order.
    """

    optimizer: OptimizerWithSchedule
    reader: DataReaderParams
    parts: tuple[Part, ...]


def read_training(path: str) -> Training:
    """Return the clauses ``optimizer`` and ``layers`` of the file `path`.

    Raises:
        FileCannotOpenError: No such file.
        BrokenFileError: No JSON.
        WrongInputError: An unknown kind or key, or a value that is not accepted; the message has its path.
    """
    data = read_json(path)
    layers = data.children("layers")
    parts = read_parts(layers)
    return Training(
        optimizer=read_optimizer_with_schedule(data.child("optimizer")), reader=_read_reader(layers[0]), parts=parts
    )


def SolverParser(file: str) -> SolverConfig:  # noqa: N802 - HugeCTR's name
    """Return the clause ``solver`` of the training file `file`.

    Raises:
        FileCannotOpenError: No such file.
        BrokenFileError: No JSON.
        WrongInputError: An unknown key, or a value that is not accepted; the message has its path.
    """
    data = read_json(file).child("solver")
    data.take("lr_policy", LR_POLICY)
    given = {key.parameter: data.take(key.name, key.kind, key.default) for key in KEYS}
    given["batchsize_eval"] = data.take("batchsize_eval", integer(1), given["batchsize"])
    given |= _read_length(data) | _read_precision(data)
    given["max_eval_batches"] = _read_eval_batches(data, given["batchsize_eval"])
    devices = data.take("gpu", GPU)
    given["vvgpu"] = devices if isinstance(devices[0], list) else [devices]
    given["i64_input_key"] = data.take("input_key_type", KEY_TYPES, "I32") == "I64"
    of_run = {
        "metrics_spec": _read_metrics(data),
        "snapshot_prefix": given.pop("snapshot_prefix"),
        "export_predictions_prefix": given.pop("export_predictions_prefix"),
    }
    data.take("auc_threshold", THRESHOLD, 1.0)
    data.finish()
    try:
        return SolverConfig(**given).with_values(**of_run)
    except WrongInputError as error:
        raise WrongInputError(data.where, error.where, error.problem) from None


def get_learning_rate_scheduler(configure_file: str) -> LearningRateScheduler:
    """Return the schedule in the clause ``optimizer`` of a training file.

    Raises:
        FileCannotOpenError: No such file.
        BrokenFileError: No JSON.
        WrongInputError: An unknown kind or key, or a value that is not accepted.
    """
    return LearningRateScheduler.of(read_optimizer_with_schedule(read_json(configure_file).child("optimizer")))


def _read_length(data: JsonObject) -> dict[str, Any]:
    iterations, epochs = data.take("max_iter", integer(1), 0), data.take("num_epochs", integer(1), 0)
    if iterations and epochs:
        raise WrongInputError(data.where, "got max_iter and num_epochs, expected one of them")
    epochs = epochs if iterations or epochs else 1
    return {"max_iter": iterations, "num_epochs": epochs, "repeat_dataset": bool(iterations)}


def _read_precision(data: JsonObject) -> dict[str, Any]:
    scaler = data.take("mixed_precision", MIXED_PRECISION, None)
    return {} if scaler is None else {"use_mixed_precision": True, "scaler": scaler}


def _read_eval_batches(data: JsonObject, batchsize: int) -> int:
    ways = {
        # The name of 2.3.
        "eval_batches": data.take("eval_batches", integer(1), None),
        "max_eval_batches": data.take("max_eval_batches", integer(1), None),
        "max_eval_samples": data.take("max_eval_samples", integer(1), None),
    }
    given = {key: value for key, value in ways.items() if value is not None}
    if len(given) != 1:
        raise WrongInputError(data.where, f"got {', '.join(given) or 'none'} of {', '.join(ways)}, expected one")
    (key, value), *_ = given.items()
    return math.ceil(value / batchsize) if key == "max_eval_samples" else int(value)


def _read_metrics(data: JsonObject) -> dict[MetricsType, float]:
    found: dict[MetricsType, float] = {}
    for text in data.take("eval_metrics", METRICS, ["AUC"]):
        name, _, target = text.partition(":")
        try:
            found[member_name(MetricsType).read(name)] = float(target or 1.0)
        except ValueError:
            known = ", ".join(MetricsType.__members__)
            raise WrongInputError(
                f"{data.where}.eval_metrics", f"got {quoted(text)}, expected one of {known}, or 'AUC:0.8' for a target"
            ) from None
    return found


def _read_reader(data: JsonObject) -> DataReaderParams:
    # `read_input` has taken the other half of this clause, and looked for keys that neither half knows.
    checks = {"None": Check_t.Non, "Sum": Check_t.Sum}
    given: dict[str, Any] = {
        "data_reader_type": data.take("format", member_name(DataReaderType_t), DataReaderType_t.Norm),
        "source": data.take("source", STRING),
        "eval_source": data.take("eval_source", STRING),
        "check_type": checks[data.take("check", one_of(*checks))],
        "cache_eval_data": data.take("cache_eval_data", integer(0), 0),
        "num_workers": data.take("num_workers", integer(1), 12),
        "num_samples": data.take("num_samples", integer(0), 0),
        "eval_num_samples": data.take("eval_num_samples", integer(0), 0),
        "float_label_dense": data.take("float_label_dense", BOOL, False),
        "slot_size_array": data.take("slot_size_array", list_of(integer(0)), []),
    }
    try:
        return DataReaderParams(**given)
    except WrongInputError as error:
        raise WrongInputError(data.where, error.where, error.problem) from None
