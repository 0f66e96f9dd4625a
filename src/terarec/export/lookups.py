"""Modules that replace collections in programs of other runtimes: lookups in plain PyTorch, and vectors as inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from terarec.embedding import EmbeddingCollection, EmbeddingOutput, PaddedKeys, PaddedSequences
from terarec.export.inputs import AnyCollection
from terarec.ops.bag_lookup import quantize_rows
from terarec.ragged import Ragged
from terarec.storage import AnyTable, DynamicTable


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
            held = table.export(table.keys())
            keys, weights = held.keys.cpu(), held.weights
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
            places, found = self._search(keys) if self.is_searched else self._direct(keys)
            held = self._held(places)
            default = torch.where(found.unsqueeze(-1), held, default)
        return torch.where(is_key.unsqueeze(-1), default, torch.zeros(()))

    def _held(self, places: Tensor) -> Tensor:
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
        self.places = {name: place for place, name in enumerate(collection.tables)}
        self.tables = nn.ModuleList(TableLookup(table, row_type) for table in collection.tables.values())

    def forward(self, keys: PaddedKeys) -> EmbeddingOutput:
        """Return the pooled vectors float32[B, sum(D)] and the sequences."""
        pooled: list[Tensor] = []
        sequences: dict[str, PaddedSequences] = {}
        for feature in self.features:
            bag, is_key = keys.keys[feature.name], keys.masks[feature.name]
            if feature.max_keys is not None:
                bag, is_key = (_first_keys(given, feature.max_keys) for given in (bag, is_key))
            vectors = self.tables[self.places[feature.table]](bag, is_key)
            if feature.pooling == "none":
                sequences[feature.name] = PaddedSequences(values=vectors, mask=is_key)
            else:
                pooled.append(_pool(vectors, is_key, feature.pooling))
        nothing = vectors.new_zeros(vectors.shape[0], 0)
        return padded_output(torch.cat(pooled, dim=1) if pooled else nothing, sequences)


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

    def without(self, dropped: Mapping[str, int]) -> GivenOutputs:
        """Return these keys: the masks, which are inputs, already leave out the keys that the model drops."""
        return self


class GivenVectors(nn.Module):
    """Placeholder of the collection at `path` where its vectors are inputs."""

    def __init__(self, path: str, collection: AnyCollection) -> None:
        super().__init__()
        self.features = collection.features
        self.output_width = collection.output_width
        self._path = path

    def forward(self, given: GivenOutputs) -> EmbeddingOutput:
        """Return the output that is an input of the program."""
        return given.outputs[self._path]


@contextmanager
def exportable(model: nn.Module, *, tables: bool, row_type: str = "fp32") -> Iterator[None]:
    """Replace the model's collections by lookups that a program can hold, while the block runs.

    Args:
        model: The model.
        tables: Whether the tables are part of the program; else the vectors that they give are its inputs.
        row_type: Numbers of the rows as for `TableLookup`.
    """
    # Places rather than collections: one may be a child of several modules, each of which gets the replacement.
    places = [
        (parent, name, f"{path}.{name}" if path else name, child)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if isinstance(child, EmbeddingCollection)
    ]
    made: dict[EmbeddingCollection, nn.Module] = {}
    for _, _, path, collection in places:
        if collection not in made:
            made[collection] = CollectionLookup(collection, row_type) if tables else GivenVectors(path, collection)
    try:
        for parent, name, _, collection in places:
            parent._modules[name] = made[collection]
        yield
    finally:
        for parent, name, _, collection in places:
            parent._modules[name] = collection
