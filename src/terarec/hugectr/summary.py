"""The table that `Model.summary` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terarec.hugectr.embedding_collection import EmbeddingCollectionConfig
from terarec.hugectr.tables.sparse_embedding import SparseEmbedding
from terarec.models.graph import tensor_shapes
from terarec.nn.layer import TensorShape
from terarec.spec import GraphSpec

_WIDTHS = (40, 30, 30)
_LINE = "-" * 118


def summary_lines(spec: GraphSpec, parts: Sequence[Any]) -> list[str]:
    """The lines: labels, dense and sparse inputs, then a row for each embedding and layer.

    Args:
        spec: the model's graph.
        parts: what was added to it, the `Input` first.

    Raises:
        ConfigError: shapes or options of layers that do not fit.
    """
    shapes_of, inputs = tensor_shapes(spec), parts[0]
    sparse = ",".join(slots.top_name for slots in inputs.data_reader_sparse_param_array)
    lines = [
        "Model Summary".center(len(_LINE), "="),
        _row("Label", "Dense", "Sparse", ""),
        _row(",".join(label.name for label in spec.labels), inputs.dense_name, sparse, ""),
        _row(",".join(f"(None, {label.dim})" for label in spec.labels), f"(None, {inputs.dense_dim})", "", ""),
        _LINE,
        _row("Layer Type", "Input Name", "Output Name", "Output Shape"),
        _LINE,
    ]
    for kind, bottoms, tops in map(_columns, parts[1:]):
        shapes = [_shown(shapes_of.get(top)) for top in tops]
        for index in range(max(len(bottoms), len(tops))):
            bottom, top, shape = (_at(column, index) for column in (bottoms, tops, shapes))
            lines.append(_row("" if index else kind, bottom, top, shape))
    return [*lines, _LINE]


def _columns(part: Any) -> tuple[str, list[str], list[str]]:
    """Type, inputs and outputs of an embedding or layer, as the script spells them."""
    if isinstance(part, SparseEmbedding):
        return part.embedding_type.name, [part.bottom_name], [part.sparse_embedding_name]
    if isinstance(part, EmbeddingCollectionConfig):
        tops = [part.concatenated_name] if part.concatenated_name else [lookup.top_name for lookup in part.lookups]
        return "EmbeddingCollection", [lookup.bottom_name for lookup in part.lookups], tops
    return part.layer_type.name, list(part.bottom_names), list(part.top_names)


def _row(*cells: str) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=False)]
    return "".join([*padded, cells[-1]]).rstrip()


def _at(column: Sequence[str], index: int) -> str:
    return column[index] if index < len(column) else ""


def _shown(shape: TensorShape | None) -> str:
    """A shape; rows that a sample has several of are folded into the batch."""
    return "" if shape is None else f"({', '.join(['None', *map(str, shape.dims)])})"
