# SPDX-License-Identifier: Apache-2.0
"""Training files of 2.3 to 3.0, `Session`, for a script's own loop over one, and ``terarec-hugectr --train``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from terarec.hugectr.enums import Check_t, DataReaderType_t, MetricsType
from terarec.hugectr.errors import WrongInputError, as_hugectr_errors
from terarec.hugectr.graph_json import Part, read_parts
from terarec.hugectr.json_files import KEY_TYPES, LOSS_SCALES, JsonObject, read_json, read_optimizer_with_schedule
from terarec.hugectr.model import Model
from terarec.hugectr.objects import DataReaderParams, OptimizerWithSchedule, SolverConfig
from terarec.hugectr.readers import DataReader
from terarec.hugectr.schedule import LearningRateScheduler
from terarec.hugectr.schema.table import bind_arguments
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
from terarec.hugectr.training_cache import TrainingCache
from terarec.io.opening import open_file
from terarec.models.artifact import tables
from terarec.spec.checks import REQUIRED, quoted


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
THRESHOLD = number()
"""``auc_threshold``, which HugeCTR's own tests read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingClauses:
    """The clauses of a training file besides its solver.

    Attributes:
        optimizer: With the learning rate and its schedule.
        reader: Location of the data.
        parts: The `Input`, the embeddings and the layers, in their order.
    """

    optimizer: OptimizerWithSchedule
    reader: DataReaderParams
    parts: tuple[Part, ...]


