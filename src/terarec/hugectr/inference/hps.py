# SPDX-License-Identifier: Apache-2.0
"""Lookups in the tables of a parameter server: `HPS`, and `LookupLayer` with its op for compiled graphs."""

from __future__ import annotations

import os
import threading
from typing import overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from terarec.hugectr.errors import WrongInputError, as_hugectr_errors
from terarec.hugectr.inference.arguments import borrowed, int64_array
from terarec.hugectr.inference.parameter_server import device_of, start_server
from terarec.hugectr.inference.server_file import read_parameter_server
from terarec.hugectr.objects import ParameterServerConfig
from terarec.hugectr.schema.table import bind_arguments


class HPS:
    """The tables of several models, looked up by key.

    Args:
        ps_config: A `ParameterServerConfig`, or the path of a ``ps.json``.

    Raises:
        WrongInputError: A configuration that does not fit together.
        FileCannotOpenError: A file does not exist.
        BrokenFileError: A file is damaged.
    """

    @overload
    def __init__(self, ps_config: ParameterServerConfig | str | os.PathLike[str]) -> None: ...
    @overload
    def __init__(self, *, hps_json_config_file: str | os.PathLike[str]) -> None: ...
    # Older names of parameters are known to `bind_arguments` alone.
    @bind_arguments("HPS")  # type: ignore[misc]
    def __init__(self, ps_config: ParameterServerConfig | str | os.PathLike[str]) -> None:
        if isinstance(ps_config, ParameterServerConfig):
            self.config = ps_config
        else:
            self.config = read_parameter_server(os.fspath(ps_config))
        self.server = start_server(self.config)

    @bind_arguments("HPS.lookup")
    def lookup(self, h_keys: ArrayLike, model_name: str, table_id: int, device_id: int = 0) -> NDArray[np.float32]:
        """Return the vectors of keys.

        Args:
            h_keys: Integers, [n]; floats that hold integers, too.
            model_name: Name of the model.
            table_id: Number of the table.
            device_id: Device whose cache is searched.

        Returns:
            float32[n, D].

        Raises:
            WrongInputError: Anything but integers, or no such model or table.
        """
        keys = int64_array("lookup", "h_keys", h_keys)
        if keys.ndim != 1:
            problem = f"got {keys.ndim} dimensions, expected integers [n]"
            raise WrongInputError("lookup", "h_keys", problem, field="h_keys")
        rows = self.rows(torch.from_numpy(keys), model_name, table_id, device_id)
        vectors: NDArray[np.float32] = rows.cpu().numpy()
        return vectors

    @overload
    def lookup_fromdlpack(
        self, keys: object, out_tensor: object, model_name: str, table_id: int, device_id: int = 0
    ) -> None: ...
    @overload
    def lookup_fromdlpack(
        self, *, h_keys: object, out_tensor: object, model_name: str, table_id: int, device_id: int = 0
    ) -> None: ...
    @bind_arguments("HPS.lookup_fromdlpack")  # type: ignore[misc]
    def lookup_fromdlpack(
        self, keys: object, out_tensor: object, model_name: str, table_id: int, device_id: int = 0
    ) -> None:
        """Write the vectors of keys to a tensor of another library.

        Args:
            keys: Integers of n elements, as a DLPack capsule, which stays usable, or an object with ``__dlpack__``.
            out_tensor: Floats of n * D elements or more in one piece, the same way.
            model_name: Name of the model.
            table_id: Number of the table.
            device_id: Device whose cache is searched.

        Raises:
            WrongInputError: Tensors of other types or sizes, or no such model or table.
        """
        wanted, target = borrowed("keys", keys), borrowed("out_tensor", out_tensor)
        if wanted.is_floating_point() or wanted.dtype == torch.bool:
            raise WrongInputError("lookup_fromdlpack", "keys", f"got {wanted.dtype}, expected integers", field="keys")
        rows = self.rows(wanted.reshape(-1).to(torch.int64), model_name, table_id, device_id).reshape(-1)
        if target.dtype != torch.float32 or target.numel() < rows.numel() or not target.is_contiguous():
            got = f"got {target.dtype}{list(target.shape)}"
            expected = f"expected torch.float32 of at least {rows.numel()} elements in one piece"
            raise WrongInputError("lookup_fromdlpack", "out_tensor", f"{got}, {expected}", field="out_tensor")
        # Into the caller's memory, which DLPack shares: a script continues with its own tensor.
        target.reshape(-1)[: rows.numel()].copy_(rows)

    def refresh_embedding_cache(self, model_name: str, device_id: int = 0) -> None:
        """Refresh the rows in the caches of a model."""
        with as_hugectr_errors("refresh_embedding_cache"):
            model = self.server.model(model_name)
            for table in model.tables if model.cache is not None else ():
                self.server.cache(model_name, table.name, device=device_of([device_id])).refresh()

    def rows(self, keys: Tensor, model_name: str, table_id: int, device_id: int = 0) -> Tensor:
        """Return the vectors float32[n, D] of keys int64[n], where the cache is; errors are those of `lookup`."""
        with as_hugectr_errors("lookup"):
            model = self.server.model(model_name)
            if not 0 <= table_id < len(model.tables):
                problem = f"got {table_id}, expected 0 <= table_id < {len(model.tables)}"
                raise WrongInputError("lookup", "table_id", problem, field="table_id")
            name = model.tables[table_id].name
            if model.cache is None:
                # Without a cache the rows come from tiers, which are in host memory or behind it.
                return self.server.lookup(model_name, name, keys.cpu())
            return self.server.cache(model_name, name, device=device_of([device_id])).lookup(keys)


