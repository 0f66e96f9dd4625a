"""`HPS`: lookups in the tables of a parameter server."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from terarec.hugectr.errors import WrongInputError, as_hugectr_errors
from terarec.hugectr.objects import ParameterServerConfig
from terarec.hugectr.parameter_server import device_of, start_server
from terarec.hugectr.ps_json import read_parameter_server


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

    def lookup(self, h_keys: Any, model_name: str, table_id: int, device_id: int = 0) -> NDArray[np.float32]:
        """Return the vectors of keys, one after the other.

        Args:
            h_keys: Integers of 8 or 4 bytes, [n].
            model_name: Name of the model.
            table_id: Number of the table.
            device_id: The device whose cache is asked.

        Returns:
            float32[n * D].

        Raises:
            WrongInputError: Anything but integers, or no such model or table.
        """
        keys = np.asarray(h_keys)
        if keys.dtype.kind not in "iu" or keys.ndim != 1:
            raise WrongInputError("lookup", "h_keys", f"got {keys.dtype}{list(keys.shape)}, expected integers [n]")
        rows = self._rows(torch.from_numpy(keys.astype(np.int64)), model_name, table_id, device_id)
        found: NDArray[np.float32] = rows.cpu().numpy().reshape(-1)
        return found

    def lookup_fromdlpack(self, keys: Any, out_tensor: Any, model_name: str, table_id: int, device_id: int = 0) -> None:
        """Write the vectors of keys to a tensor of another library.

        Args:
            keys: Integers [n], as a DLPack capsule or an object with ``__dlpack__``.
            out_tensor: Floats of n * D elements, the same way.
            model_name: Name of the model.
            table_id: Number of the table.
            device_id: The device whose cache is asked.

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
        target.copy_(rows.view(target.shape))

    def refresh_embedding_cache(self, model_name: str, device_id: int = 0) -> None:
        """Read the rows in the caches of a model again."""
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
                return self.server.lookup(model_name, name, keys.cpu())
            return self.server.cache(model_name, name, device=device_of([device_id])).lookup(keys)