def read_training(path: str) -> TrainingClauses:
    """Return the clauses ``optimizer`` and ``layers`` of the file `path`.

    Raises:
        FileCannotOpenError: No such file.
        BrokenFileError: No JSON.
        WrongInputError: An unknown kind or key, or a value that is not accepted; the message has its path.
    """
    data = read_json(path)
    # The first layer is read twice, half by half: as an `Input` and as the location of the data.
    layers = data.children("layers")
    parts = read_parts(layers)
    return TrainingClauses(
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
    values = {key.parameter: data.take(key.name, key.kind, key.default) for key in KEYS}
    # A file may have one batch size for both.
    values["batchsize_eval"] = data.take("batchsize_eval", integer(1), values["batchsize"])
    # The clause names one of max_iter and num_epochs; which one it is decides whether the data repeats.
    values |= _read_length(data) | _read_precision(data)
    values["max_eval_batches"] = _read_eval_batches(data, values["batchsize_eval"])
    devices = data.take("gpu", GPU)
    values["vvgpu"] = devices if devices and isinstance(devices[0], list) else [devices]
    values["i64_input_key"] = data.take("input_key_type", KEY_TYPES, "I32") == "I64"
    of_run = {
        "metrics_spec": _read_metrics(data),
        "snapshot_prefix": values.pop("snapshot_prefix"),
        "export_predictions_prefix": values.pop("export_predictions_prefix"),
    }
    data.take("auc_threshold", THRESHOLD, 1.0)
    data.finish()
    return data.make(SolverConfig, values).with_values(**of_run)


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
    # A file may name neither, for one pass over the data.
    epochs = epochs if iterations or epochs else 1
    return {"max_iter": iterations, "num_epochs": epochs, "repeat_dataset": bool(iterations)}


def _read_precision(data: JsonObject) -> dict[str, Any]:
    scaler = data.take("mixed_precision", LOSS_SCALES, None)
    return {} if scaler is None else {"use_mixed_precision": True, "scaler": scaler}


def _read_eval_batches(data: JsonObject, batchsize: int) -> int:
    ways = {
        # The name of 2.3.
        "eval_batches": data.take("eval_batches", integer(1), None),
        "max_eval_batches": data.take("max_eval_batches", integer(1), None),
        "max_eval_samples": data.take("max_eval_samples", integer(1), None),
    }
    chosen = {key: value for key, value in ways.items() if value is not None}
    if len(chosen) != 1:
        raise WrongInputError(data.where, f"got {', '.join(chosen) or 'none'} of {', '.join(ways)}, expected one")
    (key, value), *_ = chosen.items()
    return math.ceil(value / batchsize) if key == "max_eval_samples" else int(value)


def _read_metrics(data: JsonObject) -> dict[MetricsType, float]:
    thresholds: dict[MetricsType, float] = {}
    for text in data.take("eval_metrics", METRICS, ["AUC"]):
        name, _, target = text.partition(":")
        try:
            thresholds[member_name(MetricsType).read(name)] = float(target or 1.0)
        except ValueError:
            known = ", ".join(MetricsType.__members__)
            raise WrongInputError(
                f"{data.where}.eval_metrics", f"got {quoted(text)}, expected one of {known}, or 'AUC:0.8' for a target"
            ) from None
    return thresholds


def _read_reader(data: JsonObject) -> DataReaderParams:
    # `read_input` has taken the other half of this clause, and looked for keys that neither half knows.
    checks = {"None": Check_t.Non, "Sum": Check_t.Sum}
    kind = data.take("format", member_name(DataReaderType_t), DataReaderType_t.Norm)
    # A Raw file does not hold how many samples it has.
    is_raw = kind in (DataReaderType_t.Raw, DataReaderType_t.RawAsync)
    counts = ("num_samples", "eval_num_samples")
    values: dict[str, Any] = {
        "data_reader_type": kind,
        "source": data.take("source", STRING),
        "eval_source": data.take("eval_source", STRING),
        "check_type": checks[data.take("check", one_of(*checks))],
        "cache_eval_data": data.take("cache_eval_data", integer(0), 0),
        "num_workers": data.take("num_workers", integer(1), 12),
        **{name: data.take(name, integer(1)) if is_raw else data.take(name, integer(0), 0) for name in counts},
        "float_label_dense": data.take("float_label_dense", BOOL, False),
        "slot_size_array": data.take("slot_size_array", list_of(integer(0)), []),
    }
    return data.make(DataReaderParams, values)


class Session:
    """A compiled model over the layers, the data and the optimizer of a training file.

    Attributes:
        model: The model behind it, with everything that newer releases offer.

    Args:
        solver_config: The object that `solver_parser_helper` made.
        config_file: Path of the training file; its clause ``solver`` is not read.
        use_model_oversubscriber: Whether to train pass by pass.
        temp_embedding_dir: Folder for the files of rows that train pass by pass; empty for that of `solver_config`.

    Raises:
        FileCannotOpenError: The file, or one of those to start from, does not exist.
        WrongInputError: A value that the schemas of the call or of the file do not accept.
    """

    @bind_arguments("Session")
    def __init__(
        self,
        solver_config: SolverConfig,
        config_file: str,
        use_model_oversubscriber: bool = False,
        temp_embedding_dir: str = "",
    ) -> None:
        values = solver_config.values()
        if use_model_oversubscriber or values.get("use_model_oversubscriber"):
            folder = temp_embedding_dir or values.get("temp_embedding_dir") or "./"
            solver_config = solver_config.with_values(use_model_oversubscriber=True, temp_embedding_dir=folder)
        self.model = compiled(solver_config, read_training(config_file))

    def start_data_reading(self) -> None:
        """Start both readers, with ``repeat_dataset=True``."""
        self.model.start_data_reading()

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next iterations."""
        self.model.set_learning_rate(lr)

    def train(self) -> bool:
        """Train one iteration; return False at the end of the data, which only ``repeat_dataset=False`` has."""
        return self.model.train()

    def get_current_loss(self) -> float:
        """Return the loss of the last iteration's batch."""
        return self.model.get_current_loss()

    def eval(self) -> bool:
        """Update the metrics with one batch; return False at the end of the data."""
        return self.model.eval()

    def get_eval_metrics(self) -> list[tuple[str, float]]:
        """Return the name and value of each metric over the evaluation batches since the last call."""
        return self.model.get_eval_metrics()

    def evaluation(
        self, export_predictions_out_file: str = "", export_labels_out_file: str = ""
    ) -> list[tuple[str, float]]:
        """Evaluate ``max_eval_batches`` batches, or as many as the data has, and return the metrics.

        With ``repeat_dataset=False`` each evaluation starts at the beginning of the data, as in `Model.fit`.

        Args:
            export_predictions_out_file: File for predictions, which replace what it holds; none if empty.
            export_labels_out_file: File for labels; as above.

        Raises:
            WrongInputError: One file without the other.
        """
        paths = (export_predictions_out_file, export_labels_out_file)
        if any(paths) != all(paths):
            raise WrongInputError("evaluation", f"got the files {paths[0]!r} and {paths[1]!r}, expected both or none")
        reader = self.model.get_data_reader_eval()
        if not (self.model.solver.repeat_dataset and reader.is_started()):
            reader.set_source()
        for path in filter(None, paths):
            with as_hugectr_errors("evaluation"), open_file(path, "ab") as file:
                file.truncate(0)  # batches are appended
        for _ in range(self.model.solver.max_eval_batches):
            if not self.model.eval():
                break
            if all(paths):
                self.model.export_predictions(*paths)
        return self.model.get_eval_metrics()

    def check_overflow(self) -> None:
        """Do nothing: `train` raises `OutOfBoundError` when an embedding holds more keys than it has room for."""

    def copy_weights_for_evaluation(self) -> None:
        """Do nothing: training and evaluation share their weights."""

    def get_data_reader_train(self) -> DataReader:
        """Return the reader of training data."""
        return self.model.get_data_reader_train()

    def get_data_reader_eval(self) -> DataReader:
        """Return the reader of evaluation data."""
        return self.model.get_data_reader_eval()

    def get_model_oversubscriber(self) -> TrainingCache:
        """Return the training cache: ``update`` takes a keyset file or a list of them, ``store`` writes rows."""
        return self.model.get_model_oversubscriber()

    def init_params(self, model_file: str) -> None:
        """Load the dense weights in `model_file`."""
        self.model.load_dense_weights(model_file)

    def get_params_num(self) -> int:
        """Return the number of weights: of the dense layers, and of the rows that this process holds."""
        module = self.model.module
        rows = sum(len(table) * table.width for table in tables(module).values())
        return rows + sum(weight.numel() for weight in module.parameters())

    def download_params_to_files(self, prefix: str, iter: int) -> None:  # noqa: A002 - HugeCTR's name
        """Write the weights and the optimizers' states, under the names of `Model.save_params_to_files`."""
        self.model.save_params_to_files(prefix, iter)


def compiled(solver: SolverConfig, training: TrainingClauses, *, kind: type[Model] = Model) -> Model:
    """Return the compiled model of a training file, with the initial weights that `solver` names.

    Args:
        solver: The `solver_parser_helper` object, or the file's own clause.
        training: The rest of the file.
        kind: Class of the model.
    """
    model = kind(solver, training.reader, training.optimizer)
    for part in training.parts:
        model.add(part)
    model.compile()
    if solver.model_file:
        model.load_dense_weights(solver.model_file)
    if solver.dense_opt_states_file:
        model.load_dense_optimizer_states(solver.dense_opt_states_file)
    if solver.embedding_files and not solver.values().get("use_model_oversubscriber"):
        model.load_sparse_weights(solver.embedding_files)
    # After the rows: a file of states has no keys, and goes by their order.
    if solver.sparse_opt_states_file:
        model.load_sparse_optimizer_states(solver.sparse_opt_states_file)
    return model


def train(path: str) -> None:
    """Train the model of a training file, with its evaluations, messages, snapshots and AUC target.

    Raises:
        FileCannotOpenError: No such file.
        BrokenFileError: No JSON.
        WrongInputError: An unknown kind or key, or a value that is not accepted.
    """
    solver = SolverParser(path)
    values = solver.values()
    # A subclass, since `fit` evaluates by `eval`, batch by batch.
    model = compiled(solver, read_training(path), kind=_Exporting if values["export_predictions_prefix"] else Model)
    if isinstance(model, _Exporting):
        model.predictions_prefix = values["export_predictions_prefix"]
    model.summary()
    model.fit(snapshot_prefix=values["snapshot_prefix"])


class _Exporting(Model):
    """A model that writes the predictions of its evaluations."""

    predictions_prefix = ""

    @override
    def eval(self, is_first_batch: bool = True, *, eval_batch: int = -1) -> bool:
        is_there = super().eval(is_first_batch, eval_batch=eval_batch)
        if is_there:
            prefix, number = self.predictions_prefix, self.last_iteration
            self.export_predictions(f"{prefix}_prediction_{number}", f"{prefix}_label_{number}")
        return is_there
