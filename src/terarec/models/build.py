"""A model from its spec."""

from __future__ import annotations

from torch import nn

from terarec.models.dlrm import DLRM
from terarec.models.wide_deep import WideDeep
from terarec.spec import DatasetSpec, DLRMSpec, ModelSpec


def build_model(spec: ModelSpec, dataset: DatasetSpec, *, seed: int = 0) -> nn.Module:
    """The model that `spec` describes, with tables as large as `dataset` needs."""
    if isinstance(spec, DLRMSpec):
        return DLRM(spec, dataset, seed=seed)
    return WideDeep(spec, dataset, seed=seed)
