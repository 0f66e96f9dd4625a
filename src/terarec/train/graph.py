"""Training steps of a `GraphModel`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from terarec.batch import Batch, to_device
from terarec.errors import ConfigError
from terarec.models import GraphModel
from terarec.optim import RowOptimizer, build_dense_optimizer
from terarec.spec import DenseOptimizerSpec, RowOptions, SparseOptimizerSpec
from terarec.train.precision import Precision, autocast, warn_if_slow


class GraphTrainer:
    """Trains a graph: its layers through a dense optimizer, each embedding's rows through one of the row optimizers.

    The loop is the caller's: ``trainer.step(batch)`` for each batch, ``trainer.lr`` to follow a schedule. It trains
    where the model is: batches are taken there, and so are the states of the optimizers.

    Attributes:
        model: the graph.
        dense_optimizer: over the layers' weights; None if no layer has any.
        row_optimizers: embedding -> what moves its rows.
        tensors: of the last step, as `GraphModel.forward` gave them.

    Args:
        model: the graph, on the device where it stays.
        dense: the layers' update rule.
        rows: update rules of tables by the names that the graph's embeddings give as their ``optimizer``; one mapping
            entry "default" is enough for a graph that gives no names.
        precision: of the layers' matrix products.
        loss_scale: what the loss is multiplied by before the backward pass; the gradients are divided by it.

    Raises:
        ConfigError: an embedding whose optimizer is not there.
    """

    def __init__(
        self,
        model: GraphModel,
        dense: DenseOptimizerSpec,
        rows: Mapping[str, SparseOptimizerSpec],
        *,
        precision: Precision = "fp32",
        loss_scale: float = 1.0,
    ) -> None:
        warn_if_slow(precision, model.device)
        self.model = model
        self._precision, self._loss_scale = precision, loss_scale
        self._weights = list(model.layers.parameters())
        self.dense_optimizer = build_dense_optimizer(dense, self._weights) if self._weights else None
        self.row_optimizers: dict[str, RowOptimizer] = {}
        for embedding in model.spec.embeddings:
            if embedding.optimizer not in rows:
                raise ConfigError(
                    f"embedding {embedding.name!r}: got optimizer {embedding.optimizer!r}, expected one of "
                    f"{', '.join(rows) or 'none'}"
                )
            rule = _scaled(rows[embedding.optimizer], loss_scale)
            self.row_optimizers[embedding.name] = RowOptimizer(model.collection(embedding.name), rule)
        self.tensors: dict[str, Tensor] = {}
        self._lr = dense.lr
        self._frozen: frozenset[str] = frozenset()
        self._is_dense_frozen = False

    @property
    def lr(self) -> float:
        """The learning rate of all optimizers; setting it gives all the same."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr = value
        for optimizer in self.row_optimizers.values():
            optimizer.lr = value
        if self.dense_optimizer is not None:
            for group in self.dense_optimizer.param_groups:
                group["lr"] = value

    def freeze(self, *, dense: bool, embeddings: Collection[str]) -> None:
        """From now on leave alone the weights and optimizer state of the layers and of `embeddings`, and of no others.

        Args:
            dense: whether the layers are frozen.
            embeddings: names of the frozen ones.

        Raises:
            ConfigError: an embedding that is not there.
        """
        for name in embeddings:
            self.model.collection(name)
        self._is_dense_frozen, self._frozen = dense, frozenset(embeddings)

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward, and the update of what is not frozen.

        Returns:
            The loss of `batch` before the update, a scalar without gradient.

        Raises:
            StorageError: memory or a dynamic table is full; nothing was updated.
        """
        self.tensors = {}  # frees the last step's before this one's are made
        self.model.train()
        if self.dense_optimizer is not None:
            self.dense_optimizer.zero_grad()
        with autocast(self._precision, self.model.device):
            tensors = self.model(to_device(batch, self.model.device))
            loss: Tensor = self.model.total_loss(tensors)
        (loss if self._loss_scale == 1.0 else loss * self._loss_scale).backward()  # type: ignore[no-untyped-call]
        for name, optimizer in self.row_optimizers.items():
            if name in self._frozen:
                optimizer.zero_grad()
            else:
                optimizer.step()
        if self.dense_optimizer is not None and not self._is_dense_frozen:
            self._unscale()
            self.dense_optimizer.step()
        self.tensors = tensors
        return loss.detach()

    def evaluate(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and tensors of `batch` in evaluation mode: dynamic tables stay as they are."""
        self.model.eval()
        with torch.no_grad(), autocast(self._precision, self.model.device):
            tensors = self.model(to_device(batch, self.model.device))
            return self.model.total_loss(tensors), tensors

    def _unscale(self) -> None:
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        if self._loss_scale != 1.0 and gradients:
            torch._foreach_div_(gradients, self._loss_scale)


def _scaled(spec: SparseOptimizerSpec, loss_scale: float) -> SparseOptimizerSpec:
    """`spec` for gradients of a loss that was multiplied by `loss_scale`."""
    if loss_scale == 1.0:
        return spec
    options = RowOptions() if spec.rows is None else spec.rows
    return replace(spec, rows=replace(options, loss_scale=options.loss_scale * loss_scale))
