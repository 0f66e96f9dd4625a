# SPDX-License-Identifier: Apache-2.0
"""The inputs of an exported model, and their values for a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from terarec.batch import Batch, Jagged, select
from terarec.embedding import EmbeddingCollection, EmbeddingOutput, PaddedSequences
from terarec.embedding.lookups import LookupCollection
from terarec.embedding.output import pad_sequences
from terarec.errors import ConfigError
from terarec.spec import FeatureSpec
from terarec.spec.dataset import MISSING_KEY

AnyCollection = EmbeddingCollection | LookupCollection
NO_KEY = MISSING_KEY + 1
"""Fills the places of a bag that has fewer keys than others; a table never finds it, and means do not count it.

It differs from the key of a missing value, which is a key as any other.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyInput:
    """An input int64[B, n, K] with the keys of n columns of the batch.

    Attributes:
        name: Name of the input.
        columns: Features of the batch, in order.
        max_keys: K, the most keys of a bag; None leaves it open.
    """

    name: str
    columns: tuple[str, ...]
    max_keys: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInput:
    """An input [B, ...dims] of an exported model.

    Attributes:
        name: Name of the input.
        dtype: "float32", "int64" or "bool".
        dims: Lengths after the batch; None for an open one.
        columns: The data set's columns that it holds, in order; empty for vectors of tables.
        read: Function that returns its value for a batch.
    """

    name: str
    dtype: str
    dims: tuple[int | None, ...]
    columns: tuple[str, ...]
    read: Callable[[Batch], NDArray[np.generic]]


def dense_input(name: str, columns: Sequence[str], *, width: int | None = None) -> ModelInput:
    """Return the dense columns float32[B, F]; F is `width` where the columns have no names."""
    return ModelInput(
        name=name,
        dtype="float32",
        dims=(len(columns) if width is None else width,),
        columns=tuple(columns),
        read=lambda batch: batch.dense.detach().cpu().numpy(),
    )


def key_input(source: KeyInput) -> ModelInput:
    """Return the keys int64[B, n, K] of `source`."""
    return ModelInput(
        name=source.name,
        dtype="int64",
        dims=(len(source.columns), source.max_keys),
        columns=source.columns,
        read=lambda batch: padded_keys(batch.sparse, source),
    )


def padded_keys(jagged: Jagged, source: KeyInput) -> NDArray[np.int64]:
    """Return the keys int64[B, n, K] of the columns of `source`; an open K is the length of the longest bag.

    Raises:
        ConfigError: A key of a bag of several is `NO_KEY`.
    """
    part = select(jagged, source.columns)
    keys, offsets = part.keys.cpu().numpy(), part.offsets.cpu().numpy()
    lengths = np.diff(offsets)
    most = source.max_keys or max(1, int(lengths.max(initial=1)))
    if most > 1 and NO_KEY in keys:
        raise ConfigError(
            f"column {source.columns[0]!r}", f"got the key {NO_KEY}, which pads exported lists, expected others"
        )
    places = np.arange(len(keys)) - np.repeat(offsets[:-1], lengths)
    kept = places < most
    # Bags beyond `most` keep their first keys, as features with max_keys do.
    padded = np.full((len(lengths), most), NO_KEY, np.int64)
    padded[np.repeat(np.arange(len(lengths)), lengths)[kept], places[kept]] = keys[kept]
    # Bags are feature-major: [n * B, K] becomes [B, n, K]. Contiguous, as runtimes read the array by its address.
    return np.ascontiguousarray(padded.reshape(len(source.columns), -1, most).transpose(1, 0, 2))


def given_vectors(path: str, collection: AnyCollection, output: EmbeddingOutput) -> list[tuple[str, Tensor]]:
    """Return the values of `vector_inputs` by name for the output of the collection at `path`."""
    named = [(path, output.pooled)] if collection.output_width else []
    for feature in collection.features:
        if feature.pooling == "none":
            padded = pad_sequences(output.sequences[feature.name])
            named += [(f"{path}.{feature.name}", padded.values), (f"{path}.{feature.name}.mask", padded.mask)]
    return named


def vector_inputs(model: nn.Module, path: str, collection: AnyCollection) -> list[ModelInput]:
    """Return the outputs of the collection at `path` of `model`: pooled vectors, then each sequence and its mask.

    A sequence ``<path>.<feature>`` float32[B, K, D] has zeros where ``<path>.<feature>.mask`` bool[B, K] is False.
    """
    inputs = []
    if collection.output_width:
        inputs.append(
            ModelInput(
                name=path,
                dtype="float32",
                dims=(collection.output_width,),
                columns=tuple(feature.name for feature in collection.features if feature.pooling != "none"),
                read=lambda batch: _looked_up(model, path, batch).pooled.numpy(),
            )
        )
    for feature in collection.features:
        if feature.pooling == "none":
            inputs += _sequence_inputs(model, path, collection, feature)
    return inputs


def _sequence_inputs(model: nn.Module, path: str, collection: AnyCollection, feature: FeatureSpec) -> list[ModelInput]:
    def padded(batch: Batch) -> PaddedSequences:
        return pad_sequences(_looked_up(model, path, batch).sequences[feature.name])

    width = next(table.width for table in collection.specs if table.name == feature.table)
    return [
        ModelInput(
            name=f"{path}.{feature.name}",
            dtype="float32",
            dims=(None, width),
            columns=(feature.name,),
            read=lambda batch: padded(batch).values.numpy(),
        ),
        ModelInput(
            name=f"{path}.{feature.name}.mask",
            dtype="bool",
            dims=(None,),
            columns=(feature.name,),
            read=lambda batch: padded(batch).mask.numpy(),
        ),
    ]


def _looked_up(model: nn.Module, path: str, batch: Batch) -> EmbeddingOutput:
    """Return the output of the collection at `path` when `model` scores `batch`; the model may first leave out keys."""
    # The model runs in full, because only its own code knows what it changes in the keys before a lookup.
    outputs: list[EmbeddingOutput] = []
    # By its path: where rows become codes, another collection takes its place.
    handle = model.get_submodule(path).register_forward_hook(lambda module, arguments, output: outputs.append(output))
    try:
        with torch.no_grad():
            model(batch)
    finally:
        handle.remove()
    if len(outputs) != 1:
        raise ConfigError(
            path, f"got {len(outputs)} lookups of the model in a batch, expected one, whose result is given"
        )
    return outputs[0]
