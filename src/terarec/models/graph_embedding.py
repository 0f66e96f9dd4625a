"""An embedding of a graph: its tables, and its tensors in the forms that layers read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from terarec.batch import Jagged, select
from terarec.embedding import EmbeddingCollection, EmbeddingOutput, pad_sequences
from terarec.errors import ConfigError
from terarec.nn.layer import TensorShape
from terarec.spec import FeatureSpec, GraphEmbedding
from terarec.spec.tables import DEFAULT_OPTIMIZER


class Embeddings(nn.ModuleDict):
    """Embeddings by name; a name may also be that of a method, such as "keys", which a plain ModuleDict refuses.

    Raises:
        ConfigError: a name under which every module keeps something of its own, such as "training".
    """

    def __setitem__(self, key: str, module: nn.Module) -> None:
        if key in self.__dict__:
            raise ConfigError(f"embedding name: got {key!r}, expected another, which no torch.nn.Module uses itself")
        self._modules[key] = module  # `add_module` would look for attributes of that name


def build_collection(spec: GraphEmbedding, *, seed: int) -> EmbeddingCollection:
    """Build the tables of `spec`, each with the name of its rule, and the features that read them."""
    features = [
        FeatureSpec(
            name=feature.name,
            table=feature.table,
            pooling="none" if feature.pooling == "concat" else feature.pooling,
            max_keys=feature.max_keys,
        )
        for feature in spec.features
    ]
    tables = [
        dataclasses.replace(table, optimizer=spec.optimizer) if table.optimizer == DEFAULT_OPTIMIZER else table
        for table in spec.tables
    ]
    return EmbeddingCollection(tables, features, seed=seed)


def embedding_shapes(spec: GraphEmbedding) -> dict[str, TensorShape]:
    """Shape of each top of `spec`."""
    widths = [spec.width_of(feature) for feature in spec.features]
    if spec.output == "apart":
        return {top: TensorShape(1, (1, width)) for top, width in zip(spec.tops, widths, strict=True)}
    dims = (len(widths), widths[0]) if spec.output == "stacked" else (sum(widths),)
    return {spec.name: TensorShape(1, dims)}


def embed(spec: GraphEmbedding, collection: EmbeddingCollection, jagged: Jagged) -> dict[str, Tensor]:
    """The tops of `spec` for the keys of a batch."""
    batch_size = jagged.batch_size
    vectors = _side_by_side(spec, collection(_renamed(jagged, spec)), batch_size)
    if spec.output == "flat":
        return {spec.name: vectors}
    if spec.output == "stacked":
        return {spec.name: vectors.view(batch_size, len(spec.features), -1)}
    widths = [spec.width_of(feature) for feature in spec.features]
    parts = torch.split(vectors, widths, dim=1)
    return {top: part.unsqueeze(1) for top, part in zip(spec.tops, parts, strict=True)}


def _renamed(jagged: Jagged, spec: GraphEmbedding) -> Jagged:
    """The bags under the features' own names, where these differ from those of the batch's columns."""
    if all(feature.column is None for feature in spec.features):
        return jagged
    part = select(jagged, [feature.read_column for feature in spec.features])
    return dataclasses.replace(part, names=tuple(feature.name for feature in spec.features))


def _side_by_side(spec: GraphEmbedding, output: EmbeddingOutput, batch_size: int) -> Tensor:
    """[B, sum of widths] in the order of the features."""
    if not output.sequences:
        return output.pooled
    pooled = _pooled_columns(spec, output.pooled)
    columns = [
        pooled[feature.name]
        if feature.pooling != "concat"
        else pad_sequences(output.sequences[feature.name], feature.vectors).values.view(batch_size, -1)
        for feature in spec.features
    ]
    return torch.cat(columns, dim=1)


def _pooled_columns(spec: GraphEmbedding, pooled: Tensor) -> Mapping[str, Tensor]:
    members = [feature for feature in spec.features if feature.pooling != "concat"]
    parts = torch.split(pooled, [spec.width_of(feature) for feature in members], dim=1) if members else ()
    return {feature.name: part for feature, part in zip(members, parts, strict=True)}
