# SPDX-License-Identifier: Apache-2.0
"""The files of a compiled model: weights and optimizer states of its layers, embeddings and tables."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar

import torch
from torch import optim

from terarec.checkpoint import Checkpoint, load, save
from terarec.dist import Ranks
from terarec.formats.hugectr.collection import COLLECTION_FILES
from terarec.formats.hugectr.weights import SPARSE_FOLDER_FILES, STATISTICS_SUFFIX
from terarec.hugectr.collection_weights import check_collection, dump_collection, dump_folder, load_collection
from terarec.hugectr.compilation import Compiled
from terarec.hugectr.data import FileNames, file_url, model_home, stored_path
from terarec.hugectr.dense_weights import (
    load_dense,
    load_dense_optimizer_states,
    save_dense,
    save_dense_optimizer_states,
)
from terarec.hugectr.embedding_collection import EmbeddingCollectionConfig
from terarec.hugectr.errors import IllegalCallError, WrongInputError
from terarec.hugectr.graph_json import Graph, graph_to_json
from terarec.hugectr.network import Network, NetworkPlan, capacity, num_devices
from terarec.hugectr.objects import (
    DataSourceParams,
    EmbeddingTrainingCacheParams,
    ModelOversubscriberParams,
    OptParamsPy,
    Solver,
    SparseEmbedding,
)
from terarec.hugectr.release import release_number
from terarec.hugectr.sparse_weights import (
    EmbeddingFile,
    check_sparse,
    check_sparse_optimizer_states,
    embedding_file,
    load_sparse,
    load_sparse_optimizer_states,
    save_sparse,
    save_sparse_optimizer_states,
)
from terarec.hugectr.training_cache import TrainingCache, WholeRows
from terarec.io.directories import atomic_entries
from terarec.io.exchange import end_entries
from terarec.io.files import real_path
from terarec.io.remote import is_remote, local_copy
from terarec.io.removal import mark, remove_tree
from terarec.models.artifact import load_weights
from terarec.models.graph import tensor_shapes
from terarec.storage.kinds import AnyTable
from terarec.train import Trainer
from terarec.train.checkpointing import capture

SparseFiles = Sequence[str] | Mapping[str, str]
"""Paths in the order of the embeddings, or by their names."""


class ModelFiles:
    """Files of a model, to be written and read; the methods and errors are those of `terarec.hugectr.Model`.

    Args:
        network: Parts of the model.
        compiled: The compiled model.
        solver: The `CreateSolver` object.
        optimizer: The `CreateOptimizer` object.
        row_orders: Embedding -> URL or path of its rows, if these were last loaded in another order than that in which
            they are saved: the order of the next file of states. The calls update it.
        source: File system of a call's files; None for the solver's.
    """

    def __init__(
        self,
        network: Network,
        compiled: Compiled,
        solver: Solver,
        optimizer: OptParamsPy,
        row_orders: dict[str, str],
        source: DataSourceParams | None = None,
    ) -> None:
        self._network, self._compiled, self._solver, self._optimizer = network, compiled, solver, optimizer
        self._row_orders = row_orders
        self._source = source_of(solver, source)
        self._key_bytes: Literal[4, 8] = 8 if solver.i64_input_key else 4

    def embeddings(self) -> list[EmbeddingFile]:
        """Return the file of each `SparseEmbedding`."""
        devices = num_devices(self._solver)
        return [
            embedding_file(
                part,
                self._compiled.model.collection(part.sparse_embedding_name),
                devices=devices,
                capacity=capacity(part, part.optimizer or self._optimizer, devices),
                key_bytes=self._key_bytes,
            )
            for part in self._network.of_type(SparseEmbedding)
        ]

    def training_cache(
        self,
        params: EmbeddingTrainingCacheParams | ModelOversubscriberParams,
        keysets: Callable[[], Sequence[str]],
        whole: WholeRows,
    ) -> TrainingCache:
        """Return the training cache of the embeddings; arguments and errors are those of `TrainingCache`."""
        files = self.embeddings()
        collections = [self._compiled.model.collection(file.name) for file in files]
        return TrainingCache(params, files, collections, key_bytes=self._key_bytes, keysets=keysets, whole=whole)

    def save(self, prefix: str, number: int, cache: TrainingCache | None) -> None:
        """Write the files of a snapshot as `Model.save_params_to_files` does."""
        dense, source = self._compiled.trainer.optimizers.dense, self._source
        names = FileNames(file_url(source, model_home(source) + prefix), number)
        # From 3.1 on an embedding is a folder of keys, slots and vectors.
        is_single = release_number(self._solver.compat_release) <= (3, 0)
        with atomic_entries(names.folder, replaceable=SPARSE_FOLDER_FILES) as folder:
            # In one publication: a snapshot that is killed while it is written leaves no file behind.
            save_dense(self._compiled.model, folder / names.dense)
            if dense is not None:
                save_dense_optimizer_states(self._compiled.model, dense, folder / names.dense_states)
            if cache is not None:
                cache.save(folder, names, single_file=is_single, files=self.embeddings())
                return
            for index, file in enumerate(self.embeddings()):
                save_sparse(file, folder / names.sparse(index), single_file=is_single)
                save_sparse_optimizer_states(file, folder / names.sparse_states(index))
        self._row_orders.clear()

    def load_dense(self, path: str) -> None:
        """Load weights as `Model.load_dense_weights` does."""
        # Release 3.4 names the job's files on HDFS once for all calls; these win over the argument.
        url = file_url(self._source, stored_path(self._source, "dense_model", path))
        with _local_copy(url, adjacent=(STATISTICS_SUFFIX,)) as copy:
            load_dense(self._compiled.model, copy)

    def load_dense_optimizer_states(self, path: str) -> None:
        """Load states as `Model.load_dense_optimizer_states` does."""
        optimizer: optim.Optimizer | None = self._compiled.trainer.optimizers.dense
        if optimizer is None:
            raise IllegalCallError("load_dense_optimizer_states", "the model has no dense weights, expected some")
        with _local_copy(file_url(self._source, stored_path(self._source, "dense_opt_states", path))) as copy:
            load_dense_optimizer_states(self._compiled.model, optimizer, copy)

    def load_sparse(self, files: SparseFiles) -> None:
        """Load rows as `Model.load_sparse_weights` does."""
        with self._chosen("load_sparse_weights", stored_path(self._source, "sparse_model", files)) as chosen:
            # Before the first is changed; that one is checked by its own loading.
            for file, path, _ in chosen[1:]:
                check_sparse(file, path)
            for file, path, url in chosen:
                is_in_order = load_sparse(file, path)
                self._row_orders.pop(file.name, None)
                if not is_in_order:
                    self._row_orders[file.name] = url

    def load_sparse_optimizer_states(self, files: SparseFiles) -> None:
        """Load states of rows as `Model.load_sparse_optimizer_states` does."""
        stored = stored_path(self._source, "sparse_opt_states", files)
        with self._chosen("load_sparse_optimizer_states", stored) as chosen, ExitStack() as stack:
            folders = {
                file.name: stack.enter_context(_local_copy(self._row_orders[file.name]))
                for file, _, _ in chosen
                if file.name in self._row_orders
            }
            for file, path, _ in chosen[1:]:
                check_sparse_optimizer_states(file, path, rows_from=folders.get(file.name))
            for file, path, _ in chosen:
                load_sparse_optimizer_states(file, path, rows_from=folders.get(file.name))

    def dump_tables(self, path: str, table_names: Sequence[str]) -> None:
        """Write tables as `Model.embedding_dump` does."""
        # A list, so that an unknown name raises before anything is written.
        collections = list(self._collections("embedding_dump", table_names))
        with atomic_entries(file_url(self._source, path), replaceable=COLLECTION_FILES) as local:
            for number, tables, names in collections:
                folder = dump_folder(local, number)
                dump_collection(tables, folder, names=names, key_bytes=self._key_bytes)

    def load_tables(self, path: str, table_names: Sequence[str]) -> None:
        """Load tables as `Model.embedding_load` does."""
        collections = list(self._collections("embedding_load", table_names))
        with _local_copy(file_url(self._source, path)) as local:
            for number, tables, names in collections[1:]:
                check_collection(tables, dump_folder(local, number), names=names)
            for number, tables, names in collections:
                load_collection(tables, dump_folder(local, number), names=names)

    @contextmanager
    def _chosen(self, call: str, files: SparseFiles) -> Iterator[list[tuple[EmbeddingFile, Path, str]]]:
        """Yield each embedding to load with its file, or a local copy of it, and the file's URL or path."""
        files_by_name = {file.name: file for file in self.embeddings()}
        if not isinstance(files, Mapping):
            if len(files) != len(files_by_name):
                raise WrongInputError(
                    call, f"got {len(files)} files, expected one for each of the {len(files_by_name)} embeddings"
                )
            files = dict(zip(files_by_name, files, strict=True))
        for name in files:
            if name not in files_by_name:
                raise WrongInputError(call, f"got {name!r}, expected one of {', '.join(files_by_name) or 'none'}")
        with ExitStack() as stack:
            urls = {name: file_url(self._source, path) for name, path in files.items()}
            # All URLs are copied before the first is read: a missing one must not leave half of the embeddings loaded.
            yield [(files_by_name[name], stack.enter_context(_local_copy(url)), url) for name, url in urls.items()]

    def _collections(
        self, call: str, table_names: Sequence[str]
    ) -> Iterator[tuple[int, Mapping[str, AnyTable], list[str]]]:
        """Yield the number, the tables and the matching names of each collection that has some of `table_names`."""
        configs = self._network.of_type(EmbeddingCollectionConfig)
        known = [name for config in configs for name in config.table_names()]
        if not configs:
            raise IllegalCallError(
                call,
                "the model has no embedding collection; expected save_params_to_files and load_sparse_weights "
                "for a SparseEmbedding",
            )
        for name in table_names:
            if name not in known:
                raise WrongInputError(
                    f"{call}: table_names", f"got {name!r}, expected some of {', '.join(known) or 'none'}"
                )
        model = self._compiled.model
        for number, (config, parts) in enumerate(zip(configs, self._compiled.plan.collections, strict=True)):
            tables = {name: table for part in parts for name, table in model.collection(part).tables.items()}
            names = [name for name in table_names if name in tables]
            if names or not table_names:
                yield number, {name: tables[name] for name in config.table_names()}, names


