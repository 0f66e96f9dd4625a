"""Models: one single-device file each."""

from terarec.models.build import build_model
from terarec.models.dlrm import DLRM
from terarec.models.graph import GraphModel
from terarec.models.wide_deep import WideDeep

__all__ = ["DLRM", "GraphModel", "WideDeep", "build_model"]
