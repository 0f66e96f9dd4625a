"""`HPS`: lookups in the tables of a parameter server."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from terarec.hugectr.enums import DatabaseOverflowPolicy_t, DatabaseType_t, EmbeddingCacheType_t, UpdateSourceType_t
from terarec.hugectr.errors import WrongInputError, as_hugectr_errors
from terarec.hugectr.inference.parameter_server import device_of, start_server
from terarec.hugectr.json_files import JsonObject, read_json
from terarec.hugectr.objects import (
    InferenceParams,
    ParameterServerConfig,
    PersistentDatabaseParams,
    UpdateSourceParams,
    VolatileDatabaseParams,
)
from terarec.hugectr.schema.types import BOOL, Type, integer, member_name, one_of
from terarec.spec.checks import REQUIRED


class HPS:
    """The tables of several models, looked up by key.

    Args:
        ps_config: A `ParameterServerConfig`, or the path of a ``ps.json``.
        hps_json_config_file: The path, by HugeCTR's name.

    Raises:
        WrongInputError: A configuration that does not fit together.
        FileCannotOpenError: A file does not exist.
        BrokenFileError: A file is damaged.
    """

    def __init__(
        self,
        ps_config: ParameterServerConfig | str | os.PathLike[str] | None = None,
        *,
        hps_json_config_file: str | os.PathLike[str] | None = None,
    ) -> None:
        given = hps_json_config_file if ps_config is None else ps_config
        if isinstance(given, str | os.PathLike):
            given = read_parameter_server(os.fspath(given))
        if not isinstance(given, ParameterServerConfig):
            raise WrongInputError("HPS", f"got {given!r}, expected a ParameterServerConfig or the path of a ps.json")
        self.config = given
        self.server = start_server(given)

    def lookup(self, h_keys: ArrayLike, model_name: str, table_id: int, device_id: int = 0) -> NDArray[np.float32]:
        """Return the vectors of keys, one after the other.

        Args:
            h_keys: Integers of 8 or 4 bytes, [n].
            model_name: Name of the model.
            table_id: Number of the table.
            device_id: Device whose cache is searched.

        Returns:
            float32[n * D].

        Raises:
            WrongInputError: Anything but integers, or no such model or table.
        """
        # Lists and arrays of either width become int64, as the tables have their keys.
        keys = np.asarray(h_keys)
        if keys.dtype.kind not in "iu" or keys.ndim != 1:
            raise WrongInputError("lookup", "h_keys", f"got {keys.dtype}{list(keys.shape)}, expected integers [n]")
        rows = self._rows(torch.from_numpy(keys.astype(np.int64)), model_name, table_id, device_id)
        found: NDArray[np.float32] = rows.cpu().numpy().reshape(-1)
        return found

    def lookup_fromdlpack(
        self, keys: object, out_tensor: object, model_name: str, table_id: int, device_id: int = 0
    ) -> None:
        """Write the vectors of keys to a tensor of another library.

        Args:
            keys: Integers [n], as a DLPack capsule or an object with ``__dlpack__``.
            out_tensor: Floats of n * D elements, the same way.
            model_name: Name of the model.
            table_id: Number of the table.
            device_id: Device whose cache is searched.

        Raises:
            WrongInputError: Tensors of other types or sizes, or no such model or table.
        """
        wanted: Tensor = from_dlpack(keys)
        target: Tensor = from_dlpack(out_tensor)
        if wanted.is_floating_point() or wanted.dtype == torch.bool:
            raise WrongInputError("lookup_fromdlpack", "keys", f"got {wanted.dtype}, expected integers")
        rows = self._rows(wanted.reshape(-1).to(torch.int64), model_name, table_id, device_id)
        if target.dtype != torch.float32 or target.numel() != rows.numel() or not target.is_contiguous():
            got = f"{target.dtype}{list(target.shape)}"
            expected = f"torch.float32 of {rows.numel()} elements in one piece"
            raise WrongInputError("lookup_fromdlpack", "out_tensor", f"got {got}, expected {expected}")
        # Into the caller's memory, which DLPack shares: a script continues with its own tensor.
        target.copy_(rows.view(target.shape))

    def refresh_embedding_cache(self, model_name: str, device_id: int = 0) -> None:
        """Refresh the rows in the caches of a model."""
        with as_hugectr_errors("refresh_embedding_cache"):
            model = self.server.model(model_name)
            for table in model.tables if model.cache is not None else ():
                self.server.cache(model_name, table.name, device=device_of([device_id])).refresh()

    def _rows(self, keys: Tensor, model_name: str, table_id: int, device_id: int) -> Tensor:
        with as_hugectr_errors("lookup"):
            model = self.server.model(model_name)
            if not 0 <= table_id < len(model.tables):
                raise WrongInputError(
                    "lookup", "table_id", f"got {table_id}, expected 0 <= table_id < {len(model.tables)}"
                )
            name = model.tables[table_id].name
            if model.cache is None:
                # Without a cache the rows come from tiers, which are in host memory or behind it.
                return self.server.lookup(model_name, name, keys.cpu())
            return self.server.cache(model_name, name, device=device_of([device_id])).lookup(keys)


Database = TypeVar("Database", VolatileDatabaseParams, PersistentDatabaseParams)

_MODEL_KEYS: dict[str, tuple[str, Any]] = {
    "model": ("model_name", ""),
    "sparse_files": ("sparse_model_files", []),
    "dense_file": ("dense_model_file", ""),
    "network_file": ("network_file", ""),
    "num_of_worker_buffer_in_pool": ("number_of_worker_buffers_in_pool", 1),
    "num_of_refresher_buffer_in_pool": ("number_of_refresh_buffers_in_pool", 1),
    "deployed_device_list": ("deployed_devices", REQUIRED),
    "max_batch_size": ("max_batchsize", 64),
    "default_value_for_each_table": ("default_value_for_each_table", REQUIRED),
    "maxnum_des_feature_per_sample": ("maxnum_des_feature_per_sample", 26),
    "maxnum_catfeature_query_per_table_per_sample": ("maxnum_catfeature_query_per_table_per_sample", REQUIRED),
    "embedding_vecsize_per_table": ("embedding_vecsize_per_table", REQUIRED),
    "embedding_table_names": ("embedding_table_names", None),
    "refresh_delay": ("refresh_delay", 0.0),
    "refresh_interval": ("refresh_interval", 0.0),
    "hit_rate_threshold": ("hit_rate_threshold", 0.9),
    "gpucacheper": ("cache_size_percentage", 0.2),
    "gpucache": ("use_gpu_embedding_cache", True),
    "cache_refresh_percentage_per_iteration": ("cache_refresh_percentage_per_iteration", 0.0),
    "label_dim": ("label_dim", 1),
    "slot_num": ("slot_num", 10),
    "use_static_table": ("use_static_table", False),
    "use_context_stream": ("use_context_stream", True),
    "use_hctr_cache_implementation": ("use_hctr_cache_implementation", True),
    "init_ec": ("init_ec", True),
    "thread_pool_size": ("thread_pool_size", 16),
}
"""Key of a model -> parameter of `InferenceParams`, and the default where the key is missing."""

# Files of several releases spell these kinds in their own ways.
_DATABASES = {
    **{name.lower(): found for name, found in DatabaseType_t.__members__.items()},
    **dict.fromkeys(("hashmap", "hash", "map"), DatabaseType_t.hash_map),
    **dict.fromkeys(("parallel_hashmap",), DatabaseType_t.parallel_hash_map),
    "redis": DatabaseType_t.redis_cluster,
    "rocksdb": DatabaseType_t.rocks_db,
}
_CACHES = {name.lower(): found for name, found in EmbeddingCacheType_t.__members__.items()}


def read_parameter_server(path: str) -> ParameterServerConfig:
    """Return the configuration in the file `path`.

    Raises:
        FileCannotOpenError: No such file.
        BrokenFileError: No JSON.
        WrongInputError: An unknown or missing key, or a value that is not accepted; the message has its path.
    """
    data = read_json(path)
    is_long = data.take("supportlonglong", BOOL, True)
    fuses = data.take("fuse_embedding_table", BOOL, False)
    # All models of a file share its databases and its queue.
    databases: dict[str, Any] = {
        "volatile_db": _database(data, "volatile_db", VolatileDatabaseParams),
        "persistent_db": _database(data, "persistent_db", PersistentDatabaseParams),
        "update_source": _update_source(data),
    }
    models = [_model(one, is_long=is_long, fuses=fuses, databases=databases) for one in data.children("models")]
    data.finish()
    names = [model.model_name for model in models]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise WrongInputError(f"{data.where}.models", f"got {repeated[0]!r} twice, expected distinct names of models")
    return ParameterServerConfig(
        emb_table_name={model.model_name: model.embedding_table_names for model in models},
        embedding_vec_size={model.model_name: model.embedding_vecsize_per_table for model in models},
        max_feature_num_per_sample_per_emb_table={
            model.model_name: model.maxnum_catfeature_query_per_table_per_sample for model in models
        },
        inference_params_array=models,
        **databases,
    )


def _model(data: JsonObject, *, is_long: bool, fuses: bool, databases: dict[str, Any]) -> InferenceParams:
    given: dict[str, Any] = {"i64_input_key": is_long, "fuse_embedding_table": fuses, **databases}
    for key, (name, default) in _MODEL_KEYS.items():
        found = data.take(key, InferenceParams.parameter(name).type, default)
        if found is not None:
            given[name] = found
    kind = data.take("embedding_cache_type", one_of(*_CACHES), "dynamic")
    data.finish()
    tables = len(given["embedding_vecsize_per_table"])
    # As `served_model` names tables that have no name.
    given.setdefault("embedding_table_names", [f"sparse_embedding{number}" for number in range(tables)])
    for name in ("default_value_for_each_table", "embedding_table_names"):
        if len(given[name]) != tables:
            got = f"got {len(given[name])} values for {tables} tables"
            raise WrongInputError(f"{data.where}.{name}", f"{got}, expected one for each", field=name)
    files = given["sparse_model_files"]
    if len(files) not in (0, tables):
        got = f"got {len(files)} paths for {tables} tables"
        raise WrongInputError(
            f"{data.where}.sparse_files", f"{got}, expected one for each, or none", field="sparse_files"
        )
    given |= {"device_id": (given["deployed_devices"] or [0])[0], "embedding_cache_type": _CACHES[kind]}
    return data.make(InferenceParams, given)


def _database(data: JsonObject, key: str, cls: type[Database]) -> Database | None:
    if not data.has(key):
        return None
    clause, given = data.child(key), dict[str, Any]()
    for name in cls.names():
        kind = cls.parameter(name).type
        if name == "type":
            kind = one_of(*_DATABASES)
        elif name == "overflow_policy":
            kind = member_name(DatabaseOverflowPolicy_t)
        if clause.has(name):
            given[name] = clause.take(name, kind)
        else:
            clause.accept(name)
    # Older files bound reads and writes apart; one bound, the larger, serves both here.
    older = [clause.take(name, integer(1), None) for name in ("max_get_batch_size", "max_set_batch_size")]
    if any(older) and "max_batch_size" not in given:
        given["max_batch_size"] = max(filter(None, older))
    clause.finish()
    if "type" in given:
        given["type"] = _DATABASES[given["type"]]
    return clause.make(cls, given)


def _update_source(data: JsonObject) -> UpdateSourceParams | None:
    if not data.has("update_source"):
        return None
    clause, given = data.child("update_source"), dict[str, Any]()
    for name in UpdateSourceParams.names():
        kind: Type[Any] = member_name(UpdateSourceType_t) if name == "type" else UpdateSourceParams.parameter(name).type
        if clause.has(name):
            given[name] = clause.take(name, kind)
        else:
            clause.accept(name)
    clause.finish()
    return clause.make(UpdateSourceParams, given)
