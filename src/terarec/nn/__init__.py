"""Dense layers, interactions and losses, one file a family, and `registry`, which makes them by name."""

from terarec.nn.dense import MLP
from terarec.nn.interaction import DotInteraction
from terarec.nn.layer import Layer, TensorShape, WeightedLayer
from terarec.nn.losses import Loss, Regularizer, logistic_loss
from terarec.nn.registry import LAYERS, LayerKind, build_layer

__all__ = [
    "LAYERS",
    "MLP",
    "DotInteraction",
    "Layer",
    "LayerKind",
    "Loss",
    "Regularizer",
    "TensorShape",
    "WeightedLayer",
    "build_layer",
    "logistic_loss",
]
