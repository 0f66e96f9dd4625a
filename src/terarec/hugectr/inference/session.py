# SPDX-License-Identifier: Apache-2.0
"""Sessions of every release: models that score requests and files, with their tables in a parameter server."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray

from terarec.batch import Batch
from terarec.closer import stream
from terarec.embedding.lookups import RowLookup
from terarec.hugectr.enums import Check_t, DataReaderType_t
from terarec.hugectr.errors import IllegalCallError, WrongInputError, as_hugectr_errors
from terarec.hugectr.evaluation import update_auc
from terarec.hugectr.inference.graph import InferenceGraph, read_inference_clause, read_inference_graph
from terarec.hugectr.inference.parameter_server import (
    cache_of,
    device_of,
    lookups_of,
    open_server,
    served_model,
    start_updates,
    tiers_of,
)
from terarec.hugectr.inference.scorer import Scorer
from terarec.hugectr.inference.shared_tables import LoadedEmbeddingCache
from terarec.hugectr.objects import (
    DataReaderParams,
    DataSourceParams,
    EmbeddingCache,
    InferenceParams,
    Solver,
)
from terarec.hugectr.readers import DataReader, async_layout_of, record_layout, source_opener
from terarec.hugectr.release import release_number
from terarec.hugectr.schema.table import bind_arguments
from terarec.metrics import AUC
from terarec.ps import ParameterServer as Server
from terarec.ps.cache import EmbeddingCache as Cache


class ServedModel:
    """A model with its layers and the rows of its tables, which scores requests and files.

    Attributes:
        scorer: The layers.
        max_batchsize: Maximum number of samples of a request.
    """

    scorer: Scorer
    max_batchsize: int
    _caches: Sequence[Cache] = ()
    _server: Server | None = None
    _has_long_keys = True

    def _open(self, path: str, params: InferenceParams) -> None:
        graph = read_inference_graph(path)
        device = device_of([params.device_id, *params.deployed_devices])
        model = served_model(params, graph.widths, graph.names, graph.has_slots)
        tiers = tiers_of(params.volatile_db, params.persistent_db)
        self._server = open_server("CreateInferenceSession", tiers, [model])
        with as_hugectr_errors("CreateInferenceSession"):
            lookups, self._caches = lookups_of(self._server, model, device, cache_of(params))
        start_updates("CreateInferenceSession", self._server, params, [model])
        self._load_layers(graph, path, params, lookups, device)

    def _load_layers(
        self,
        graph: InferenceGraph,
        path: str,
        params: InferenceParams,
        lookups: Sequence[RowLookup],
        device: torch.device,
        executor: str = "auto",
    ) -> None:
        self.scorer = Scorer(
            graph,
            Path(path),
            params.dense_model_file,
            lookups,
            device,
            is_mixed=params.use_mixed_precision,
            statistics=params.non_trainable_params_file,
            executor=params.executor if executor == "auto" else executor,
        )
        self.max_batchsize, self._has_long_keys = params.max_batchsize, params.i64_input_key

    def _predict_request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
        names = ("dense_feature", "embeddingcolumns", "row_ptrs", "i64_input_key")
        values = dict(zip(names, args, strict=False)) | kwargs
        # Some releases say how wide keys are; here they are integers of any size.
        values.pop("i64_input_key", None)
        if set(values) != set(names[:3]) or len(args) > len(names):
            raise WrongInputError("predict", f"got {', '.join(values) or 'nothing'}, expected {', '.join(names[:3])}")
        batch = self.scorer.batch(**values)
        if batch.batch_size > self.max_batchsize:
            got = f"got {batch.batch_size} samples, expected at most max_batchsize={self.max_batchsize}"
            raise WrongInputError("predict", got, field="max_batchsize")
        scores: list[float] = self.scorer.score(batch).reshape(-1).tolist()
        return scores

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
        values: NDArray[np.float32] = tensors[tensor_name].float().cpu().numpy()
        return values

    def close(self) -> None:
        """Close the parameter server of the session, if it has one of its own."""
        if self._server is not None:
            self._server.close()

    def _scores(self, num_batches: int, files: DataReaderParams) -> NDArray[np.float32]:
        """Return the scores float32[n, L] of batches of files."""
        return np.concatenate([scores for _, scores in self._scored(num_batches, files)])

    def _auc(self, num_batches: int, files: DataReaderParams) -> float:
        # Batch by batch, so that labels and scores are the only parts of the data that stay in memory.
        metric = AUC()
        for batch, scores in self._scored(num_batches, files):
            with as_hugectr_errors("evaluate"):
                update_auc(metric, *self.scorer.of_labels(scores, batch.label))
        return float(metric.compute())

    @stream
    def _scored(self, num_batches: int, files: DataReaderParams) -> Generator[tuple[Batch, NDArray[np.float32]]]:
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
            # A caller may stop early: the threads that read ahead end with the stream.
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


class InferenceSession(ServedModel):
    """A model that scores requests and files.

    `CreateInferenceSession` opens it with a parameter server of its own; in releases 3.0 and 3.2 to 3.4, its own name
    opens it with caches that a script has made.
    """

    @bind_arguments("InferenceSession")
    def __init__(
        self,
        model_config_path: str,
        inference_params: InferenceParams | int,
        embedding_cache: EmbeddingCache,
        *,
        executor: str = "auto",
    ) -> None:
        if not isinstance(embedding_cache, LoadedEmbeddingCache):
            expected = "expected what CreateEmbeddingCache makes, or ParameterServer.get_embedding_cache"
            raise WrongInputError("InferenceSession", "embedding_cache", expected)
        self._caches = embedding_cache.caches
        if isinstance(inference_params, int):  # release 3.0, whose file has the rest
            self._load_inference_file(model_config_path, inference_params, embedding_cache, executor)
        else:
            graph, path = read_inference_graph(model_config_path), model_config_path
            lookups, device = embedding_cache.lookups, embedding_cache.device
            self._load_layers(graph, path, inference_params, lookups, device, executor)

    def _load_inference_file(self, path: str, device_id: int, cache: LoadedEmbeddingCache, executor: str) -> None:
        graph, clause = read_inference_graph(path), read_inference_clause(path)
        device = device_of([device_id])
        self.scorer = Scorer(
            graph,
            Path(path),
            clause.dense_model_file,
            cache.lookups,
            device,
            is_mixed=clause.has_mixed_precision,
            executor=executor,
        )
        self.max_batchsize, self._has_long_keys = clause.max_batchsize, clause.key_bytes == 8

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
        # Not `__init__`, which takes a cache.
        session = object.__new__(cls)
        session._open(os.fspath(model_config_path), inference_params)
        return session

    @overload
    def predict(
        self,
        dense_feature: Sequence[float],
        embeddingcolumns: Sequence[int],
        row_ptrs: Sequence[int],
        i64_input_key: bool = ...,
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
        num_samples: int = ...,
        data_source_params: DataSourceParams | None = ...,
    ) -> NDArray[np.float32]: ...
    def predict(self, *args: Any, **kwargs: Any) -> list[float] | NDArray[np.float32]:
        """Score a request, or batches of files.

        Of a request: ``(dense_feature, embeddingcolumns, row_ptrs)``, the dense numbers sample by sample, the keys
        table by table, and for each table where the keys of each bag begin. The scores of all samples are a list.

        Of files: ``(num_batches, source, data_reader_type, check_type, slot_size_array=[])``. The scores are
        float32[num_batches * max_batchsize], with a second dimension [L] for a model of L > 1 scores.

        Raises:
            WrongInputError: Arguments that do not fit each other, or more samples than `max_batchsize`.
            FileCannotOpenError: No such data.
            BrokenFileError: A damaged file.
        """
        is_of_files = _is_of_files(args, kwargs)
        return self._predict_files(*args, **kwargs) if is_of_files else self._predict_request(args, kwargs)

    @bind_arguments("InferenceSession.predict")
    def _predict_files(
        self,
        num_batches: int,
        source: str,
        data_reader_type: DataReaderType_t,
        check_type: Check_t,
        slot_size_array: Sequence[int] = (),
        num_samples: int = 0,
        data_source_params: DataSourceParams | None = None,
    ) -> NDArray[np.float32]:
        files = _files(source, data_reader_type, check_type, slot_size_array, data_source_params, num_samples)
        scores = self._scores(num_batches, files)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    @bind_arguments("InferenceSession.predict")
    def evaluate(
        self,
        num_batches: int,
        source: str,
        data_reader_type: DataReaderType_t,
        check_type: Check_t,
        slot_size_array: Sequence[int] = (),
        num_samples: int = 0,
        data_source_params: DataSourceParams | None = None,
    ) -> float:
        """Return the AUC of batches of files; arguments and errors are those of `predict` for files."""
        files = _files(source, data_reader_type, check_type, slot_size_array, data_source_params, num_samples)
        return self._auc(num_batches, files)


CreateInferenceSession = InferenceSession.of_graph


class InferenceModel(ServedModel):
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

    @overload
    def predict(
        self,
        dense_feature: Sequence[float],
        embeddingcolumns: Sequence[int],
        row_ptrs: Sequence[int],
        i64_input_key: bool = ...,
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
        """Score a request or batches of files, as a session does, but for the scores of files.

        They are float32[num_batches * max_batchsize, L] of any number L of scores.
        """
        is_of_files = _is_of_files(args, kwargs)
        return self._predict_files(*args, **kwargs) if is_of_files else self._predict_request(args, kwargs)

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
        return self._scores(
            num_batches, _files(source, data_reader_type, check_type, slot_size_array, data_source_params)
        )

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
        return self._auc(num_batches, _files(source, data_reader_type, check_type, slot_size_array, data_source_params))


def _is_of_files(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    # Requests and files share a name in HugeCTR; files begin with a number of batches, requests with a list.
    return isinstance(args[0] if args else kwargs.get("num_batches"), Integral)


def _files(
    source: str,
    kind: DataReaderType_t,
    check_type: Check_t,
    slot_sizes: Sequence[int],
    file_system: DataSourceParams | None,
    num_samples: int = 0,
) -> DataReaderParams:
    return DataReaderParams(
        data_reader_type=kind,
        source=[source],
        eval_source=source,
        check_type=check_type,
        slot_size_array=slot_sizes,
        num_samples=num_samples,
        eval_num_samples=num_samples,
        data_source_params=file_system or DataSourceParams(),
    )