_shared: dict[str, HPS] = {}
_lock = threading.Lock()


def shared_hps(path: str) -> HPS:
    """Return the parameter server that all layers of this process with the file `path` share, loaded by the first."""
    path = os.path.abspath(path)
    with _lock:  # layers may run in threads, as TorchScript's `fork` runs them
        if path not in _shared:
            _shared[path] = HPS(path)
        return _shared[path]


_OWNER = "hps_torch.LookupLayer"


class LookupLayer(nn.Module):
    """A module that looks keys up in a table of a parameter server, without gradients.

    All layers of a process that name the same file share its parameter server, which the first lookup loads. The
    module can be scripted, compiled and exported; a program has the op ``hps_torch::hps_embedding_lookup``.

    Args:
        ps_config_file: Path of the ``ps.json``.
        model_name: Name of the model.
        table_id: Number of the table.
        emb_vec_size: Width D of the table.
    """

    @bind_arguments("hps_torch.LookupLayer")
    def __init__(self, ps_config_file: str, model_name: str, table_id: int, emb_vec_size: int) -> None:
        super().__init__()
        self.ps_config_file = ps_config_file
        self.model_name = model_name
        self.table_id = table_id
        self.emb_vec_size = emb_vec_size

    def forward(self, keys: Tensor) -> Tensor:
        """Return the vectors float32[..., D] of keys, integers [...], on their device.

        Raises:
            WrongInputError: Other keys than integers, another width, or no such model or table.
        """
        # By its name, which TorchScript resolves.
        return torch.ops.hps_torch.hps_embedding_lookup(  # type: ignore[no-any-return]
            keys, self.ps_config_file, self.model_name, self.table_id, self.emb_vec_size
        )


def _lookup(keys: Tensor, ps_config_file: str, model_name: str, table_id: int, emb_vec_size: int) -> Tensor:
    if keys.dtype not in (torch.int32, torch.int64):
        raise WrongInputError(_OWNER, "keys", f"got {keys.dtype}, expected torch.int32 or torch.int64", field="keys")
    rows = shared_hps(ps_config_file).rows(
        keys.reshape(-1).to(torch.int64), model_name, table_id, keys.device.index or 0
    )
    if rows.shape[1] != emb_vec_size:
        problem = f"got {emb_vec_size}, expected {rows.shape[1]}, the width of table {table_id} of {model_name!r}"
        raise WrongInputError(_OWNER, "emb_vec_size", problem, field="emb_vec_size")
    return rows.to(keys.device).reshape(*keys.shape, emb_vec_size)


_lookup_op = torch.library.custom_op("hps_torch::hps_embedding_lookup", mutates_args=())(_lookup)


@_lookup_op.register_fake
def _lookup_fake(keys: Tensor, ps_config_file: str, model_name: str, table_id: int, emb_vec_size: int) -> Tensor:
    return keys.new_empty((*keys.shape, emb_vec_size), dtype=torch.float32)
