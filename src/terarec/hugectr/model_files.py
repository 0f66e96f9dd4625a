"""The part of `Model` that reads and writes files: graphs, weights, optimizer states, passes of a training cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

from torch import optim

from terarec.formats import local_copy, new_files
from terarec.formats.hugectr import COLLECTION_FILES, SPARSE_FOLDER_FILES, STATISTICS_SUFFIX
from terarec.hugectr.embedding_collection import EmbeddingCollectionConfig
from terarec.hugectr.embeddings import capacity
from terarec.hugectr.errors import IllegalCallError, WrongInputError, as_hugectr_errors
from terarec.hugectr.graph_json import Graph, graph_to_json, read_graph
from terarec.hugectr.json_object import read_json, write_json
from terarec.hugectr.model_base import ModelBase
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
from terarec.hugectr.training_cache import IncrementalModel, TrainingCache
from terarec.hugectr.weights import (
    EmbeddingFile,
    FileNames,
    check_collection,
    check_sparse,
    check_sparse_optimizer_states,
    dump_collection,
    dump_folder,
    embedding_file,
    is_single_file,
    load_collection,
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
from terarec.storage import DynamicTable, StaticTable


class ModelFiles(ModelBase):
    """What of a model lies in files: at paths, or at URLs that fsspec knows."""

    _cache: TrainingCache | None = None

    def compile(self, loss_names: Sequence[str] = (), loss_weights: Sequence[float] = ()) -> None:
        """Build the model, and its training cache where one was asked for; see `ModelBase.compile`.

        Raises:
            WrongInputError: also for another number of folders than embeddings.
            FormatError: a folder that does not fit its embedding.
        """
        super().compile(loss_names, loss_weights)
        if self._etc_params is not None:
            files, model = self._embedding_files(), self.module
            collections = [model.collection(file.name) for file in files]
            key_bytes = 8 if self.solver.i64_input_key else 4
            self._cache = TrainingCache(self._etc_params, files, collections, key_bytes=key_bytes)

    @as_hugectr_errors("graph_to_json")
    def graph_to_json(self, graph_config_file: str) -> None:
        """Write the graph; a tensor that several layers read goes through a Slice with a copy for each, as in HugeCTR.

        Raises:
            IllegalCallError: before an `Input` was added.
            WrongInputError: shapes or options that do not fit.
        """
        plan = self._network.plan({}) if self._made is None else self._made.plan
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
        made, source = self._compiled("save_params_to_files"), self._source(data_source_params)
        dense = made.trainer.optimizers.dense
        names = FileNames(source.url(source.model_home + prefix), iter)
        with new_files(names.folder, replaceable=SPARSE_FOLDER_FILES) as folder:
            save_dense(made.model, folder / names.dense)
            if dense is not None:
                save_dense_optimizer_states(made.model, dense, folder / names.dense_states)
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
        made = self._compiled("load_dense_optimizer_states")
        optimizer: optim.Optimizer | None = made.trainer.optimizers.dense
        if optimizer is None:
            raise IllegalCallError("load_dense_optimizer_states: the model has no dense weights, expected some")
        source = self._source(data_source_params)
        with local_copy(source.url(source.stored("dense_opt_states", dense_opt_states_file))) as path:
            load_dense_optimizer_states(made.model, optimizer, path)

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

    @as_hugectr_errors("embedding_dump")
    def embedding_dump(self, path: str, table_names: Sequence[str] = ()) -> None:
        """Write the tables of embedding collections below `path`; all of them if none is named.

        Raises:
            IllegalCallError: before `compile`.
            WrongInputError: a table that is not there.
            StorageError: the disk is full.
        """
        collections = list(self._collections("embedding_dump", table_names))
        with new_files(self._url(path), replaceable=COLLECTION_FILES) as held:
            for number, tables, names in collections:
                folder = dump_folder(held, number)
                dump_collection(tables, folder, names=names, key_bytes=8 if self.solver.i64_input_key else 4)

    @as_hugectr_errors("embedding_load")
    def embedding_load(self, path: str, table_names: Sequence[str] = ()) -> None:
        """Take tables of embedding collections from what `embedding_dump` wrote; all that it holds if none is named.

        Raises:
            IllegalCallError: before `compile`.
            WrongInputError: a table that is not there.
            FileCannotOpenError: no dump.
            BrokenFileError: a dump of other tables; none is changed then.
        """
        collections = list(self._collections("embedding_load", table_names))
        with local_copy(self._url(path)) as held:
            for number, tables, names in collections[1:]:
                check_collection(tables, dump_folder(held, number), names=names)
            for number, tables, names in collections:
                load_collection(tables, dump_folder(held, number), names=names)

    def get_embedding_training_cache(self) -> TrainingCache:
        """What takes the keyset of each pass.

        Raises:
            IllegalCallError: before `compile`, or of a model without a training cache.
        """
        self._compiled("get_embedding_training_cache")
        if self._cache is None:
            raise IllegalCallError("get_embedding_training_cache: the model has none, expected Model(..., etc_params)")
        return self._cache

    get_model_oversubscriber = get_embedding_training_cache

    def get_incremental_model(self) -> IncrementalModel:
        """Keys int64[n] and vectors float32[n, D] of each embedding, of the passes since the last call.

        Raises:
            IllegalCallError: before `compile`, or of a model without a training cache.
        """
        return self.get_embedding_training_cache().incremental_model()

    def dump_incremental_model_2kafka(self) -> NoReturn:
        """Refused: there is no producer for Kafka; `get_incremental_model` gives the same rows."""
        raise IllegalCallError(
            "dump_incremental_model_2kafka: rows are not sent to Kafka, expected get_incremental_model for them"
        )

    def _save_embeddings(self, folder: Path, names: FileNames) -> None:
        single_file = is_single_file(self.solver.compat_release)
        if self._cache is not None:
            self._cache.save(folder, names, single_file=single_file)
            return
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

    def _collections(
        self, call: str, table_names: Sequence[str]
    ) -> Iterator[tuple[int, Mapping[str, StaticTable | DynamicTable], list[str]]]:
        """Number and tables of each collection that has some of `table_names`, and which these are."""
        made = self._compiled(call)
        configs = self._network.of_kind(EmbeddingCollectionConfig)
        known = [name for config in configs for name in config.table_names()]
        if not configs:
            raise IllegalCallError(
                f"{call}: the model has no embedding collection; expected save_params_to_files and load_sparse_weights "
                "for a SparseEmbedding"
            )
        for name in table_names:
            if name not in known:
                raise WrongInputError(
                    f"{call}: table_names: got {name!r}, expected some of {', '.join(known) or 'none'}"
                )
        for number, (config, parts) in enumerate(zip(configs, made.plan.collections, strict=True)):
            held = {name: table for part in parts for name, table in made.model.collection(part).tables.items()}
            names = [name for name in table_names if name in held]
            if names or not table_names:
                yield number, {name: held[name] for name in config.table_names()}, names
