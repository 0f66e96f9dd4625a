"""Sessions of every release: models that score requests and files, with their tables in a parameter server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray

from terarec.batch import Batch
from terarec.embedding import RowLookup
from terarec.hugectr.enums import Check_t, DataReaderType_t
from terarec.hugectr.errors import IllegalCallError, WrongInputError, as_hugectr_errors
from terarec.hugectr.inference.graph import read_inference_clause, read_inference_graph
from terarec.hugectr.inference.parameter_server import cache_of, device_of, served_model, tiers_of
from terarec.hugectr.inference.scorer import Scorer
from terarec.hugectr.objects import (
    DataReaderParams,
    DataSourceParams,
    EmbeddingCache,
    InferenceParams,
    ParameterServer,
    Solver,
)
from terarec.hugectr.readers import DataReader, async_layout_of, record_layout, source_opener
from terarec.hugectr.schema.table import bind_arguments
from terarec.hugectr.schema.types import release_number
from terarec.metrics import AUC
from terarec.nn.precision import Precision, mixed_precision
from terarec.ps import EmbeddingCache as Cache
from terarec.ps import ParameterServer as Server
from terarec.spec import CacheSpec, ParameterServerSpec, ServedModelSpec


class LoadedParameterServer(ParameterServer):
    """The tables of models of release 3.0.

    Attributes:
        server: The tables.
    """

    @bind_arguments("CreateParameterServer")
    def __init__(self, model_config_path: list[str], model_name: list[str], i64_input_key: bool) -> None:
        if len(model_config_path) != len(model_name):
            got = f"got {len(model_name)} names for {len(model_config_path)} files"
            raise WrongInputError("CreateParameterServer", "model_name", f"{got}, expected one for each")
        models = []
        for path, name in zip(model_config_path, model_name, strict=True):
            graph, clause = read_inference_graph(path), read_inference_clause(path)
            params = _params_of(clause.max_batchsize, name, clause.sparse_model_files, i64_input_key=i64_input_key)
            models.append(served_model(params, graph.widths, has_slots=graph.has_slots))
        with as_hugectr_errors("CreateParameterServer"):
            self.server = Server(ParameterServerSpec(models=tuple(models)))

    def close(self) -> None:
        """Free the memory of the tables."""
        self.server.close()


class LoadedEmbeddingCache(EmbeddingCache):
    """The caches of a model's tables in release 3.0.

    Attributes:
        lookups: Rows of each table.
        device: Device of the rows.
        caches: The caches; none without one.
    """

    @bind_arguments("CreateEmbeddingCache")
    def __init__(
        self,
        parameter_server: ParameterServer,
        cuda_dev_id: int,
        use_gpu_embedding_cache: bool,
        cache_size_percentage: float,
        model_config_path: str,
        model_name: str,
        i64_input_key: bool,
    ) -> None:
        # The schema knows the base class alone, so that reading it does not load torch.
        if not isinstance(parameter_server, LoadedParameterServer):
            raise WrongInputError(
                "CreateEmbeddingCache", "parameter_server", "expected what CreateParameterServer makes"
            )
        server, self.device = parameter_server.server, device_of([cuda_dev_id])
        spec = None
        if use_gpu_embedding_cache and cache_size_percentage:
            # Any threshold is accepted; above 1 no share of keys reaches it, which 1 says as well.
            threshold = min(1.0, read_inference_clause(model_config_path).hit_rate_threshold)
            spec = CacheSpec(share=min(1.0, cache_size_percentage), hit_rate_threshold=threshold)
        with as_hugectr_errors("CreateEmbeddingCache"):
            self.lookups, self.caches = _lookups(server, server.model(model_name), self.device, spec)

    def close(self) -> None:
        """Stop the work in the background."""
        for cache in self.caches:
            cache.close()


class InferenceSession:
    """A model that scores requests and files, made by `CreateInferenceSession` or in release 3.0 by its own name.

    Attributes:
        scorer: The model.
        max_batchsize: Maximum number of samples of a request.
    """

    scorer: Scorer
    max_batchsize: int
    _caches: Sequence[Cache] = ()
    _server: Server | None = None
    _has_long_keys = True

    @bind_arguments("InferenceSession")
    def __init__(
        self, config_file: str, device_id: int, embedding_cache: EmbeddingCache, *, executor: str = "auto"
    ) -> None:
        if not isinstance(embedding_cache, LoadedEmbeddingCache):
            raise WrongInputError("InferenceSession", "embedding_cache", "expected what CreateEmbeddingCache makes")
        graph, clause = read_inference_graph(config_file), read_inference_clause(config_file)
        device = device_of([device_id])
        precision = mixed_precision(device, loss_scale=1.0) if clause.has_mixed_precision else "fp32"
        self.scorer = Scorer(
            graph,
            Path(config_file),
            clause.dense_model_file,
            embedding_cache.lookups,
            device,
            precision=precision,
            executor=executor,
        )
        self.max_batchsize, self._caches = clause.max_batchsize, embedding_cache.caches
        self._has_long_keys = clause.key_bytes == 8

    @classmethod
    @bind_arguments("CreateInferenceSession")
    def of_graph(cls, model_config_path: str | os.PathLike[str], inference_params: InferenceParams) -> InferenceSession:
        """Return a session of a graph file, with a parameter server of its own: `CreateInferenceSession`.

        Args:
            model_config_path: JSON file of the model.
            inference_params: The model.

        Raises:
            WrongInputError: Files, tables or databases that do not fit together.
            FileCannotOpenError: A file does not exist.
            BrokenFileError: A file is damaged.
        """
        # Not `__init__`, which is the constructor of release 3.0 and takes a cache.
        session = object.__new__(cls)
        session._open(os.fspath(model_config_path), inference_params)
        return session

    def _open(self, path: str, params: InferenceParams) -> None:
        graph = read_inference_graph(path)
        device = device_of([params.device_id, *params.deployed_devices])
        model = served_model(params, graph.widths, has_slots=graph.has_slots)
        tiers = tiers_of(params.volatile_db, params.persistent_db)
        with as_hugectr_errors("CreateInferenceSession"):
            self._server = Server(ParameterServerSpec(tiers=tiers, models=(model,)))
            lookups, self._caches = _lookups(self._server, model, device, cache_of(params))
        precision: Precision = mixed_precision(device, loss_scale=1.0) if params.use_mixed_precision else "fp32"
        self.scorer = Scorer(
            graph,
            Path(path),
            params.dense_model_file,
            lookups,
            device,
            precision=precision,
            statistics=params.non_trainable_params_file,
            executor=params.executor,
        )
        self.max_batchsize, self._has_long_keys = params.max_batchsize, params.i64_input_key

    @overload
    def predict(
        self, dense_feature: Sequence[float], embeddingcolumns: Sequence[int], row_ptrs: Sequence[int], /
    ) -> list[float]: ...
    @overload
    def predict(
        self,
        dense_feature: Sequence[float],
        embeddingcolumns: Sequence[int],
        row_ptrs: Sequence[int],
        i64_input_key: bool,
        /,
    ) -> list[float]: ...
    @overload
    def predict(
        self,
        num_batches: int,
        source: str,
        data_reader_type: DataReaderType_t,
        check_type: Check_t,
        slot_size_array: Sequence[int] = ...,
        data_source_params: DataSourceParams | None = ...,
        reading_file_sequentially: bool = ...,
    ) -> NDArray[np.float32]: ...
    def predict(self, *args: Any, **kwargs: Any) -> list[float] | NDArray[np.float32]:
        """Score a request, or batches of files.

        Of a request: ``(dense_feature, embeddingcolumns, row_ptrs)``, the dense numbers sample by sample, the keys
        table by table, and for each table where the keys of each bag begin. The scores of all samples are a list.

        Of files: ``(num_batches, source, data_reader_type, check_type, slot_size_array=[])``. The scores are
        float32[num_batches * max_batchsize, n].

        Raises:
            WrongInputError: Arguments that do not fit each other, or more samples than `max_batchsize`.
            FileCannotOpenError: No such data.
            BrokenFileError: A damaged file.
        """
        # Requests and files share this name in HugeCTR; files begin with a number of batches, requests with a list.
        if isinstance(args[0] if args else kwargs.get("num_batches"), int):
            return self._predict_files(*args, **kwargs)
        names = ("dense_feature", "embeddingcolumns", "row_ptrs", "i64_input_key")
        given = dict(zip(names, args, strict=False)) | kwargs
        # Some releases say how wide keys are; here they are integers of any size.
        given.pop("i64_input_key", None)
        if set(given) != set(names[:3]) or len(args) > len(names):
            raise WrongInputError("predict", f"got {', '.join(given) or 'nothing'}, expected {', '.join(names[:3])}")
        batch = self.scorer.batch(**given)
        if batch.batch_size > self.max_batchsize:
            got = f"got {batch.batch_size} samples, expected at most max_batchsize={self.max_batchsize}"
            raise WrongInputError("predict", got, field="max_batchsize")
        scores: list[float] = self.scorer.score(batch).reshape(-1).tolist()
        return scores

    @bind_arguments("InferenceModel.predict")
    def _predict_files(
        self,
        num_batches: int,
        source: str,
        data_reader_type: DataReaderType_t,
        check_type: Check_t,
        slot_size_array: Sequence[int] = (),
        data_source_params: DataSourceParams | None = None,
        reading_file_sequentially: bool = True,
    ) -> NDArray[np.float32]:
        files = _files(source, data_reader_type, check_type, slot_size_array, data_source_params)
        return np.concatenate([scores for _, scores in self._scored(num_batches, files)])

    @bind_arguments("InferenceModel.predict")
    def evaluate(
        self,
        num_batches: int,
        source: str,
        data_reader_type: DataReaderType_t,
        check_type: Check_t,
        slot_size_array: Sequence[int] = (),
        data_source_params: DataSourceParams | None = None,
        reading_file_sequentially: bool = True,
    ) -> float:
        """Return the AUC of batches of files; arguments and errors are those of `predict` for files."""
        # Batch by batch, so that labels and scores are the only parts of the data that stay in memory.
        metric = AUC()
        files = _files(source, data_reader_type, check_type, slot_size_array, data_source_params)
        for batch, scores in self._scored(num_batches, files):
            metric.update(torch.from_numpy(scores), batch.label)
        return float(metric.compute())

    def refresh_embedding_cache(self) -> None:
        """Refresh the rows in the caches from the parameter server."""
        for cache in self._caches:
            cache.refresh()

    def check_out_tensor(self, tensor_name: str) -> NDArray[np.float32]:
        """Return a tensor of the last batch; the tensor that a loss reads holds the probabilities.

        Raises:
            WrongInputError: An unknown tensor.
            IllegalCallError: Nothing was scored yet.
        """
        shapes = self.scorer.model.shapes
        if tensor_name not in shapes:
            raise WrongInputError("check_out_tensor", f"got {tensor_name!r}, expected one of {', '.join(shapes)}")
        tensors = self.scorer.tensors()
        if tensors is None:
            raise IllegalCallError("check_out_tensor", "nothing was scored yet, expected a call of predict before")
        found: NDArray[np.float32] = tensors[tensor_name].float().cpu().numpy()
        return found

    def close(self) -> None:
        """Close the parameter server of the session, if it has one of its own."""
        if self._server is not None:
            self._server.close()

    def _scored(self, num_batches: int, files: DataReaderParams) -> Iterator[tuple[Batch, NDArray[np.float32]]]:
        """Yield batches of files with their scores."""
        reader = self._reader(files)
        reader.set_source()
        try:
            for _ in range(num_batches):
                batch = reader.next_batch()
                if batch is None:
                    return
                yield batch, self.scorer.score(self.scorer.with_bases(batch))
        finally:
            # A caller may stop early: the threads that read ahead end with the generator.
            reader.close()

    def _reader(self, params: DataReaderParams) -> DataReader:
        graph = self.scorer.graph
        # A solver only for the layout of the files: batch sizes and bytes of keys.
        size, is_one_hot = self.max_batchsize, bool(graph.key_bases)
        solver = Solver(batchsize=size, batchsize_eval=size, i64_input_key=self._has_long_keys)
        release = release_number(solver.compat_release)
        with as_hugectr_errors("predict"):
            layout = record_layout(solver, params, graph.inputs, adds_offsets=not is_one_hot)
            async_layout = async_layout_of(params.async_param, release, is_one_hot=is_one_hot)
            opener = partial(source_opener, params, layout, async_layout=async_layout)
            return DataReader(
                opener(num_samples=params.num_samples),
                params.source[0],
                batch_size=size,
                # num_batches may be more than the files hold: HugeCTR begins with them again.
                repeat=True,
                drop_last=False,
                threads=params.num_workers,
            )


CreateInferenceSession = InferenceSession.of_graph


class InferenceModel(InferenceSession):
    """A model that scores files; it scores requests, too.

    Args:
        model_config_path: JSON file of the model.
        inference_params: The model.

    Raises:
        WrongInputError: Files, tables or databases that do not fit together.
        FileCannotOpenError: A file does not exist.
        BrokenFileError: A file is damaged.
    """

    @bind_arguments("InferenceModel")
    def __init__(self, model_config_path: str, inference_params: InferenceParams) -> None:
        self._open(os.fspath(model_config_path), inference_params)


def _files(
    source: str,
    kind: DataReaderType_t,
    check_type: Check_t,
    slot_sizes: Sequence[int],
    file_system: DataSourceParams | None,
) -> DataReaderParams:
    return DataReaderParams(
        data_reader_type=kind,
        source=[source],
        eval_source=source,
        check_type=check_type,
        slot_size_array=slot_sizes,
        data_source_params=file_system or DataSourceParams(),
    )


def _params_of(max_batchsize: int, name: str, files: Sequence[str], *, i64_input_key: bool) -> InferenceParams:
    """Return the parameters of a model of release 3.0; its caches are made apart."""
    return InferenceParams(
        model_name=name,
        max_batchsize=max_batchsize,
        hit_rate_threshold=1.0,
        dense_model_file="",
        sparse_model_files=list(files),
        device_id=0,
        use_gpu_embedding_cache=False,
        cache_size_percentage=0.0,
        i64_input_key=i64_input_key,
    )


def _lookups(
    server: Server, model: ServedModelSpec, device: torch.device, spec: CacheSpec | None
) -> tuple[list[RowLookup], list[Cache]]:
    if spec is None:
        return [server.table(model.name, table.name).lookup for table in model.tables], []
    caches = [server.cache(model.name, table.name, device=device, spec=spec) for table in model.tables]
    return [cache.lookup for cache in caches], caches
