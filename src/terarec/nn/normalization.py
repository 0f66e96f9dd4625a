# SPDX-License-Identifier: Apache-2.0
"""Normalization over the batch and over the last dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, layer_norm
from typing_extensions import override

from terarec.nn.batch_ranks import BatchRanks, Normalized, normalize
from terarec.nn.initializers import by_scheme, constant, scheme_option
from terarec.nn.layer import FileTensor, TensorShape, WeightedLayer, as_is, number


class BatchNorm1d(nn.BatchNorm1d):
    """torch's batch norm over [B, n], which takes batches of fewer than two rows in training, too.

    Such a batch has no variance. It is normalized by the running statistics, which it leaves as they are: the last
    batch of an epoch may have one row.

    Attributes:
        batch_ranks: The processes that have a part of each batch, whose statistics are those of all samples; None for
            this one alone.
    """

    batch_ranks: BatchRanks | None = None

    @classmethod
    def like(cls, norm: nn.BatchNorm1d) -> BatchNorm1d:
        """Return a norm with the options of another one, its mode, and the same parameters and buffers."""
        twin = cls(
            norm.num_features,
            eps=norm.eps,
            momentum=norm.momentum,
            affine=norm.affine,
            track_running_stats=norm.track_running_stats,
        )
        # The dicts themselves are shared, so that a later `to()` of one moves both.
        twin._parameters, twin._buffers = norm._parameters, norm._buffers
        return twin.train(norm.training)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalize the columns: float[B, n] -> float[B, n]."""
        if self.training and self.batch_ranks is not None:
            return self._over_ranks(input, self.batch_ranks)
        if self.training and input.shape[0] < 2:
            return batch_norm(
                input, self.running_mean, self.running_var, weight=self.weight, bias=self.bias, eps=self.eps
            )
        return super().forward(input)

    def _over_ranks(self, x: Tensor, ranks: BatchRanks) -> Tensor:
        normalized = normalize(ranks, "statistics of batch norm", x, eps=self.eps)
        values = normalized.values
        if normalized.num_samples < 2:
            # Weight and bias are applied below, as to the values of `normalize`.
            values = batch_norm(x, self.running_mean, self.running_var, eps=self.eps)
        elif self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None, "it is there where the running statistics are"
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            _move(self.running_mean, self.running_var, normalized, factor)
        return (values if self.weight is None else values * self.weight + self.bias).to(x.dtype)


def _move(mean: Tensor, var: Tensor, normalized: Normalized, factor: float) -> None:
    """Move running statistics by `factor` towards those of a batch, of the variance the unbiased one."""
    with torch.no_grad():
        mean.lerp_(normalized.mean.to(mean.dtype), factor)
        # Normalizing divides by n, running statistics hold the unbiased variance, as in torch.
        var.lerp_((normalized.var * (normalized.num_samples / (normalized.num_samples - 1))).to(var.dtype), factor)


class BatchNorm(WeightedLayer):
    """Columns normalized by the mean and variance of the batch (Ioffe and Szegedy 2015).

    Evaluation uses running statistics, `running_mean` and `running_var` (unbiased), which training moves by `factor`
    towards those of each batch. A batch of one row has no variance: it uses them, too, and leaves them as they are.
    """

    KIND = "batch_norm"
    OPTIONS = (
        number("factor", "weight of a batch in the running statistics", default=1.0, low=0.0),
        number("eps", "added to the variance", default=1e-5, low=0.0),
        scheme_option("gamma_init", "initial gamma: zero, or all others 1"),
        scheme_option("beta_init", "initial beta: 0 for every value"),
    )
    SHAPES = "[B, n] -> [B, n]"
    FORMULA = "y = gamma (x - mean) / sqrt(var + eps) + beta; running <- (1 - factor) running + factor batch"

    running_mean: Tensor
    running_var: Tensor
    batch_ranks: BatchRanks | None = None
    """The processes that have a part of each batch; None for this one alone."""

    def __init__(
        self,
        shapes: Sequence[TensorShape],
        *,
        factor: float,
        eps: float,
        gamma_init: str,
        beta_init: str,
        generator: torch.Generator,
    ) -> None:
        (shape,) = shapes
        self.require(len(shape.dims) == 1, shapes, "one input of two dimensions")
        super().__init__(shapes)
        self.factor = factor
        self.eps = eps
        self.gamma = nn.Parameter(torch.empty(shape.dims))
        self.beta = nn.Parameter(torch.empty(shape.dims))
        by_scheme(gamma_init, default=constant(1.0)).fill_(self.gamma, generator)
        by_scheme(beta_init, default=constant(0.0)).fill_(self.beta, generator)
        self.register_buffer("running_mean", torch.zeros(shape.dims))
        self.register_buffer("running_var", torch.ones(shape.dims))

    @override
    def file_tensors(self) -> list[FileTensor]:
        """Return the vectors gamma [n] and beta [n]."""
        return [FileTensor(self.gamma, as_is), FileTensor(self.beta, as_is)]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the columns: float[B, n] -> float[B, n]."""
        if self.training and self.batch_ranks is not None:
            normalized = normalize(self.batch_ranks, "statistics of batch norm", x, eps=self.eps)
            values = normalized.values
            if normalized.num_samples < 2:
                # Gamma and beta are applied below, as to the values of `normalize`.
                values = batch_norm(x, self.running_mean, self.running_var, eps=self.eps)
            else:
                _move(self.running_mean, self.running_var, normalized, self.factor)
            return (values * self.gamma + self.beta).to(x.dtype)
        return batch_norm(
            x,
            self.running_mean,
            self.running_var,
            weight=self.gamma,
            bias=self.beta,
            training=self.training and x.shape[0] > 1,
            momentum=self.factor,
            eps=self.eps,
        )


class LayerNorm(WeightedLayer):
    """Rows normalized by their own mean and variance (Ba et al. 2016)."""

    KIND = "layer_norm"
    OPTIONS = (
        number("eps", "added to the variance", default=1e-5, low=0.0),
        scheme_option("gamma_init", "initial gamma: zero, or all others 1"),
        scheme_option("beta_init", "initial beta: 0 for every value"),
    )
    SHAPES = "[B, ..., n] -> the same"
    FORMULA = "y = gamma (x - mean) / sqrt(var + eps) + beta over the last dimension"

    def __init__(
        self,
        shapes: Sequence[TensorShape],
        *,
        eps: float,
        gamma_init: str,
        beta_init: str,
        generator: torch.Generator,
    ) -> None:
        (shape,) = shapes
        self.require(len(shape.dims) >= 1, shapes, "at least two dimensions")
        super().__init__(shapes)
        self.eps = eps
        self.gamma = nn.Parameter(torch.empty(shape.dims[-1]))
        self.beta = nn.Parameter(torch.empty(shape.dims[-1]))
        by_scheme(gamma_init, default=constant(1.0)).fill_(self.gamma, generator)
        by_scheme(beta_init, default=constant(0.0)).fill_(self.beta, generator)

    @override
    def file_tensors(self) -> list[FileTensor]:
        """Return the vectors gamma [n] and beta [n]."""
        return [FileTensor(self.gamma, as_is), FileTensor(self.beta, as_is)]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the rows: float[B, ..., n] -> float[B, ..., n]."""
        return layer_norm(x, (x.shape[-1],), self.gamma, self.beta, self.eps)
