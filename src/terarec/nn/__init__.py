# SPDX-License-Identifier: Apache-2.0
"""Dense layers, interactions and losses, one file a family, and `registry`, which makes them by name."""

from terarec.nn.dense import MLP
from terarec.nn.interaction import DotInteraction
from terarec.nn.layer import Layer, TensorShape
from terarec.nn.losses import Loss, Regularizer
from terarec.nn.registry import LAYERS, build_layer

__all__ = ["LAYERS", "MLP", "DotInteraction", "Layer", "Loss", "Regularizer", "TensorShape", "build_layer"]
