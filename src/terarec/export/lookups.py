# SPDX-License-Identifier: Apache-2.0
"""Modules that replace collections in programs of other runtimes: lookups in plain PyTorch, and vectors as inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from terarec.embedding import EmbeddingCollection, EmbeddingOutput, PaddedSequences
from terarec.embedding.modules import replace_modules
from terarec.embedding.output import PaddedKeys
from terarec.export.inputs import AnyCollection
from terarec.ops.bag_lookup import quantize_rows
from terarec.ragged import Ragged
from terarec.spec import FeatureSpec
from terarec.storage.dynamic import DynamicTable
from terarec.storage.kinds import AnyTable


class TableLookup(nn.Module):
    """The rows of a table. Keys 0 to n - 1 are rows; others are found in the sorted keys by halving.

    Args:
        table: The table.
        row_type: "fp32", or "int8" for codes with a scale and an offset for each row.
    """

    rows: Tensor
    ranges: Tensor
    keys: Tensor
    default: Tensor

    def __init__(self, table: AnyTable, row_type: str = "fp32") -> None:
        super().__init__()
        self.count = len(table)
        if isinstance(table, DynamicTable):
            rows = table.export(table.keys())
            keys, weights = rows.keys.cpu(), rows.weights
            default = torch.as_tensor(table.spec.default, dtype=torch.float32).expand(table.width).clone()
        else:
            keys, weights = torch.empty(0, dtype=torch.int64), table.export(table.keys()).weights
            default = torch.zeros(table.width)
        # The keys of a dynamic table ascend, so they can be searched by halving.
        self.is_searched = not torch.equal(keys, torch.arange(len(keys)))
        self.is_quantized = row_type == "int8"
        weights = weights.float().cpu()
        if self.is_quantized:
            packed = quantize_rows(weights)
            # Apart from the codes: programs have no view of bytes as float32.
            self.register_buffer("ranges", packed[:, table.width :].contiguous().view(torch.float32))
            weights = packed[:, : table.width].contiguous()
        self.register_buffer("rows", weights)
        self.register_buffer("default", default)
        self.register_buffer("keys", keys)

    def forward(self, keys: Tensor, is_key: Tensor) -> Tensor:
        """Look up vectors float32[B, K, D] of ``keys int64[B, K]``: zeros where `is_key` is False.

        A key that the table does not hold gives the default of a dynamic table, and zeros for a static one.
        """
        # Selected by `where` and never by a branch, which a trace would fix to the branch of the example.
        default = self.default.expand(*keys.shape, -1)
        if self.count:
            places, is_known = self._search(keys) if self.is_searched else self._direct(keys)
            values = self._values_at(places)
            default = torch.where(is_known.unsqueeze(-1), values, default)
        return torch.where(is_key.unsqueeze(-1), default, torch.zeros(()))

    def _values_at(self, places: Tensor) -> Tensor:
        if not self.is_quantized:
            return nn.functional.embedding(places, self.rows)
        ranges = nn.functional.embedding(places, self.ranges)
        return self.rows[places].float() * ranges[..., :1] + ranges[..., 1:]

    def _direct(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        # Clamped, because both sides of a `where` are computed: a key outside must not read outside.
        places = keys.clamp(0, self.count - 1)
        return places, places == keys

    def _search(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the place of the last key that is not greater, and whether it is equal."""
        places = torch.zeros_like(keys)
        step = 1 << (self.count - 1).bit_length()
        while step > 1:
            step //= 2
            further = (places + step).clamp(max=self.count - 1)
            places = torch.where(self.keys[further] <= keys, further, places)
        return places, self.keys[places] == keys


class CollectionLookup(nn.Module):
    """Looks `PaddedKeys` up as a collection in evaluation looks a `Jagged` up.

    Args:
        collection: The collection, with its tables as they are now.
        row_type: Numbers of the rows as for `TableLookup`.
    """

    def __init__(self, collection: EmbeddingCollection, row_type: str = "fp32") -> None:
        super().__init__()
        self.features = collection.features
        self.output_width = collection.output_width
        self.tables = nn.ModuleList(TableLookup(table, row_type) for table in collection.tables.values())
        self._readers = [
            [feature for feature in collection.features if feature.table == table] for table in collection.tables
        ]

    def forward(self, keys: PaddedKeys) -> EmbeddingOutput:
        """Return the pooled vectors float32[B, sum(D)] and the sequences."""
        sequences: dict[str, PaddedSequences] = {}
        for table, readers in zip(self.tables, self._readers, strict=True):
            sequences |= _look_up(table, readers, keys)
        pooled = [
            _pool(*sequences[feature.name], feature.pooling) for feature in self.features if feature.pooling != "none"
        ]
        some = next(iter(sequences.values())).values
        return padded_output(
            torch.cat(pooled, dim=1) if pooled else some.new_zeros(some.shape[0], 0),
            {feature.name: sequences[feature.name] for feature in self.features if feature.pooling == "none"},
        )


