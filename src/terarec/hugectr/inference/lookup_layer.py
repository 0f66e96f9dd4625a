# SPDX-License-Identifier: Apache-2.0
"""`LookupLayer`, and its op for TorchScript and compiled graphs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.inference.hps import shared_hps
from terarec.hugectr.schema.table import bind_arguments

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
