# SPDX-License-Identifier: Apache-2.0
"""The fields that the specs of models share: embeddings, and hidden layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from terarec.spec import checks
from terarec.spec.tables import Initializer, StaticTablesSpec, TablesSpec

Activation = Literal["relu", "gelu", "silu", "tanh", "sigmoid", "prelu", "dice"]
DenseInit = Literal["default", "xavier_normal", "xavier_uniform", "kaiming_uniform", "normal"]
ColumnPooling = Literal["sum", "mean"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedSpec(checks.Checked):
    """Base of the specs of models with embeddings.

    Attributes:
        width: Length D of every embedding vector.
        pooling: Reduction of the vectors of a list column to one; an empty list gives zeros.
        tables: Static, as large as the data set says, or dynamic; and the initial weights of their rows.
    """

    width: checks.Width = 16
    pooling: ColumnPooling = "sum"
    tables: TablesSpec = field(default_factory=StaticTablesSpec)


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSpec(EmbeddedSpec):
    """Base of the specs of models with dense layers. A hidden layer is: linear, batch norm, activation, dropout.

    Attributes:
        activation: Activation after each hidden layer.
        batch_norm: Whether hidden layers are normalized over the batch (Ioffe and Szegedy 2015).
        dropout: Probability of zeroing a hidden unit in training.
        init: Initial weights of the dense layers. "default": Xavier-normal with normal biases of variance 1 / out, as
            in DLRM's code; "xavier_normal" and "xavier_uniform" with zero biases; "kaiming_uniform": torch's own,
            uniform within 1 / sqrt(in); "normal": standard deviation 0.01, with zero biases.
    """

    activation: Activation = "relu"
    batch_norm: bool = False
    dropout: checks.Dropout = 0.0
    init: DenseInit = "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class WideNetworkSpec(NetworkSpec):
    """Base of the specs of models with linear terms and one MLP.

    Attributes:
        hidden: Widths of the hidden layers.
        wide_initializer: Initial weights of the keys in the linear terms; None for those of `tables`.
    """

    hidden: checks.Widths = (256, 128)
    wide_initializer: Initializer | None = "zeros"
