"""Dense layers, interactions and losses: one file each, and `registry`, which makes them by name."""

from terarec.nn.dot_interaction import DotInteraction
from terarec.nn.layer import Layer, TensorShape, WeightedLayer
from terarec.nn.losses import Loss, logistic_loss
from terarec.nn.mlp import MLP
from terarec.nn.registry import LAYERS, LayerKind, build_layer
from terarec.nn.regularizer import Regularizer

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
