# SPDX-License-Identifier: Apache-2.0
"""A trained model and its workflow, from raw values to scores; no transport."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from terarec.batch import Batch, to_device
from terarec.checkpoint import Checkpoint
from terarec.config import load_run
from terarec.config.files import DATASET_DIRECTORY, RUN_FILE
from terarec.data import open_reader, read_spec
from terarec.embedding.lookups import LookupCollection
from terarec.errors import ConfigError
from terarec.etl.columns import ColumnType
from terarec.etl.workflow import Workflow, workflow_of
from terarec.etl.workflow.raw_values import RawValues
from terarec.etl.workflow.serving import EncodedRecords
from terarec.formats.delta import StateId
from terarec.formats.frames import Frame
from terarec.models.artifact import LoadedModel, ModelWithoutTables, load_dense_state, load_model, load_without_tables
from terarec.models.contract import device_of, logits_of, score_names
from terarec.models.narrow import narrow
from terarec.models.trained_columns import check_columns
from terarec.nn.objectives import build_objective
from terarec.nn.precision import autocast
from terarec.serve.executor_file import EXECUTORS_FILE, wants_programs
from terarec.serve.lookup_times import time_lookups
from terarec.serve.record_inputs import RecordInputs
from terarec.serve.tables import ServedLookups, ServedRun, ServedTables, serve_tables
from terarec.serve.weights import CurrentWeights, SessionWeights
from terarec.spec import DatasetSpec, Numbers, RunSpec
from terarec.spec.run import calibrated_for

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


class Scored(NamedTuple):
    """The scores of B records, and the weights that they are of.

    Attributes:
        scores: float32[B, C], as `InferenceSession.predict` returns them.
        step: Training steps of all weights, layers and rows, that scored the records.
    """

    scores: npt.NDArray[np.float32]
    step: int


class PinnedWeights(NamedTuple):
    """One state of a session's weights.

    Attributes:
        workflow: Encodes raw values as they were for the training of these weights.
        step: Training steps of the weights.
        score: Returns the scores float32[B, C] of B records that `workflow` has encoded.
    """

    workflow: Workflow
    step: int
    score: Callable[[EncodedRecords], npt.NDArray[np.float32]]


def input_columns(workflow: Workflow) -> tuple[InputColumn, ...]:
    """Return the raw columns of a record that `workflow` encodes."""
    return tuple(_input_column(workflow, name, kind) for name, kind in workflow.record_columns.items())


def _input_column(workflow: Workflow, name: str, kind: ColumnType) -> InputColumn:
    source = workflow.record_sources.get(name)
    # A time becomes an integer inside the workflow, but a client sends it as it is written in the logs.
    is_written_time = source is not None and source.format is not None
    # A list of at most one value is a list all the same.
    hotness = (None if kind.max_length is None else max(kind.max_length, 2)) if kind.is_list else 1
    return InputColumn(name=name, kind="string" if is_written_time else _KINDS[kind.kind], hotness=hotness)


class InferenceSession:
    """Scores raw records with a trained model. Thread-safe; holds no optimizer and no optimizer state.

    Attributes:
        inputs: The raw columns that a record has, all of which `predict` needs.
        labels: Names of the L labels.
        device: Device of the model.
        served: Tables in a parameter server; None for a session that holds them itself.
        numbers: Numbers of rows and layers.

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
        allow_import: Sequence[str] = (),
    ) -> None:
        self.numbers = numbers or Numbers()
        self._dataset_dir = dataset_dir
        self._times_lookups = False
        self._programs: Programs | None = None  # the last ones, also after they were for former weights
        self.served = served
        inputs = RecordInputs(workflow, dataset, dataset_dir, allow_import)
        self._weights = CurrentWeights(self._of(model.eval(), inputs, run, step, state))
        self.device = device_of(model)
        self.inputs = input_columns(workflow)
        self.labels = tuple(column.name for column in dataset.labels)

    @property
    def step(self) -> int:
        """Training steps of the weights that the next batch is scored with; `scored` says those of an answer."""
        return self._weights.current.step

    @property
    def state(self) -> StateId | None:
        """Id of the checkpoint of these weights; None for a session that was not opened from one."""
        return self._weights.current.state

    @property
    def run(self) -> RunSpec:
        """Description of the training run; its calibration of the scores is one for these weights."""
        return self._weights.current.run

    @property
    def workflow(self) -> Workflow:
        """Encodes raw values as they were for the training of these weights."""
        return self._weights.current.inputs.workflow

    @property
    def loaded(self) -> LoadedModel:
        """The model and what describes it, with the weights of the next batch."""
        weights = self._weights.current
        assert weights.state is not None, "only a session of a checkpoint was loaded"
        return LoadedModel(weights.model, weights.run, weights.inputs.dataset, weights.state)

    @property
    def score_names(self) -> tuple[str, ...]:
        """Names of the C scores: ``score`` for one, else ``score_<label>`` or ``score_<class>``."""
        return score_names(self.labels, self._weights.current.objective.num_outputs(len(self.labels)))

    def __repr__(self) -> str:
        labels = ", ".join(self.labels)
        return f"InferenceSession({self.run.model.kind}, step {self.step}, {len(self.inputs)} inputs -> {labels})"

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
        dense: ModelWithoutTables | None = None
        if tables is None:
            model, run, dataset, state = load_model(run_dir, checkpoint, device=device, allow_import=allow_import)
        else:
            dense = load_without_tables(run_dir, checkpoint, device=device, allow_import=allow_import)
            model, run, dataset, state = dense.model, dense.spec, dense.dataset, dense.checkpoint.state
        workflow = workflow_of(directory, allow_import=allow_import)
        served = None if tables is None or dense is None else serve_tables(dense, tables, device_of(model))
        try:
            # Before the constructor narrows the layers: programs are made of the trained ones.
            programs = _open_programs(model, run, dataset, run_dir, executor, numbers)
            session = cls(
                model,
                workflow,
                run,
                dataset,
                step=state.step,
                dataset_dir=directory,
                served=served,
                state=state,
                numbers=numbers,
                allow_import=allow_import,
            )
        # Also on a signal, since the server's threads and files must be closed.
        except BaseException:
            if served is not None:
                served.discard()
            raise
        session._weights.current.programs = session._programs = programs
        return session

    @property
    def executors(self) -> Mapping[int, str]:
        """Largest batch -> executor of its dense part; the last one runs larger batches, too.

        Empty where the model runs in eager torch alone.
        """
        programs = self._weights.current.programs
        return {} if programs is None else programs.chosen

    def use_executor(self, run_dir: Path, executor: str) -> None:
        """Compute the dense part in an executor as if the session had been opened with it; see `open`.

        Raises:
            ConfigError: An executor that is named cannot compute the model.
            MissingDependencyError: The library of an executor that is named is not installed.
        """
        weights = self._weights.current
        dataset = weights.inputs.dataset
        programs = _open_programs(weights.trained, weights.run, dataset, run_dir, executor, self.numbers)
        weights.programs = self._programs = programs

    def build_programs(self, is_over: threading.Event) -> None:
        """Compute the dense part in the executors of the session again, where its weights have moved on since.

        Args:
            is_over: Whether nothing is built any more, also while this waits for others that build.

        Raises:
            ConfigError: An executor cannot compute the model, or has no room for its files; eager torch goes on.
            MissingDependencyError: The library of one is not installed any more.
        """
        weights = self._weights.current
        if self._programs is not None and weights.programs is None:
            from terarec.export.files import exporting  # which loads torch's exporters

            part = _dense_part(weights.trained, weights.run, weights.inputs.dataset)
            with exporting(is_over) as is_turn:
                if is_turn:
                    weights.programs = self._programs = self._programs.moved(part)

    def _of(
        self, trained: nn.Module, inputs: RecordInputs, run: RunSpec, step: int, state: StateId | None
    ) -> SessionWeights:
        """Return the weights of a model with the numbers of this session."""
        # `narrow` works in place, and layers of int8 take no new weights: updates need the trained ones.
        changes_later = self.served is not None and self.numbers.precision == "int8"
        model = narrow(copy.deepcopy(trained) if changes_later else trained, self.numbers).eval()
        if self._times_lookups:
            time_lookups(model)
            time_lookups(trained)
        return SessionWeights(model=model, trained=trained, inputs=inputs, run=run, step=step, state=state)

    def time_lookups(self) -> None:
        """Time the look-ups of rows in a batch from now on; see `terarec.serve.lookup_times.take_lookup_ns`."""
        self._times_lookups = True
        for model in {self._weights.current.model, self._weights.current.trained}:
            time_lookups(model)

    def close(self) -> None:
        """Close the parameter server that this session started, if it did."""
        if self.served is not None:
            self.served.close()

    def discard(self) -> None:
        """Close the session after an error, and remove the rows that it loaded into a parameter server of others."""
        if self.served is not None:
            self.served.discard()

    def move_on(self, checkpoint: Checkpoint, lookups: ServedLookups | None = None) -> None:
        """Score with the dense weights of another checkpoint from the next batch on.

        When this returns, no batch uses the former weights and lookups any more. Threads that score do not wait. Where
        the files of the run have further ids by then, records are encoded with them, and a calibration of the scores
        counts if it is for this checkpoint. The dense part is computed in eager torch until `build_programs` is called.
        After an error the session is as before.

        Args:
            checkpoint: A checkpoint of the same run, or of one that extends its chain, in the directory of its run.
            lookups: Rows of each table; None for those that the session has.

        Raises:
            ConfigError: The checkpoint is of another model, or the files of the run describe other columns.
            FormatError: A damaged file.
        """
        former = self._weights.current
        run_dir = checkpoint.path.parent.parent  # which is another one than where a copy of the run was opened
        inputs = self._newest(former.inputs, run_dir / DATASET_DIRECTORY)
        run = calibrated_for(former.run, checkpoint.step, load_run(run_dir / RUN_FILE))
        model = copy.deepcopy(former.trained)  # a batch that is being scored keeps the weights that it began with
        load_dense_state(model, checkpoint.dense(), may_grow=True)
        if lookups is not None:
            _connect(model, lookups)
        self._weights.replace(self._of(model, inputs, run, checkpoint.step, checkpoint.state))

    def _newest(self, former: RecordInputs, directory: Path) -> RecordInputs:
        inputs = former.newest(directory)
        if inputs is former:
            return inputs
        if input_columns(inputs.workflow) != self.inputs or inputs.dataset.column_names != former.dataset.column_names:
            raise ConfigError(directory, "describes other columns by now, expected those of the session")
        return inputs

    def connect(self, lookups: ServedLookups) -> None:
        """Look the same rows up in another place from now on; a batch that is being scored may use both places."""
        weights = self._weights.current
        for model in {weights.model, weights.trained}:
            _connect(model, lookups)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def predict(self, columns: Mapping[str, RawValues] | Frame) -> npt.NDArray[np.float32]:
        """Score B records.

        Args:
            columns: Each of `inputs` by name -> its B raw values, or lists of them where hotness is not 1, encoded here
                as they were for training; None, null or "" is missing. Or a table in memory with these columns: a
                DataFrame of pandas or Polars, or a table, record batch or reader of Arrow.

        Returns:
            float32[B, C]: the scores of the run's objective, such as the probability of each label.

        Raises:
            ConfigError: A column that is missing, unknown or of another length than the first, or a value that
                the workflow cannot read, with its column and row.
        """
        return self.scored(columns).scores

    def scored(self, columns: Mapping[str, RawValues] | Frame) -> Scored:
        """Score B records as `predict` does, and say which weights all of them were scored with."""
        return self.scored_records(lambda workflow: workflow.encode(columns))

    def scored_records(self, encode: Callable[[Workflow], EncodedRecords]) -> Scored:
        """Score the B records that `encode` makes with the workflow of the weights, as `scored` does."""
        # Both under one pin: the ids of a later day have no rows in these weights, and those of this day others later.
        with self._weights.pinned() as weights:
            return self._score(weights, weights.inputs.batches(encode(weights.inputs.workflow)))

    @contextmanager
    def pinned(self) -> Iterator[PinnedWeights]:
        """Score records with one state of the weights throughout the block; updates wait for its end.

        The calling thread must not move the session on.
        """
        with self._weights.pinned() as weights:
            yield PinnedWeights(
                workflow=weights.inputs.workflow,
                step=weights.step,
                score=lambda records: self._score(weights, weights.inputs.batches(records)).scores,
            )

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
            check_columns(read_spec(data), Path(data), self._weights.current.inputs.dataset, self._dataset_dir)
        reader = open_reader(data, split, batch_size=batch_size or training.batch_size, threads=training.reader_threads)
        return self._each(reader, progress)

    def _each(
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
        with self._weights.pinned() as weights:
            return self._score(weights, batch).scores

    def _score(self, weights: SessionWeights, batch: Batch) -> Scored:
        """Score a batch with weights that are pinned."""
        programs = weights.programs
        if programs is not None:
            with torch.inference_mode():
                outputs = programs.scores(batch)
            if outputs is not None:
                # A program returns scores and not logits: the objective is part of what was exported.
                return Scored(outputs.numpy(), weights.step)
        batch = to_device(batch, self.device)
        with torch.inference_mode(), autocast(self.numbers.products(weights.run), self.device):
            output = weights.model(batch)
        # On the host before the pin ends: a GPU may only then have read the rows.
        scores = weights.objective.scores(logits_of(weights.model, output)).cpu().numpy()
        return Scored(scores, weights.step)


def _connect(model: nn.Module, lookups: ServedLookups) -> None:
    for module in model.modules():
        if isinstance(module, LookupCollection):
            module.connect(*lookups)


def _open_programs(
    model: nn.Module,
    run: RunSpec,
    dataset: DatasetSpec,
    run_dir: Path,
    executor: str,
    numbers: Numbers | None,
) -> Programs | None:
    """Return the programs of the dense part of a session's model; None for eager torch."""
    options, file = numbers or Numbers(), run_dir / EXECUTORS_FILE
    is_fp32 = options.row_type == "fp32" and options.precision != "int8" and options.products(run) == "fp32"
    if not wants_programs(executor, file, device=device_of(model), is_fp32=is_fp32):
        return None
    from terarec.serve.executors import open_programs  # which loads torch's exporters

    return open_programs(lambda: _dense_part(model, run, dataset), file, executor)


def _dense_part(model: nn.Module, run: RunSpec, dataset: DatasetSpec) -> DensePart:
    from terarec.export.dense_part import DensePart

    return DensePart.of(model, dataset, build_objective(run.objective).scores)
