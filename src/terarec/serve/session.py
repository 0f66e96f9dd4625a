"""A trained model and its workflow, from raw values to scores; no transport."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from terarec.batch import Batch, Jagged, to_device
from terarec.checkpoint import Checkpoint
from terarec.config import DATASET_DIRECTORY
from terarec.data import open_reader, read_spec
from terarec.embedding import LookupCollection
from terarec.etl.columns import ColumnType
from terarec.etl.workflow import EncodedRecords, RawValues, Workflow, workflow_of
from terarec.formats import Keys
from terarec.formats.delta import StateId
from terarec.models.artifact import ModelWithoutTables, check_columns, load_dense_state, load_model, load_without_tables
from terarec.models.contract import device_of, logits_of, score_names
from terarec.models.narrow import narrow
from terarec.nn.objectives import build_objective
from terarec.nn.precision import autocast
from terarec.ragged import Ragged, flat_values
from terarec.serve.executor_file import EXECUTORS_FILE, wants_programs
from terarec.serve.tables import ServedLookups, ServedRun, ServedTables, serve_tables
from terarec.spec import DatasetSpec, Numbers, RunSpec

if TYPE_CHECKING:
    from terarec.export.dense_part import DensePart
    from terarec.serve.executors import Programs

ColumnKind = Literal["number", "integer", "string"]
_KINDS: dict[str, ColumnKind] = {"number": "number", "integer": "integer", "text": "string", "hex32": "string"}


@dataclass(frozen=True, kw_only=True, slots=True)
class InputColumn:
    """A raw column of a record.

    Attributes:
        name: Name of the column.
        kind: Kind of its values.
        hotness: 1 for one value a record; more for the most values of a list; None for lists of any length.
    """

    name: str
    kind: ColumnKind
    hotness: int | None = 1


def input_columns(workflow: Workflow) -> tuple[InputColumn, ...]:
    """Return the raw columns of a record that `workflow` encodes."""
    return tuple(_input_column(workflow, name, found) for name, found in workflow.record_columns.items())


def _input_column(workflow: Workflow, name: str, found: ColumnType) -> InputColumn:
    source = workflow.spec.source.column(name)
    # A time becomes an integer inside the workflow, but a client sends it as it is written in the logs.
    is_written_time = source is not None and source.format is not None
    # A list of at most one value is a list all the same.
    hotness = (None if found.max_length is None else max(found.max_length, 2)) if found.is_list else 1
    return InputColumn(name=name, kind="string" if is_written_time else _KINDS[found.kind], hotness=hotness)


class InferenceSession:
    """Scores raw records with a trained model. Thread-safe; holds no optimizer and no optimizer state.

    Attributes:
        run: Description of the training run.
        step: Training steps of its weights.
        workflow: Encodes raw values as they were for training.
        inputs: The raw columns that a record has, all of which `predict` needs.
        labels: Names of the L labels.
        device: Device of the model.
        served: Tables in a parameter server; None for a session that holds them itself.
        state: Id of the checkpoint, for a session whose tables are in a parameter server.

    Example:
        >>> session = InferenceSession.open(Path("RUN"))
        >>> session.predict({"I1": [3, None], ..., "C26": ["a9d771cd", ""]})  # float32[2, 1]
    """

    def __init__(
        self,
        model: nn.Module,
        workflow: Workflow,
        run: RunSpec,
        dataset: DatasetSpec,
        *,
        step: int,
        dataset_dir: Path | None = None,
        served: ServedRun | None = None,
        state: StateId | None = None,
        numbers: Numbers | None = None,
    ) -> None:
        self._programs: Programs | None = None
        self._numbers = numbers or Numbers()
        self._dataset = dataset
        self._dataset_dir = dataset_dir
        self.served = served
        self.state = state
        self._model = self._narrowed(model).eval()
        self.device = device_of(model)
        self._objective = build_objective(run.objective)
        self.workflow = workflow
        self._batch = RecordBatches(workflow, dataset)
        self.run = run
        self.step = step
        self.inputs = input_columns(workflow)
        self.labels = tuple(column.name for column in dataset.labels)

    @property
    def score_names(self) -> tuple[str, ...]:
        """Names of the C scores: ``score`` for one, else ``score_<label>`` or ``score_<class>``."""
        return score_names(self.labels, self._objective.num_outputs(len(self.labels)))

    @classmethod
    def open(
        cls,
        run_dir: Path | str,
        checkpoint: int | str | None = None,
        *,
        device: torch.device | None = None,
        allow_import: Sequence[str] = (),
        tables: ServedTables | None = None,
        executor: str = "auto",
        numbers: Numbers | None = None,
    ) -> InferenceSession:
        """Load a checkpoint of a run, and its workflow.

        Args:
            run_dir: Directory of the run.
            checkpoint: "last", "best" or a step; None for the last one, or the best one of a run with patience.
            device: Device of the model; the CPU by default.
            allow_import: Packages whose functions the workflow, and whose code the model may name.
            tables: Location of the tables; None to load them into the memory of the device.
            executor: Executor of the dense part on a CPU: "auto" for the choice that the run stores for this machine,
                eager torch if nothing is; "measure" to choose the fastest, and keep the choice, unless one is kept; or
                "eager", "compile", "aotinductor", "onnxruntime" or "openvino".
            numbers: Numbers of rows and layers; None for those of the training.

        Raises:
            ConfigError: The workflow names a function that is not allowed, the run holds no such checkpoint, or an
                executor that is named cannot compute the model.
            DataNotFoundError: `run_dir` is not a run, or holds no complete checkpoint.
            FormatError: A file of it is damaged.
            MissingDependencyError: The library of an executor that is named is not installed.
            StorageError: Not enough memory for the tables.
        """
        run_dir = Path(run_dir)
        directory = run_dir / DATASET_DIRECTORY
        # The model before the workflow, so that a directory that is not a run is reported as such.
        held: ModelWithoutTables | None = None
        if tables is None:
            model, run, dataset, step = load_model(run_dir, checkpoint, device=device, allow_import=allow_import)
        else:
            held = load_without_tables(run_dir, checkpoint, device=device, allow_import=allow_import)
            model, run, dataset, step = held.model, held.spec, held.dataset, held.checkpoint.step
        workflow = workflow_of(directory, allow_import=allow_import)
        served = None if tables is None or held is None else serve_tables(held, tables, device_of(model))
        try:
            # Before the constructor narrows the layers: programs are made of the trained ones.
            programs = _open_programs(model, run, dataset, run_dir, executor, numbers)
            made = cls(
                model,
                workflow,
                run,
                dataset,
                step=step,
                dataset_dir=directory,
                served=served,
                state=None if held is None else held.checkpoint.state,
                numbers=numbers,
            )
        # Also on a signal, since the server's threads and files must be closed.
        except BaseException:
            if served is not None:
                served.close()
            raise
        made._programs = programs
        return made

    @property
    def executors(self) -> Mapping[int, str]:
        """Largest batch -> executor of its dense part; the last one runs larger batches, too.

        Empty where the model runs in eager torch alone.
        """
        programs = self._programs
        return {} if programs is None else programs.chosen

    def _narrowed(self, model: nn.Module) -> nn.Module:
        """Return a model with the numbers of this session; `_trained` is what takes other weights."""
        self._trained = model
        # `narrow` works in place, and layers of int8 take no new weights: updates need the trained ones.
        changes_later = self.served is not None and self._numbers.precision == "int8"
        return narrow(copy.deepcopy(model) if changes_later else model, self._numbers)

    def close(self) -> None:
        """Close the parameter server that this session started, if it did."""
        if self.served is not None:
            self.served.close()

    def move_on(self, checkpoint: Checkpoint, lookups: ServedLookups | None = None) -> None:
        """Score with the dense weights of another checkpoint from the next batch on.

        Args:
            checkpoint: A checkpoint of the same run.
            lookups: Rows of each table; None for those that the session has.

        Raises:
            ConfigError: The checkpoint is of another model.
            FormatError: A damaged file.
        """
        model = copy.deepcopy(self._trained)  # a batch that is being scored keeps the weights that it began with
        load_dense_state(model, checkpoint.dense())
        if lookups is not None:
            for module in model.modules():
                if isinstance(module, LookupCollection):
                    module.connect(*lookups)
        programs, self._programs = self._programs, None  # eager torch has the new weights at once
        narrowed = self._narrowed(model)
        # No lock: a batch uses one model or the other, and each is complete when it is assigned.
        self._model, self.step, self.state = narrowed, checkpoint.step, checkpoint.state
        if programs is not None:
            self._programs = programs.moved(_dense_part(model, self.run, self._dataset))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def predict(self, columns: Mapping[str, RawValues]) -> npt.NDArray[np.float32]:
        """Score B records.

        Args:
            columns: Each of `inputs` by name -> its B raw values, or lists of them where hotness is not 1, encoded here
                as they were for training; None, null or "" is missing.

        Returns:
            float32[B, C]: the scores of the run's objective, such as the probability of each label.

        Raises:
            ConfigError: A column that is missing, unknown or of another length than the first, or a value that
                the workflow cannot read, with its column and row.
        """
        return self.score(self.workflow.encode(columns))

    def score(self, records: EncodedRecords) -> npt.NDArray[np.float32]:
        """Score B records that `workflow` has encoded; as `predict`."""
        return self.score_batch(self._batch(records))

    def predict_split(
        self,
        data: str | Path,
        split: str,
        *,
        batch_size: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Iterator[npt.NDArray[np.float32]]:
        """Score a split of a data set, or of HugeCTR's files, and yield the scores float32[B, C] of each batch.

        Args:
            data: Directory of a prepared data set, directory with a ``records.json``, or such a file.
            split: Split of the data.
            batch_size: Samples B in a batch; None for that of the training.
            progress: Callback after every batch with the samples done.

        Raises:
            ConfigError: No such split, or other columns than those of the run.
            DataNotFoundError: No such data.
            FormatError: A damaged file.
        """
        training = self.run.training
        if self._dataset_dir is not None:
            check_columns(read_spec(data), Path(data), self._dataset, self._dataset_dir)
        reader = open_reader(data, split, batch_size=batch_size or training.batch_size, threads=training.reader_threads)
        return self._scored(reader, progress)

    def _scored(
        self, batches: Iterable[Batch], progress: Callable[[int], None] | None
    ) -> Iterator[npt.NDArray[np.float32]]:
        done = 0
        for batch in batches:
            yield self.score_batch(batch)
            done += batch.batch_size
            if progress is not None:
                progress(done)

    def score_batch(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Score a batch with the columns of the run; return float32[B, C]."""
        programs = self._programs
        if programs is not None:
            with torch.inference_mode():
                found = programs.scores(batch)
            if found is not None:
                # A program returns scores and not logits: the objective is part of what was exported.
                of_program: npt.NDArray[np.float32] = found.numpy()
                return of_program
        batch = to_device(batch, self.device)
        with torch.inference_mode(), autocast(self._numbers.products(self.run), self.device):
            output = self._model(batch)
        scores: npt.NDArray[np.float32] = self._objective.scores(logits_of(self._model, output)).cpu().numpy()
        return scores


