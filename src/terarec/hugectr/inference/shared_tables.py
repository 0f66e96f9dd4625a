# SPDX-License-Identifier: Apache-2.0
"""Parameter servers and caches that scripts make before their sessions, in releases 3.0 and 3.2 to 3.4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from typing_extensions import override

from terarec.hugectr.errors import WrongInputError, as_hugectr_errors
from terarec.hugectr.inference.graph import read_inference_clause, read_inference_graph
from terarec.hugectr.inference.parameter_server import (
    cache_of,
    device_of,
    lookups_of,
    open_server,
    served_model,
    start_updates,
    tiers_of,
)
from terarec.hugectr.objects import EmbeddingCache, InferenceParams, ParameterServer
from terarec.hugectr.schema.table import bind_arguments
from terarec.spec import CacheSpec
from terarec.spec.parameter_server import TierSpec


class LoadedParameterServer(ParameterServer):
    """The tables of models: `inference.ParameterServer` of releases 3.2 to 3.4.

    Raises:
        WrongInputError: Files, tables or databases that do not fit together.
        FileCannotOpenError: A file does not exist.
        BrokenFileError: A file is damaged.
    """

    @bind_arguments("ParameterServer")
    def __init__(
        self, framework_name: str, model_config_path: list[str], inference_params_array: list[InferenceParams]
    ) -> None:
        if len(model_config_path) != len(inference_params_array) or not model_config_path:
            got = f"got {len(inference_params_array)} models for {len(model_config_path)} files"
            raise WrongInputError("ParameterServer", "inference_params_array", f"{got}, expected one for each")
        # All models share the databases of the first.
        first = inference_params_array[0]
        self._open(model_config_path, inference_params_array, tiers_of(first.volatile_db, first.persistent_db))

    @classmethod
    @bind_arguments("CreateParameterServer")
    def of_files(cls, model_config_path: list[str], model_name: list[str], i64_input_key: bool) -> Self:
        """Return the tables of the models in inference files of release 3.0, in memory: `CreateParameterServer`.

        Args:
            model_config_path: Inference file of each model.
            model_name: Name of each model.
            i64_input_key: Whether keys in files have 8 bytes.

        Raises:
            WrongInputError: Files or tables that do not fit together.
            FileCannotOpenError: A file does not exist.
            BrokenFileError: A file is damaged.
        """
        if len(model_config_path) != len(model_name):
            got = f"got {len(model_name)} names for {len(model_config_path)} files"
            raise WrongInputError("CreateParameterServer", "model_name", f"{got}, expected one for each")
        models = []
        for path, name in zip(model_config_path, model_name, strict=True):
            clause = read_inference_clause(path)
            models.append(
                InferenceParams(
                    model_name=name,
                    max_batchsize=clause.max_batchsize,
                    hit_rate_threshold=1.0,
                    dense_model_file="",
                    sparse_model_files=list(clause.sparse_model_files),
                    device_id=0,
                    use_gpu_embedding_cache=False,  # its caches are made apart
                    cache_size_percentage=0.0,
                    i64_input_key=i64_input_key,
                )
            )
        server = object.__new__(cls)
        server._open(model_config_path, models, tiers_of(None, None))
        return server

    def _open(self, paths: Sequence[str], models: Sequence[InferenceParams], tiers: tuple[TierSpec, ...]) -> None:
        self._params = {params.model_name: params for params in models}
        served = []
        for path, params in zip(paths, models, strict=True):
            graph = read_inference_graph(path)
            served.append(served_model(params, graph.widths, graph.names, graph.has_slots))
        self.server = open_server("ParameterServer", tiers, served)
        start_updates("ParameterServer", self.server, models[0], served)

    @bind_arguments("ParameterServer.get_embedding_cache")
    def get_embedding_cache(self, model_name: str, device_id: int) -> LoadedEmbeddingCache:
        """Return the caches of a model's tables on a device.

        Args:
            model_name: Name of the model.
            device_id: Number of the GPU; the CPU if there is no such GPU.

        Raises:
            WrongInputError: No such model.
        """
        params = self._params_of("get_embedding_cache", model_name)
        return LoadedEmbeddingCache.of_model(self, model_name, device_id, cache_of(params))

    @bind_arguments("ParameterServer.get_embedding_cache")
    def refresh_embedding_cache(self, model_name: str, device_id: int) -> None:
        """Refresh the rows in the caches of a model; arguments and errors are those of `get_embedding_cache`."""
        spec = cache_of(self._params_of("refresh_embedding_cache", model_name))
        for table in self.server.model(model_name).tables if spec is not None else ():
            self.server.cache(model_name, table.name, device=device_of([device_id]), spec=spec).refresh()

    @override
    def close(self) -> None:
        self.server.close()

    def _params_of(self, call: str, model_name: str) -> InferenceParams:
        if model_name not in self._params:
            raise WrongInputError(call, "model_name", f"got {model_name!r}, expected one of {', '.join(self._params)}")
        return self._params[model_name]


CreateParameterServer = LoadedParameterServer.of_files


class LoadedEmbeddingCache(EmbeddingCache):
    """The caches of a model's tables: `CreateEmbeddingCache` of release 3.0.

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
        spec = None
        if use_gpu_embedding_cache and cache_size_percentage:
            # Any threshold is accepted; above 1 no share of keys reaches it, which 1 says as well.
            threshold = min(1.0, read_inference_clause(model_config_path).hit_rate_threshold)
            spec = CacheSpec(share=min(1.0, cache_size_percentage), hit_rate_threshold=threshold)
        self._open(parameter_server, model_name, cuda_dev_id, spec)

    @classmethod
    def of_model(
        cls, server: LoadedParameterServer, model_name: str, device_id: int, spec: CacheSpec | None
    ) -> LoadedEmbeddingCache:
        """Return the caches of a model's tables; None as `spec` for no caches."""
        cache = object.__new__(cls)
        cache._open(server, model_name, device_id, spec)
        return cache

    def _open(self, server: LoadedParameterServer, model_name: str, device_id: int, spec: CacheSpec | None) -> None:
        self.device = device_of([device_id])
        with as_hugectr_errors("CreateEmbeddingCache"):
            model = server.server.model(model_name)
            self.lookups, self.caches = lookups_of(server.server, model, self.device, spec)

    @override
    def close(self) -> None:
        for cache in self.caches:
            cache.close()
