"""Dense layers, interactions and losses: one file each."""

from terarec.nn.dot_interaction import DotInteraction
from terarec.nn.losses import logistic_loss
from terarec.nn.mlp import MLP

__all__ = ["MLP", "DotInteraction", "logistic_loss"]