def _open_programs(
    model: nn.Module,
    run: RunSpec,
    dataset: DatasetSpec,
    run_dir: Path,
    executor: str,
    numbers: Numbers | None,
) -> Programs | None:
    """Return the programs of the dense part of a session's model; None for eager torch."""
    given, file = numbers or Numbers(), run_dir / EXECUTORS_FILE
    is_fp32 = given.row_type == "fp32" and given.precision != "int8" and given.products(run) == "fp32"
    if not wants_programs(executor, file, device=device_of(model), is_fp32=is_fp32):
        return None
    from terarec.serve.executors import open_programs  # which loads torch's exporters

    return open_programs(lambda: _dense_part(model, run, dataset), file, executor)


def _dense_part(model: nn.Module, run: RunSpec, dataset: DatasetSpec) -> DensePart:
    from terarec.export.dense_part import DensePart

    return DensePart.of(model, dataset, build_objective(run.objective).scores)


class RecordBatches:
    """Makes batches of records that a workflow has encoded, as a model reads them.

    Args:
        workflow: The workflow.
        dataset: Columns that the model reads.
    """

    def __init__(self, workflow: Workflow, dataset: DatasetSpec) -> None:
        self._features = tuple(column.name for column in dataset.categorical)
        made = [column.name for column in workflow.dataset_spec().categorical]
        self._places = [made.index(name) for name in self._features]  # a workflow gives keys after ids
        self._num_labels = len(dataset.labels)
        self._constants = _Constants(torch.arange(1), torch.zeros(0, self._num_labels))

    def __call__(self, records: EncodedRecords) -> Batch:
        """Return a batch; its labels, which no model looks at, are zeros."""
        num_records = len(records.dense)
        columns = [records.keys[place] for place in self._places]
        constants = self._constants
        if len(constants.label) != num_records:
            offsets = torch.arange(len(columns) * num_records + 1)
            # Requests tend to be of one size, so the last one's are kept; threads may replace each other's.
            self._constants = constants = _Constants(offsets, torch.zeros(num_records, self._num_labels))
        # The usual case, of one key in every bag, for which offsets are the constants and lengths need no sum.
        if set(map(type, columns)) == {np.ndarray}:
            keys, offsets = torch.from_numpy(np.concatenate(columns)), constants.offsets
        else:
            keys, offsets = _of_lists(columns, num_records)
        sparse = Jagged(names=self._features, keys=keys, offsets=offsets)
        return Batch(dense=torch.from_numpy(records.dense), label=constants.label, sparse=sparse)


class _Constants(NamedTuple):
    """Tensors that batches of one size share.

    Attributes:
        offsets: int64[S * B + 1], where every bag has one key.
        label: float32[B, L], zeros.
    """

    offsets: Tensor
    label: Tensor


def _of_lists(columns: Sequence[Keys], num_records: int) -> tuple[Tensor, Tensor]:
    """Return the keys int64[N] and offsets int64[S * B + 1] of columns of which some hold lists."""
    keys, lengths = [np.zeros(0, dtype=np.int64)], [np.zeros(1, dtype=np.int64)]
    one_each = np.ones(num_records, dtype=np.int64)
    for column in columns:
        keys.append(flat_values(column))
        lengths.append(np.diff(column.offsets) if isinstance(column, Ragged) else one_each)
    return torch.from_numpy(np.concatenate(keys)), torch.from_numpy(np.concatenate(lengths).cumsum())
