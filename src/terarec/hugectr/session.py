"""Models of training files (2.3 to 3.0): `Session`, for a script's own loop, and ``terarec-hugectr --train``."""

from __future__ import annotations

from terarec.hugectr.model import Model
from terarec.hugectr.objects import SolverConfig
from terarec.hugectr.readers import DataReader
from terarec.hugectr.schema.table import bind_arguments
from terarec.hugectr.training_cache import TrainingCache
from terarec.hugectr.training_json import SolverParser, Training, read_training


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
        """Set the rate of the next iterations."""
        self.model.set_learning_rate(lr)

    def train(self) -> bool:
        """Train one iteration; return False at the end of the data, which only ``repeat_dataset=False`` has."""
        return self.model.train()

    def get_current_loss(self) -> float:
        """Return the loss of the last iteration's batch."""
        return self.model.get_current_loss()

    def eval(self) -> bool:
        """Take one batch into the metrics; False at the end of the data."""
        return self.model.eval()

    def get_eval_metrics(self) -> list[tuple[str, float]]:
        """Return the name and value of each metric over the evaluation batches since the last call."""
        return self.model.get_eval_metrics()

    def evaluation(
        self, export_predictions_out_file: str = "", export_labels_out_file: str = ""
    ) -> list[tuple[str, float]]:
        """Evaluate ``max_eval_batches`` batches, or as many as the data has, and return the metrics.

        Args:
            export_predictions_out_file: File to append predictions to; none if empty.
            export_labels_out_file: File to append labels to.
        """
        reader = self.model.get_data_reader_eval()
        if not reader.is_started():
            reader.set_source()
        for _ in range(self.model.solver.max_eval_batches):
            if not self.model.eval():
                reader.set_source()
                break
            if export_predictions_out_file:
                self.model.export_predictions(export_predictions_out_file, export_labels_out_file)
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
        """Return the number of the dense layers' weights."""
        return sum(weight.numel() for weight in self.model.module.parameters())

    def download_params_to_files(self, prefix: str, iter: int) -> None:  # noqa: A002 - HugeCTR's name
        """Write the weights and the optimizers' states, under the names of `Model.save_params_to_files`."""
        self.model.save_params_to_files(prefix, iter)


def compiled(solver: SolverConfig, training: Training, *, kind: type[Model] = Model) -> Model:
    """Return the compiled model of a training file, with the weights that `solver` says to start from.

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
    model = compiled(solver, read_training(path), kind=_Exporting if values["export_predictions_prefix"] else Model)
    if isinstance(model, _Exporting):
        model.predictions_prefix = values["export_predictions_prefix"]
    model.summary()
    model.fit(snapshot_prefix=values["snapshot_prefix"])


class _Exporting(Model):
    """A model that writes the predictions of its evaluations."""

    predictions_prefix = ""

    def eval(self, is_first_batch: bool = True, *, eval_batch: int = -1) -> bool:
        is_there = super().eval(is_first_batch, eval_batch=eval_batch)
        if is_there:
            prefix, number = self.predictions_prefix, self.last_iteration
            self.export_predictions(f"{prefix}_prediction_{number}", f"{prefix}_label_{number}")
        return is_there