def _look_up(table: nn.Module, readers: Sequence[FeatureSpec], keys: PaddedKeys) -> dict[str, PaddedSequences]:
    """Return the vectors of the features that read `table`, whose keys are searched together."""
    bags = [keys.keys[feature.name] for feature in readers]
    masks = [keys.masks[feature.name] for feature in readers]
    for values in (bags, masks):
        for place, feature in enumerate(readers):
            if feature.max_keys is not None:
                values[place] = _first_keys(values[place], feature.max_keys)
    if len(readers) == 1:
        return {readers[0].name: PaddedSequences(table(bags[0], masks[0]), masks[0])}
    # A search is some operations for each bit of a place, which programs with tens of features would repeat.
    vectors = table(torch.cat(bags, dim=1), torch.cat(masks, dim=1)).split([bag.shape[1] for bag in bags], dim=1)
    return {feature.name: PaddedSequences(*parts) for feature, *parts in zip(readers, vectors, masks, strict=True)}


def _first_keys(values: Tensor, count: int) -> Tensor:
    """Return the first `count` columns of [B, K], after columns of zeros where K is less.

    Slicing [B, K] itself would fix in the exported graph whether K is above `count`.
    """
    return torch.cat([values, values.new_zeros(values.shape[0], count)], dim=1)[:, :count]


def padded_output(pooled: Tensor, sequences: Mapping[str, PaddedSequences]) -> EmbeddingOutput:
    """Return the output of a lookup, with padded sequences, which exported models have to accept, too."""
    return EmbeddingOutput(pooled, cast(Mapping[str, Ragged[Tensor, Tensor]], sequences))


def _pool(vectors: Tensor, is_key: Tensor, pooling: str) -> Tensor:
    """Pool the bags of ``vectors float32[B, K, D]``, which are zeros without a key, to float32[B, D]."""
    if pooling == "max":
        # Minus infinity, as the zeros of absent keys would win over negative vectors; an empty bag becomes zeros below.
        least = torch.where(is_key.unsqueeze(-1), vectors, torch.full((), -torch.inf)).amax(1)
        return torch.where(is_key.any(1, keepdim=True), least, torch.zeros(()))
    total = vectors.sum(1)
    if pooling == "sum":
        return total
    count = is_key.sum(1, keepdim=True).clamp(min=1).float()
    return total / (count if pooling == "mean" else count.sqrt())


class GivenOutputs(PaddedKeys):
    """Placeholder of the keys where the vectors of collections are inputs."""

    def __init__(self, outputs: Mapping[str, EmbeddingOutput]) -> None:
        super().__init__({}, {})
        self.outputs = outputs

    @override
    def without(self, dropped: Mapping[str, int]) -> GivenOutputs:
        # The masks, which are inputs, already leave out the keys that the model drops.
        return self


class GivenVectors(nn.Module):
    """Placeholder of the collection at `path` where its vectors are inputs."""

    def __init__(self, path: str, collection: AnyCollection) -> None:
        super().__init__()
        self.features = collection.features
        self.output_width = collection.output_width
        self._path = path

    def forward(self, outputs: GivenOutputs) -> EmbeddingOutput:
        """Return the output that is an input of the program."""
        return outputs.outputs[self._path]


@contextmanager
def exportable(model: nn.Module, *, tables: bool, row_type: str = "fp32") -> Iterator[None]:
    """Replace the model's collections by lookups that a program can hold, while the block runs.

    Args:
        model: The model.
        tables: Whether the tables are part of the program; else the vectors that they give are its inputs.
        row_type: Numbers of the rows as for `TableLookup`.
    """
    modules: dict[nn.Module, nn.Module] = {
        module: CollectionLookup(module, row_type) if tables else GivenVectors(path, module)
        for path, module in model.named_modules()
        if isinstance(module, EmbeddingCollection)
    }
    try:
        replace_modules(model, modules)
        yield
    finally:
        replace_modules(model, {replacement: module for module, replacement in modules.items()})
