"""`EmbeddingBag`: `torch.nn.EmbeddingBag` on the engine's kernels."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from terarec.embedding.bags import bags_of, without_key
from terarec.embedding.drop_in import DropIn
from terarec.errors import ConfigError
from terarec.ops.layout import Pooling


class EmbeddingBag(DropIn, nn.EmbeddingBag):
    """Takes the place of `torch.nn.EmbeddingBag`: the same arguments, results, gradients and ``state_dict``.

    Three ways to train it:

    * with any `torch.optim` optimizer: ``weight.grad`` is a dense tensor;
    * with ``sparse=True``: ``weight.grad`` is a coalesced sparse tensor, each touched row in it once;
    * handed, alone or in a model, to `terarec.optim.RowOptimizer`: there is no ``.grad``; the touched rows move
      in place, once a step.

    Differences: every key is checked against the table, offsets must cover all keys, weights are float32, bfloat16 or
    float16, and gradients are not differentiable a second time.

    Args:
        num_embeddings: rows V.
        embedding_dim: width D.
        ...: as in `torch.nn.EmbeddingBag`.

    Example:
        >>> bag = terarec.EmbeddingBag(1_000_000, 64, mode="sum", sparse=True)
        >>> bag(torch.tensor([3, 14, 15]), torch.tensor([0, 2]))  # float32[2, 64]
    """

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:  # noqa: A002
        """The pooled vectors [B, D].

        Args:
            input: int32 or int64 keys: [N] with `offsets`, or [B, L].
            offsets: first key of each bag, [B], or [B + 1] with ``include_last_offset``.
            per_sample_weights: a factor of each key's vector, shaped as `input`; for mode "sum" alone.

        Raises:
            KeyOutOfRangeError: a key outside 0 <= key < V.
            ConfigError: arguments that do not fit each other.
        """
        if self._is_left_to_torch(input):
            return super().forward(input, offsets, per_sample_weights)
        if per_sample_weights is not None and self.mode != "sum":
            raise ConfigError(f"per_sample_weights: got some in mode {self.mode!r}, expected mode 'sum'")
        if self.scale_grad_by_freq and self.mode == "max":
            raise ConfigError("scale_grad_by_freq: got True in mode 'max', expected mode 'sum' or 'mean'")
        bags = bags_of(input, offsets, per_sample_weights, self.include_last_offset)
        if self.padding_idx is not None:
            bags = without_key(bags, self.padding_idx)
        return self._look_up(bags, cast(Pooling, self.mode))
