# SPDX-License-Identifier: Apache-2.0
"""Models: single-device code, one file a family; `registry` has a row for each."""

from terarec.models.dlrm import DLRM
from terarec.models.graph import GraphModel
from terarec.models.histories import DIN
from terarec.models.interactions import DCN, AutoInt
from terarec.models.registry import build_model
from terarec.models.two_tower import TowerVectors, TwoTower
from terarec.models.wide_deep import DNN, FM, LR, DeepFM, WideDeep, XDeepFM

__all__ = [
    "DCN",
    "DIN",
    "DLRM",
    "DNN",
    "FM",
    "LR",
    "AutoInt",
    "DeepFM",
    "GraphModel",
    "TowerVectors",
    "TwoTower",
    "WideDeep",
    "XDeepFM",
    "build_model",
]
