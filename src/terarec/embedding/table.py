"""`Embedding`: `torch.nn.Embedding` on the engine's kernels."""

from __future__ import annotations

from torch import Tensor, nn

from terarec.embedding.bags import single_keys
from terarec.embedding.drop_in import DropIn


class Embedding(DropIn, nn.Embedding):
    """Takes the place of `torch.nn.Embedding`: the same arguments, results, gradients and ``state_dict``.

    It is trained in the three ways of `EmbeddingBag`, and differs from torch's module as that one does.

    Args:
        num_embeddings: rows V.
        embedding_dim: width D.
        ...: as in `torch.nn.Embedding`.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """The vectors [*, D] of the keys ``input`` [*], int32 or int64.

        Raises:
            KeyOutOfRangeError: a key outside 0 <= key < V.
        """
        if self._is_left_to_torch(input):
            return super().forward(input)
        vectors = self._look_up(single_keys(input), "sum", self.padding_idx)
        return vectors.reshape(*input.shape, self.weight.shape[1])
