"""The part of `Model` that reads and writes files: graphs, weights, optimizer states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import optim

from terarec.formats import local_copy, new_files
from terarec.formats.hugectr import SPARSE_FOLDER_FILES, STATISTICS_SUFFIX
from terarec.hugectr.embeddings import capacity
from terarec.hugectr.errors import IllegalCallError, WrongInputError, as_hugectr_errors
from terarec.hugectr.graph_json import Graph, graph_to_json, read_graph
from terarec.hugectr.json_object import read_json, write_json
from terarec.hugectr.model_data import ModelData
from terarec.hugectr.tables.calls import (
    LOAD_DENSE_OPTIMIZER_STATES,
    LOAD_DENSE_WEIGHTS,
    LOAD_SPARSE_OPTIMIZER_STATES,
    LOAD_SPARSE_WEIGHTS,
    SAVE_PARAMS_TO_FILES,
)
from terarec.hugectr.tables.data_source import DataSourceParams
from terarec.hugectr.tables.dense_layer import DenseLayer
from terarec.hugectr.tables.sparse_embedding import SparseEmbedding
from terarec.hugectr.tables.table import taking
from terarec.hugectr.weights import (
    EmbeddingFile,
    FileNames,
    check_sparse,
    check_sparse_optimizer_states,
    embedding_file,
    is_single_file,
    load_dense,
    load_dense_optimizer_states,
    load_sparse,
    load_sparse_optimizer_states,
    save_dense,
    save_dense_optimizer_states,
    save_sparse,
    save_sparse_optimizer_states,
)
from terarec.models.graph import tensor_shapes


class ModelFiles(ModelData):
    """What of a model lies in files: at paths, or at URLs that fsspec knows."""

    @as_hugectr_errors("graph_to_json")
    def graph_to_json(self, graph_config_file: str) -> None:
        """Write the graph; a tensor that several layers read goes through a Slice with a copy for each, as in HugeCTR.

        Raises:
            IllegalCallError: before an `Input` was added.
            WrongInputError: shapes or options that do not fit.
        """
        plan = self._network.plan({}) if self._engine is None else self._engine.plan
        widths = {name: shape.dims[-1] for name, shape in tensor_shapes(plan.spec).items()}
        graph = Graph(model_name=self.solver.model_name, parts=(self._network.inputs, *self._network.parts[1:]))
        write_json(self._url(graph_config_file), graph_to_json(graph, self._optimizer, self._capacity_of, widths))

    def construct_from_json(self, graph_config_file: str, include_dense_network: bool) -> None:
        """Add what a graph's file holds; `compile` comes after it.

        Args:
            graph_config_file: as `graph_to_json` writes it.
            include_dense_network: False leaves the dense layers out, so that others are added.

        Raises:
            FileCannotOpenError: no such file.
            WrongInputError: as `add`, or a clause of the file with its path.
            IllegalCallError: something was added already, or the model is compiled.
        """
        for part in read_graph(read_json(self._url(graph_config_file))).parts:
            if include_dense_network or not isinstance(part, DenseLayer):
                self.add(part)

    @as_hugectr_errors("save_params_to_files")
    @taking(SAVE_PARAMS_TO_FILES)
    def save_params_to_files(self, prefix: str, iter: int, data_source_params: DataSourceParams | None) -> None:  # noqa: A002 - HugeCTR's name
        """Write weights and optimizer states of the dense layers and of each `SparseEmbedding`.

        The files are ``<prefix>_dense_<iter>.model``, ``<prefix>_opt_dense_<iter>.model`` and, with the number n of
        each embedding, ``<prefix><n>_sparse_<iter>.model`` and ``<prefix><n>_opt_sparse_<iter>.model``. They appear
        together, when all are written. With a training cache the embeddings go to its folders, without optimizer
        states.

        Raises:
            IllegalCallError: before `compile`.
            WrongInputError: a folder in the place of a file, or one that holds something of others; nothing is changed.
            StorageError: the disk is full; nothing is changed.
        """
        engine, source = self._compiled("save_params_to_files"), self._source(data_source_params)
        names = FileNames(source.url(source.model_home + prefix), iter)
        with new_files(names.folder, replaceable=SPARSE_FOLDER_FILES) as folder:
            save_dense(engine.model, folder / names.dense)
            if engine.trainer.dense_optimizer is not None:
                save_dense_optimizer_states(engine.model, engine.trainer.dense_optimizer, folder / names.dense_states)
            self._save_embeddings(folder, names)

    @as_hugectr_errors("load_dense_weights")
    @taking(LOAD_DENSE_WEIGHTS)
    def load_dense_weights(self, dense_model_file: str, data_source_params: DataSourceParams | None) -> None:
        """Take the weights of the dense layers from a file.

        Raises:
            IllegalCallError: before `compile`.
            FileCannotOpenError: no such file.
            BrokenFileError: a file of another model; nothing is changed then.
        """
        model = self._compiled("load_dense_weights").model
        source = self._source(data_source_params)
        file = source.stored("dense_model", dense_model_file)
        with local_copy(source.url(file), beside=(STATISTICS_SUFFIX,)) as path:
            load_dense(model, path)

    @as_hugectr_errors("load_dense_optimizer_states")
    @taking(LOAD_DENSE_OPTIMIZER_STATES)
    def load_dense_optimizer_states(
        self, dense_opt_states_file: str, data_source_params: DataSourceParams | None
    ) -> None:
        """Take the dense optimizer's states from a file.

        Raises:
            IllegalCallError: before `compile`, or of a model without dense weights.
            FileCannotOpenError: no such file.
            BrokenFileError: a file of another model or optimizer; nothing is changed then.
        """
        engine = self._compiled("load_dense_optimizer_states")
        optimizer: optim.Optimizer | None = engine.trainer.dense_optimizer
        if optimizer is None:
            raise IllegalCallError("load_dense_optimizer_states: the model has no dense weights, expected some")
        source = self._source(data_source_params)
        with local_copy(source.url(source.stored("dense_opt_states", dense_opt_states_file))) as path:
            load_dense_optimizer_states(engine.model, optimizer, path)

    @as_hugectr_errors("load_sparse_weights")
    @taking(LOAD_SPARSE_WEIGHTS)
    def load_sparse_weights(
        self,
        sparse_embedding_files: Sequence[str] | Mapping[str, str],
        data_source_params: DataSourceParams | None,
    ) -> None:
        """Take the rows of embeddings from their folders.

        Raises:
            IllegalCallError: before `compile`.
            WrongInputError: another number of files, or an embedding that is not there.
            FileCannotOpenError: a folder that is not there.
            BrokenFileError: a folder of another embedding; none of the embeddings is changed then.
        """
        source = self._source(data_source_params)
        files = source.stored("sparse_model", sparse_embedding_files)
        with self._chosen("load_sparse_weights", files, source) as chosen:
            for file, path in chosen[1:]:
                check_sparse(file, path)  # before the first is changed
            for file, path in chosen:
                load_sparse(file, path)

    @as_hugectr_errors("load_sparse_optimizer_states")
    @taking(LOAD_SPARSE_OPTIMIZER_STATES)
    def load_sparse_optimizer_states(
        self,
        sparse_opt_states_files: Sequence[str] | Mapping[str, str],
        data_source_params: DataSourceParams | None,
    ) -> None:
        """Take the optimizer states of embeddings from files; the errors are those of `load_sparse_weights`."""
        source = self._source(data_source_params)
        files = source.stored("sparse_opt_states", sparse_opt_states_files)
        with self._chosen("load_sparse_optimizer_states", files, source) as chosen:
            for file, path in chosen[1:]:
                check_sparse_optimizer_states(file, path)
            for file, path in chosen:
                load_sparse_optimizer_states(file, path)

    def _save_embeddings(self, folder: Path, names: FileNames) -> None:
        single_file = is_single_file(self.solver.compat_release)
        for number, file in enumerate(self._embedding_files()):
            save_sparse(file, folder / names.sparse(number), single_file=single_file)
            save_sparse_optimizer_states(file, folder / names.sparse_states(number))

    def _url(self, path: str) -> str:
        """Where `path` is, on the file system that the solver names for the model's files."""
        return self._source(None).url(path)

    def _source(self, given: DataSourceParams | None) -> DataSourceParams:
        """The file system that a call names for its files, or else the solver."""
        return given or self.solver.values().get("data_source_params") or DataSourceParams()

    def _embedding_files(self) -> list[EmbeddingFile]:
        model = self._compiled("files").model
        return [
            embedding_file(
                part,
                model.collection(part.sparse_embedding_name),
                devices=self._num_devices(),
                capacity=self._capacity_of(part),
                key_bytes=8 if self.solver.i64_input_key else 4,
            )
            for part in self._network.of_kind(SparseEmbedding)
        ]

    @contextmanager
    def _chosen(
        self, call: str, files: Sequence[str] | Mapping[str, str], source: DataSourceParams
    ) -> Iterator[list[tuple[EmbeddingFile, Path]]]:
        """Each embedding that is to be loaded with its path, or with a copy of what a URL names."""
        self._compiled(call)
        held = {file.name: file for file in self._embedding_files()}
        if not isinstance(files, Mapping):
            if len(files) != len(held):
                raise WrongInputError(
                    f"{call}: got {len(files)} files, expected one for each of the {len(held)} embeddings"
                )
            files = dict(zip(held, files, strict=True))
        for name in files:
            if name not in held:
                raise WrongInputError(f"{call}: got {name!r}, expected one of {', '.join(held) or 'none'}")
        with ExitStack() as stack:
            yield [(held[name], stack.enter_context(local_copy(source.url(path)))) for name, path in files.items()]

    def _num_devices(self) -> int:
        return sum(map(len, self.solver.vvgpu))

    def _capacity_of(self, part: SparseEmbedding) -> int:
        return capacity(part, part.optimizer or self._optimizer, self._num_devices())