def describe_graph(network: Network, plan: NetworkPlan, solver: Solver, optimizer: OptParamsPy) -> dict[str, Any]:
    """Return the graph of a model for `json.dumps`; see `Model.graph_to_json`."""
    widths = {name: shape.dims[-1] for name, shape in tensor_shapes(plan.spec).items()}
    # `inputs` raises where there is no `Input` yet; `parts` would be empty.
    graph = Graph(model_name=solver.model_name, parts=(network.inputs, *network.parts[1:]))
    devices = num_devices(solver)

    def capacity_of(part: SparseEmbedding) -> int:
        return capacity(part, part.optimizer or optimizer, devices)

    return graph_to_json(graph, optimizer, capacity_of, widths)


def source_of(solver: Solver, provided: DataSourceParams | None = None) -> DataSourceParams:
    """Return the file system that a call, or else the solver, names for the model's files."""
    return provided or solver.values().get("data_source_params") or DataSourceParams()


class Holder(Protocol):
    """A model of a script, which may be compiled."""

    _compiled_model: Compiled | None


Model = TypeVar("Model", bound=Holder)
Given = ParamSpec("Given")


def in_one_process(
    *, changes: bool
) -> Callable[[Callable[Concatenate[Model, Given], None]], Callable[Concatenate[Model, Given], None]]:
    """Run a method in the first of several processes only, on a model that has the rows of all.

    That process needs memory for all rows while the method runs. The folder of the checkpoint is temporary: that of the
    system, or below the working directory where there are several machines, which have to share it.

    Args:
        changes: Whether the method changes weights or optimizer states, which all processes get then.
    """

    def of_method(
        method: Callable[Concatenate[Model, Given], None],
    ) -> Callable[Concatenate[Model, Given], None]:
        @wraps(method)
        def wrapped(model: Model, /, *args: Given.args, **kwargs: Given.kwargs) -> None:
            compiled = model._compiled_model
            if compiled is None or compiled.trainer.ranks.size == 1:
                method(model, *args, **kwargs)
                return
            ranks, what = compiled.trainer.ranks, method.__name__
            folder = _shared_folder(ranks)
            try:
                saved = save(folder / "held", capture(compiled.trainer, {}), writers=ranks)

                def alone() -> None:
                    # Building a trainer seeds the generator of torch, from which dropout of this model still draws.
                    with torch.random.fork_rng(devices=()):
                        trainer = compiled.build_alone()
                    _restore(trainer, load(saved))
                    # The method sees a model with all rows; the sharded one returns even if it fails.
                    model._compiled_model = replace(compiled, trainer=trainer, model=trainer.model)  # type: ignore[arg-type]
                    try:
                        method(model, *args, **kwargs)
                    finally:
                        model._compiled_model = compiled
                    if changes:
                        save(folder / "changed", capture(trainer, {}))

                ranks.on_first(what, alone)
                if changes:
                    _restore(compiled.trainer, load(folder / "changed" / saved.name))
                    ranks.barrier(what)
            finally:
                if ranks.is_first:
                    remove_tree(folder, ignore_errors=True)

        return wrapped

    return of_method


@contextmanager
def _local_copy(url: str, *, adjacent: Sequence[str] = ()) -> Iterator[Path]:
    """Yield what `local_copy` does, once the files of a save that was killed are in their places."""
    if not is_remote(url):
        end_entries(real_path(url).parent)
        end_entries(real_path(url))  # the folder of tables
    with local_copy(url, adjacent=adjacent) as copy:
        yield copy


def _shared_folder(ranks: Ranks) -> Path:
    folder = ""
    if ranks.is_first:
        folder = tempfile.mkdtemp(prefix=".terarec-", dir=Path.cwd() if max(ranks.nodes) else None)
        mark(Path(folder))
    return Path(ranks.gather("folder of a model's rows", folder)[0])


def _restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Load weights, optimizer states and counts of steps."""
    load_weights(trainer.model, checkpoint, with_state=True)
    # Not the reader's position: the method of one process does not move the data of the others.
    progress: dict[str, Any] = dict(checkpoint.progress)
    if trainer.optimizers.dense is not None:
        trainer.optimizers.dense.load_state_dict(checkpoint.optimizer())
    if trainer.optimizers.rows is not None:
        trainer.optimizers.rows.load_step_state(progress["row_optimizer"])
    trainer.load_state_dict(progress["trainer"])
