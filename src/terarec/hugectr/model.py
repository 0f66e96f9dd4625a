# SPDX-License-Identifier: Apache-2.0
"""`Model`, which scripts build, train, evaluate and save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from terarec.batch import to_device
from terarec.hugectr.compilation import Compiled, compile_network
from terarec.hugectr.data import file_url
from terarec.hugectr.enums import Tensor_t
from terarec.hugectr.errors import IllegalCallError, WrongInputError, as_hugectr_errors
from terarec.hugectr.fitting import Fit, Intervals
from terarec.hugectr.graph_json import Part, read_graph
from terarec.hugectr.json_files import read_json, write_json
from terarec.hugectr.log import Log, summary_lines
from terarec.hugectr.model_files import ModelFiles, describe_graph, in_one_process, source_of
from terarec.hugectr.network import Network
from terarec.hugectr.objects import (
    DataReaderParams,
    DataSourceParams,
    DenseLayer,
    EmbeddingTrainingCacheParams,
    GroupDenseLayer,
    Input,
    ModelOversubscriberParams,
    OptimizerWithSchedule,
    OptParamsPy,
    Solver,
    SolverConfig,
)
from terarec.hugectr.processes import ranks
from terarec.hugectr.readers import DataReader, params_of_input, sources_by_name, started
from terarec.hugectr.run import Training, run_parts, save_run
from terarec.hugectr.schedule import LearningRateScheduler
from terarec.hugectr.schema.table import bind_arguments
from terarec.hugectr.training_cache import (
    IncrementalModel,
    TrainingCache,
    UseOfRows,
    WholeRows,
    newest_form,
    oversubscriber_of,
)
from terarec.hugectr.update_messages import send_rows
from terarec.models import GraphModel
from terarec.spec import RecordsSpec


class Model:
    """A model, its data and its training.

    Calls other than `add`, `compile`, `summary` and those about JSON files need a compiled model and raise
    `IllegalCallError` before.

    Attributes:
        solver: The `CreateSolver` object.

    Args:
        solver: The `CreateSolver` object.
        reader_params: Location of the data. Release 3.0 has none: there the optimizer is the second argument.
        opt_params: The `CreateOptimizer` object.
        etc_params: The `CreateETC` or `CreateMOS` object, for training pass by pass.

    Raises:
        WrongInputError: Anything else, or passes of data that repeats (``repeat_dataset=True``).
    """

    @bind_arguments("Model")
    def __init__(
        self,
        solver: Solver,
        reader_params: DataReaderParams | OptParamsPy | None = None,
        opt_params: OptParamsPy | None = None,
        etc_params: EmbeddingTrainingCacheParams | ModelOversubscriberParams | None = None,
    ) -> None:
        self._reader_params = reader_params if isinstance(reader_params, DataReaderParams) else None
        optimizer = reader_params if isinstance(reader_params, OptParamsPy) else opt_params
        assert optimizer is not None  # as the schema says
        if etc_params is not None and solver.repeat_dataset:
            raise WrongInputError(
                "Model: etc_params", "got one with repeat_dataset=True, expected repeat_dataset=False"
            )
        self.solver = solver
        # 2.3 and 3.0 have no `CreateMOS`: there the solver requests passes.
        self._optimizer, self._etc_params = optimizer, newest_form(etc_params) or oversubscriber_of(solver)
        self._network = Network(solver, optimizer)
        self._log = Log(solver.compat_release)
        self._compiled_model: Compiled | None = None
        self._cache: TrainingCache | None = None
        # In release 3.0 and in training files the optimizer has the learning rate, elsewhere the solver.
        rates = optimizer if isinstance(optimizer, OptimizerWithSchedule) else solver
        self._scheduler = LearningRateScheduler.of(rates)
        self._fit: Fit | None = None
        self._is_dense_frozen = False
        self._frozen: set[str] = set()
        self._row_orders: dict[str, str] = {}

    @bind_arguments("Model.add")
    def add(self, input: Part | GroupDenseLayer) -> None:  # noqa: A002 - HugeCTR's name, one of seven
        """Add an `Input`, an embedding or a layer on top of the others.

        Raises:
            IllegalCallError: After `compile`, before the `Input`, or a second `Input`.
            WrongInputError: An unknown tensor, or one that exists already; an `Input`
                without the data where there is no `DataReaderParams`.
        """
        if self._compiled_model is not None:
            raise IllegalCallError("add", "the model is compiled, expected every add before compile")
        params = self._reader_params
        # In release 3.0 the `Input` says where the data is. Kept only once it is added: an error changes nothing.
        if isinstance(input, Input) and params is None:
            params = params_of_input(input)
        self._network.add(input)
        self._reader_params = params

    @property
    def reader_params(self) -> DataReaderParams:
        """The parameters of the data; in release 3.0 they are the `Input`'s.

        Raises:
            IllegalCallError: An `Input` was not added yet.
        """
        if self._reader_params is None:
            raise IllegalCallError("Model", "got no Input, expected one before everything else")
        return self._reader_params

    def compile(self, loss_names: Sequence[str] = (), loss_weights: Sequence[float] = ()) -> None:
        """Build the model, and its training cache where one was requested.

        Args:
            loss_names: Labels whose losses get weights.
            loss_weights: The weights.

        Raises:
            IllegalCallError: A second call, or no `Input`.
            WrongInputError: No loss, an unknown label, shapes or options that do not fit, or another number of cache
                folders than embeddings.
            FormatError: A cache folder that does not fit its embedding.
        """
        if self._compiled_model is not None:
            raise IllegalCallError("compile", "the model is compiled, expected one call")
        if len(loss_names) != len(loss_weights):
            raise WrongInputError("compile", f"got {len(loss_names)} loss_names and {len(loss_weights)} loss_weights")
        weights = dict(zip(loss_names, map(float, loss_weights), strict=True))
        has_folder = oversubscriber_of(self.solver) is not None
        folder = str(self.solver.values()["temp_embedding_dir"]) if has_folder else None
        self._compiled_model = compile_network(
            self._network,
            self.solver,
            self.reader_params,
            self._optimizer,
            weights,
            self._etc_params,
            cache_folder=folder,
        )
        for message in self._compiled_model.messages:
            self._log(message)
        if self._etc_params is not None:
            files = self._files("compile")
            # A function: `set_source` may replace the keysets until the passes begin.
            whole = WholeRows(change=self._change_rows, read=self._read_rows, ranks=self._compiled_model.trainer.ranks)
            self._cache = files.training_cache(self._etc_params, lambda: self.reader_params.keyset, whole)

    @property
    def module(self) -> GraphModel:
        """The model as an ordinary `torch.nn.Module`, to be trained in any loop; its weights are this model's."""
        return self._compiled("module").model

    def summary(self) -> None:
        """Print the inputs, and the layers with their shapes.

        Raises:
            IllegalCallError: Before an `Input` was added.
            WrongInputError: Shapes or options that do not fit.
        """
        plan = self._network.plan({}) if self._compiled_model is None else self._compiled_model.plan
        with as_hugectr_errors("summary"):
            lines = summary_lines(plan.spec, self._network.parts)
        for line in lines:
            self._log.bare(line)

    @bind_arguments("Model.fit")
    def fit(
        self,
        num_epochs: int = 0,
        max_iter: int = 2000,
        display: int = 200,
        eval_interval: int = 1000,
        snapshot: int = 10000,
        snapshot_prefix: str = "",
        data_source_params: DataSourceParams | None = None,
    ) -> None:
        """Train, evaluate and save.

        With ``repeat_dataset=True`` each evaluation continues where the last one stopped, so two evaluations see the
        same samples only if each reads all of them: ``max_eval_batches`` full batches of Norm and Parquet files, which
        are a stream; of Raw and RawAsync files the last batch is short. In epochs each starts at the beginning.

        Args:
            num_epochs: Times over the data, with ``repeat_dataset=False``.
            max_iter: Iterations, with ``repeat_dataset=True``.
            display: Iterations between messages.
            eval_interval: Iterations between evaluations.
            snapshot: Iterations between snapshots.
            snapshot_prefix: Prefix of the snapshots' names.
            data_source_params: File system of the snapshots and of later files of the model, in release 3.4.

        Raises:
            WrongInputError: A number of epochs or iterations that is not above 0, in the mode that needs it, anything
                but an integer, or an unknown name.
            LossCannotConvergeError: The loss is NaN.
        """
        compiled = self._compiled("fit")
        if data_source_params is not None:
            self.solver = self.solver.with_values(data_source_params=data_source_params)
        solver = self.solver
        # Up to release 3.0 the solver names the length and the intervals of the training.
        if isinstance(solver, SolverConfig) and solver.max_iter + solver.num_epochs:
            num_epochs, max_iter, display = solver.num_epochs, solver.max_iter, solver.display
            eval_interval, snapshot = solver.eval_interval, solver.snapshot
        every = Intervals(display=display, evaluation=eval_interval, snapshot=snapshot, snapshot_prefix=snapshot_prefix)
        self._fit = Fit(self, compiled, every, self._cache, num_epochs=num_epochs, max_iter=max_iter)
        self._fit.run()

    def train(self, is_first_batch: bool = True) -> bool:
        """Train one iteration; return False at the end of the data, which only ``repeat_dataset=False`` has.

        Raises:
            IllegalCallError: With a reader that was not started.
            OutOfBoundError: An embedding holds more keys than its workspace has room for, or a key outside its table.
            BrokenFileError: A file is damaged.
        """
        compiled = self._compiled("train")
        reader = started(compiled.train_reader, "train")
        batch = reader.next_batch()
        if batch is None:
            return False
        # The loss is a mean over the batch of all ranks, of which this one has read its share.
        totals = None if reader.share is None else [reader.batch_rows]
        with as_hugectr_errors("train"):
            compiled.trainer.train_step(to_device(batch, compiled.model.device), totals=totals)
        # A script's own loop has no callbacks, which `fit` runs.
        compiled.capacity_check.on_step(compiled.trainer)
        return True

    def eval(self, is_first_batch: bool = True, *, eval_batch: int = -1) -> bool:
        """Update the metrics with one batch; return False at the end of the data.

        Raises:
            IllegalCallError: With a reader that was not started.
            LossCannotConvergeError: Predictions are NaN.
        """
        compiled = self._compiled("eval")
        reader = started(compiled.eval_reader, "eval")
        batch = reader.next_batch()
        if batch is None:
            return False
        total = batch.batch_size if reader.share is None else reader.batch_rows
        with as_hugectr_errors("eval"):
            compiled.evaluation.score(compiled.model, batch, compiled.trainer.spec.precision, total=total)
        return True

    def get_current_loss(self) -> float:
        """Return the loss of the last iteration's batch."""
        loss = self._compiled("get_current_loss").trainer.last_loss
        return 0.0 if loss is None else float(loss)

    def get_eval_metrics(self) -> list[tuple[str, float]]:
        """Return the name and value of each metric over the evaluation batches since the last call."""
        return self._compiled("get_eval_metrics").evaluation.finish()

    @property
    def last_iteration(self) -> int:
        """Number of the last iteration of the last `fit`, from 0; -1 before the first."""
        return -1 if self._fit is None else self._fit.iterations.index

    def trainable_lines(self) -> list[str]:
        """Return the lines of `fit`'s log about frozen parts."""
        return [
            f"Dense network trainable: {not self._is_dense_frozen}",
            *(
                f"Sparse embedding {name} trainable: {name not in self._frozen}"
                for name in self._compiled("fit").model.embeddings
            ),
        ]

    def check_out_tensor(self, tensor_name: str, tensor_type: Tensor_t) -> NDArray[np.float32]:
        """Return a tensor of the last iteration of training or of evaluation, for the complete batch.

        In evaluation, the tensor that a loss reads holds the probabilities.

        Raises:
            WrongInputError: An unknown tensor.
            IllegalCallError: There was no such iteration yet.
        """
        return self._compiled("check_out_tensor").tensor(tensor_name, tensor_type)

    @as_hugectr_errors("export_predictions")
    def export_predictions(self, output_prediction_file_name: str, output_label_file_name: str) -> None:
        """Append predictions and labels of the last evaluation batch to two files, as numbers separated by spaces.

        Raises:
            IllegalCallError: Nothing was evaluated yet.
        """
        evaluation = self._compiled("export_predictions").evaluation
        evaluation.append_predictions(output_prediction_file_name, output_label_file_name)

    def start_data_reading(self) -> None:
        """Start both readers, before `train` is called by a script with ``repeat_dataset=True``.

        Raises:
            IllegalCallError: With ``repeat_dataset=False``, where `set_source` of a reader starts it.
        """
        compiled = self._compiled("start_data_reading")
        if not self.solver.repeat_dataset:
            raise IllegalCallError("start_data_reading", "got repeat_dataset=False, expected set_source of the readers")
        for reader in (compiled.train_reader, compiled.eval_reader):
            if not reader.is_started():
                reader.set_source()

    @overload
    def set_source(self, source: str | Sequence[str], eval_source: str) -> None: ...
    @overload
    def set_source(self, source: Sequence[str], keyset: Sequence[str], eval_source: str) -> None: ...
    def set_source(self, *args: object, **kwargs: object) -> None:
        """Set the data: ``(source, eval_source)``, or with a training cache ``(sources, keysets, eval_source)``.

        Raises:
            IllegalCallError: With ``repeat_dataset=True``.
            WrongInputError: Other arguments.
        """
        if self.solver.repeat_dataset:
            raise IllegalCallError("set_source", "got repeat_dataset=True, expected epochs (repeat_dataset=False)")
        values = sources_by_name(args, kwargs)
        self._reader_params = self.reader_params.with_values(**values)
        compiled = self._compiled("set_source")
        # Only the names: HugeCTR's loops open the data of the next epoch, or call `set_source` of a reader.
        compiled.train_reader.name, compiled.eval_reader.name = (
            self.reader_params.source[0],
            self.reader_params.eval_source,
        )

    def get_data_reader_train(self) -> DataReader:
        """Return the reader of training data."""
        return self._compiled("get_data_reader_train").train_reader

    def get_data_reader_eval(self) -> DataReader:
        """Return the reader of evaluation data."""
        return self._compiled("get_data_reader_eval").eval_reader

    def get_learning_rate_scheduler(self) -> LearningRateScheduler:
        """Return the schedule that `fit` follows."""
        return self._scheduler

    @bind_arguments("Model.set_learning_rate")
    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next iterations.

        Raises:
            WrongInputError: Anything but a finite number of at least 0.
        """
        self._compiled("set_learning_rate").trainer.optimizers.lr = lr

    @bind_arguments("LearningRateScheduler")
    def reset_learning_rate_scheduler(
        self,
        base_lr: float,
        warmup_steps: int = 1,
        decay_start: int = 0,
        decay_steps: int = 1,
        decay_power: float = 2.0,
        end_lr: float = 0.0,
    ) -> None:
        """Start another schedule at its first step; the arguments and errors are `LearningRateScheduler`'s."""
        self._scheduler = LearningRateScheduler(base_lr, warmup_steps, decay_start, decay_steps, decay_power, end_lr)

    def freeze_dense(self) -> None:
        """Freeze the weights and optimizer states of the dense layers."""
        self._is_dense_frozen = True
        self._freeze()

    def unfreeze_dense(self) -> None:
        """Unfreeze the dense layers."""
        self._is_dense_frozen = False
        self._freeze()

    def freeze_embedding(self, embedding_name: str | None = None) -> None:
        """Freeze the rows of one embedding, or of all.

        Raises:
            WrongInputError: No embedding of that name.
        """
        self._frozen |= set(self._embedding_names(embedding_name))
        self._freeze()

    def unfreeze_embedding(self, embedding_name: str | None = None) -> None:
        """Unfreeze the rows of one embedding, or of all.

        Raises:
            WrongInputError: No embedding of that name.
        """
        self._frozen -= set(self._embedding_names(embedding_name))
        self._freeze()

    @as_hugectr_errors("graph_to_json")
    def graph_to_json(self, graph_config_file: str) -> None:
        """Write the graph; a tensor that several layers read goes through a Slice with a copy for each, as in HugeCTR.

        Raises:
            IllegalCallError: Before an `Input` was added.
            WrongInputError: Shapes or options that do not fit.
        """
        plan = self._network.plan({}) if self._compiled_model is None else self._compiled_model.plan
        described = describe_graph(self._network, plan, self.solver, self._optimizer)
        # All ranks have the same graph, and one file system is enough for it.
        ranks().on_first("graph_to_json", lambda: write_json(self._url(graph_config_file), described))

    def construct_from_json(self, graph_config_file: str, include_dense_network: bool) -> None:
        """Add the parts of a graph's file, to be compiled afterwards.

        Args:
            graph_config_file: File in the format of `graph_to_json`.
            include_dense_network: False leaves the dense layers out, so that others are added.

        Raises:
            FileCannotOpenError: No such file.
            WrongInputError: As `add`, or a clause of the file with its path.
            IllegalCallError: Something was added already, or the model is compiled.
        """
        for part in read_graph(read_json(self._url(graph_config_file))).parts:
            if include_dense_network or not isinstance(part, DenseLayer):
                self.add(part)

    @as_hugectr_errors("save_params_to_files")
    @bind_arguments("Model.save_params_to_files")
    @in_one_process(changes=False)
    def save_params_to_files(
        self,
        prefix: str,
        iter: int = 0,  # noqa: A002 - HugeCTR's name
        data_source_params: DataSourceParams | None = None,
    ) -> None:
        """Write weights and optimizer states of the dense layers and of each `SparseEmbedding`.

        The files are ``<prefix>_dense_<iter>.model``, ``<prefix>_opt_dense_<iter>.model`` and, with the number n of
        each embedding, ``<prefix><n>_sparse_<iter>.model`` and ``<prefix><n>_opt_sparse_<iter>.model``. They appear
        together, when all are written. With a training cache the embeddings go to its folders, without optimizer
        states.

        Raises:
            WrongInputError: A folder in place of a file, or one that holds something of others; nothing is changed.
            StorageError: The disk is full; nothing is changed.
        """
        self._files("save_params_to_files", data_source_params).save(prefix, iter, self._cache)

    @as_hugectr_errors("load_dense_weights")
    @bind_arguments("Model.load_dense_weights")
    @in_one_process(changes=True)
    def load_dense_weights(self, dense_model_file: str, data_source_params: DataSourceParams | None = None) -> None:
        """Load the weights of the dense layers from a file.

        Raises:
            FileCannotOpenError: No such file.
            BrokenFileError: A file of another model; nothing is changed then.
        """
        self._files("load_dense_weights", data_source_params).load_dense(dense_model_file)

    @as_hugectr_errors("load_dense_optimizer_states")
    @bind_arguments("Model.load_dense_optimizer_states")
    @in_one_process(changes=True)
    def load_dense_optimizer_states(
        self, dense_opt_states_file: str, data_source_params: DataSourceParams | None = None
    ) -> None:
        """Load the states of the dense optimizer from a file.

        Raises:
            IllegalCallError: Of a model without dense weights.
            FileCannotOpenError: No such file.
            BrokenFileError: A file of another model or optimizer; nothing is changed then.
        """
        files = self._files("load_dense_optimizer_states", data_source_params)
        files.load_dense_optimizer_states(dense_opt_states_file)

    @as_hugectr_errors("load_sparse_weights")
    @bind_arguments("Model.load_sparse_weights")
    @in_one_process(changes=True)
    def load_sparse_weights(
        self,
        sparse_embedding_files: Sequence[str] | Mapping[str, str],
        data_source_params: DataSourceParams | None = None,
    ) -> None:
        """Load the rows of embeddings from their folders.

        Raises:
            WrongInputError: Another number of files, or an unknown embedding.
            FileCannotOpenError: A missing folder.
            BrokenFileError: A folder of another embedding; none of the embeddings is changed then.
        """
        self._files("load_sparse_weights", data_source_params).load_sparse(sparse_embedding_files)

    @as_hugectr_errors("load_sparse_optimizer_states")
    @bind_arguments("Model.load_sparse_optimizer_states")
    @in_one_process(changes=True)
    def load_sparse_optimizer_states(
        self,
        sparse_opt_states_files: Sequence[str] | Mapping[str, str],
        data_source_params: DataSourceParams | None = None,
    ) -> None:
        """Load the optimizer states of embeddings from files; the errors are those of `load_sparse_weights`.

        States are in the order of the rows that were last loaded or saved: those of HugeCTR need their folder again.
        """
        files = self._files("load_sparse_optimizer_states", data_source_params)
        files.load_sparse_optimizer_states(sparse_opt_states_files)

    @as_hugectr_errors("embedding_dump")
    @in_one_process(changes=False)
    def embedding_dump(self, path: str, table_names: Sequence[str] = ()) -> None:
        """Write the tables of embedding collections below `path`; all of them if none is named.

        Raises:
            WrongInputError: An unknown table.
            BrokenFileError: A key below 0, or from 2^32 on, with ``i64_input_key=False``; nothing is written then.
            StorageError: The disk is full.
        """
        self._files("embedding_dump").dump_tables(path, table_names)

    @as_hugectr_errors("embedding_load")
    @in_one_process(changes=True)
    def embedding_load(self, path: str, table_names: Sequence[str] = ()) -> None:
        """Load tables of embedding collections from a dump of `embedding_dump`; all of its tables if none is named.

        Raises:
            WrongInputError: An unknown table.
            FileCannotOpenError: No dump.
            BrokenFileError: A dump of other tables; none is changed then.
        """
        self._files("embedding_load").load_tables(path, table_names)

    @in_one_process(changes=True)
    def _change_rows(self, change: UseOfRows) -> None:
        change(self._files("compile").embeddings())

    @in_one_process(changes=False)
    def _read_rows(self, read: UseOfRows) -> None:
        read(self._files("compile").embeddings())

    def get_embedding_training_cache(self) -> TrainingCache:
        """Return the training cache, whose `update` takes the keyset of each pass.

        Raises:
            IllegalCallError: Of a model without a training cache.
        """
        self._compiled("get_embedding_training_cache")
        if self._cache is None:
            raise IllegalCallError(
                "get_embedding_training_cache", "the model has none, expected Model(..., etc_params)"
            )
        return self._cache

    get_model_oversubscriber = get_embedding_training_cache

    def get_incremental_model(self) -> IncrementalModel:
        """Return keys int64[n] and vectors float32[n, D] of each embedding, of the passes since the last call.

        Raises:
            IllegalCallError: Of a model without a training cache.
        """
        return self.get_embedding_training_cache().incremental_model()

    def dump_incremental_model_2kafka(self) -> None:
        """Send what `get_incremental_model` returns to the topics ``hps_et.MODEL.EMBEDDING`` of the solver's brokers.

        Raises:
            IllegalCallError: Of a model without a training cache, or of a solver without `kafka_brockers`.
            InvalidEnvError: The client of Kafka is not installed.
            ServerUnreachableError: The brokers do not answer in time; the next call sends the rows again.
            StoreError: The brokers reject a message; as above.
        """
        call = "dump_incremental_model_2kafka"
        if not self.solver.kafka_brockers:
            raise IllegalCallError(call, "the solver has no brokers, expected CreateSolver(kafka_brockers=...)")
        cache = self.get_embedding_training_cache()
        with as_hugectr_errors(call), cache.sending() as rows:
            send_rows(self.solver.kafka_brockers, self.solver.model_name, rows)

    @in_one_process(changes=False)
    def save_run(self, path: str | Path) -> None:
        """Write a RUN of terarec that continues the training of this model, bit for bit.

        ``terarec train --resume --out RUN``, ``evaluate``, ``predict``, ``export``, ``serve`` and ``inspect`` take it.
        ``RUN/records.json`` describes the data, which stays where it is. Evaluations are those of terarec. By epochs,
        the rate does not advance at the end of the data as it does in HugeCTR's loop. Workspaces bound nothing there.

        Args:
            path: A new or empty directory.

        Raises:
            IllegalCallError: Of a model with a training cache, whose data is in passes.
            WrongInputError: A directory that holds something else.
            FileCannotOpenError: Data that is not there.
            BrokenFileError: Data that does not hold what it should.
            StorageError: The disk is full.
        """
        with as_hugectr_errors("save_run"):
            save_run(Path(path), *self.run_parts())

    def run_parts(self) -> tuple[RecordsSpec, Training]:
        """Describe the data and the training for a RUN; see `save_run`.

        Raises:
            IllegalCallError: As `save_run`.
            FileCannotOpenError: Data that is not there.
            BrokenFileError: Data that does not hold what it should.
        """
        compiled = self._compiled("save_run")
        if self._cache is not None:
            raise IllegalCallError("save_run", "the model has a training cache, expected one that trains on one source")
        is_running = self._fit is not None and self._fit.is_running
        return run_parts(compiled, self.reader_params, self.solver, self._scheduler, is_running=is_running)

    def _compiled(self, call: str) -> Compiled:
        if self._compiled_model is None:
            raise IllegalCallError(call, "the model is not compiled, expected Model.compile() before")
        return self._compiled_model

    def _freeze(self) -> None:
        self._compiled("freeze").freeze(dense=self._is_dense_frozen, embeddings=self._frozen)

    def _embedding_names(self, name: str | None) -> list[str]:
        known = [embedding.name for embedding in self._compiled("freeze_embedding").plan.spec.embeddings]
        if name is not None and name not in known:
            raise WrongInputError("freeze_embedding", f"got {name!r}, expected one of {', '.join(known)}")
        return known if name is None else [name]

    def _url(self, path: str) -> str:
        """Return `path` on the file system that the solver names for the model's files."""
        return file_url(source_of(self.solver), path)

    def _files(self, call: str, source: DataSourceParams | None = None) -> ModelFiles:
        compiled = self._compiled(call)
        return ModelFiles(self._network, compiled, self.solver, self._optimizer, self._row_orders, source)
