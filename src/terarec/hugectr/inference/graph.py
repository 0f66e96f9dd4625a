# SPDX-License-Identifier: Apache-2.0
"""Descriptions of models in graph files, and in the inference files of release 3.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from terarec.hugectr.embedding_collection import EmbeddingCollectionConfig
from terarec.hugectr.enums import Embedding_t, Layer_t
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.graph_json import DATA, Part, read_graph, read_parts
from terarec.hugectr.json_files import KEY_TYPES, LOSS_SCALES, JsonObject, read_json
from terarec.hugectr.network import HAS_STATIC_TABLES, LOCALIZED, Network, NetworkPlan, slot_sizes
from terarec.hugectr.objects import DenseLayer, Input, OptParamsPy, Solver, SparseEmbedding
from terarec.hugectr.schema.types import BOOL, STRING, either, integer, number, scalar_or_list

_LOSS_OF = {Layer_t.Sigmoid: Layer_t.BinaryCrossEntropyLoss, Layer_t.Softmax: Layer_t.CrossEntropyLoss}
_MIXED_PRECISION = either(BOOL, LOSS_SCALES)  # a flag, or the loss scale of the training


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceClause:
    """The clause ``inference`` of a file of release 3.0.

    Attributes:
        max_batchsize: Maximum number of samples of a request.
        hit_rate_threshold: Share of keys that the cache has, from which on the others are read in the background.
        dense_model_file: File of the dense weights.
        sparse_model_files: File of each embedding.
        key_bytes: Bytes of a key in files.
        has_mixed_precision: Whether products have 16 bits.
    """

    max_batchsize: int
    hit_rate_threshold: float
    dense_model_file: str
    sparse_model_files: tuple[str, ...]
    key_bytes: int
    has_mixed_precision: bool


def read_inference_clause(path: str) -> InferenceClause:
    """Return the clause ``inference`` of the file `path`.

    Raises:
        FileCannotOpenError: No such file.
        BrokenFileError: No JSON.
        WrongInputError: No such clause, an unknown key, or a value that is not accepted; the message has its path.
    """
    data = read_json(path)
    if not data.has("inference"):
        raise WrongInputError(data.where, "no inference, expected the clause of release 3.0", field="inference")
    clause = data.child("inference")
    files: list[str] = clause.take("sparse_model_file", scalar_or_list(STRING))
    settings = InferenceClause(
        max_batchsize=clause.take("max_batchsize", integer(1), 1024),
        hit_rate_threshold=clause.take("hit_rate_threshold", number(0.0), 0.5),
        dense_model_file=clause.take("dense_model_file", STRING),
        sparse_model_files=tuple(files),
        key_bytes=8 if clause.take("input_key_type", KEY_TYPES, "I32") == "I64" else 4,
        has_mixed_precision=clause.take("mixed_precision", _MIXED_PRECISION, False) is not False,
    )
    # Settings of a GPU, and the number of labels, which the graph has: validated, without an effect.
    for name in ("algorithm_search", "cuda_graph"):
        clause.take(name, BOOL, True)
    clause.take("label", integer(1), 1)
    clause.finish()
    return settings


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceGraph:
    """Description of a model in a file.

    Attributes:
        inputs: The `Input`.
        embeddings: The embeddings, in the order of the file: the tables of the model.
        plan: The graph; every embedding is one table of any keys.
        key_bases: Column of files -> offset of its keys, if these start at 0 in each slot, as for one-hot embeddings.
    """

    inputs: Input
    embeddings: tuple[SparseEmbedding, ...]
    plan: NetworkPlan
    key_bases: Mapping[str, int]

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each table."""
        return tuple(one.embedding_vec_size for one in self.embeddings)

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each table: HugeCTR names rows in Redis and RocksDB by the tensors of the embeddings."""
        return tuple(one.sparse_embedding_name for one in self.embeddings)

    @property
    def has_slots(self) -> tuple[bool, ...]:
        """Whether single files of each table have slots."""
        return tuple(one.embedding_type in LOCALIZED for one in self.embeddings)


def read_inference_graph(path: str) -> InferenceGraph:
    """Return the model in a graph file, or in an inference file of release 3.0.

    Raises:
        FileCannotOpenError: No such file.
        BrokenFileError: No JSON.
        WrongInputError: An unknown kind or key, a value that is not accepted, an embedding collection, or embeddings
            of one input that want other keys.
    """
    data = read_json(path)
    parts = _parts_with_loss(data) if data.has("inference") else read_graph(data).parts
    if any(isinstance(part, EmbeddingCollectionConfig) for part in parts):
        raise WrongInputError(path, "got an embedding collection, expected embeddings, each with its sparse model")
    # Scores depend on neither solver nor optimizer.
    network = Network(Solver(), OptParamsPy())
    for part in parts:
        network.add(_of_one_table(part) if isinstance(part, SparseEmbedding) else part)
    embeddings = tuple(part for part in parts if isinstance(part, SparseEmbedding))
    inputs = network.inputs
    bases = _key_bases(inputs, embeddings)
    return InferenceGraph(inputs=inputs, embeddings=embeddings, plan=network.plan({}), key_bases=bases)


def _key_bases(inputs: Input, embeddings: Sequence[SparseEmbedding]) -> dict[str, int]:
    """Return `InferenceGraph.key_bases`."""
    slots = {one.top_name: one.slot_num for one in inputs.data_reader_sparse_param_array}
    bases: dict[str, int] = {}
    for one in embeddings:
        if one.embedding_type in HAS_STATIC_TABLES:
            sizes = slot_sizes(one, slots[one.bottom_name])
            for slot, base in enumerate(accumulate(sizes[:-1], initial=0)):
                # Embeddings of one input get the same keys.
                if bases.setdefault(f"{one.bottom_name}.{slot}", base) != base:
                    raise WrongInputError(
                        f"SparseEmbedding {one.sparse_embedding_name!r}: slot_size_array",
                        f"got {list(sizes)}, expected that of the other embedding of {one.bottom_name!r}",
                    )
    return bases


def _parts_with_loss(data: JsonObject) -> tuple[Part, ...]:
    """Return the parts of a file of release 3.0, whose last layer is an activation in place of a loss."""
    layers = data.children("layers")
    if layers and layers[0].take("type", STRING, "") == DATA:
        values = layers[0].values()
        # Inference needs no labels, so files leave out the clause or its parts; a graph has one that is never read.
        clause = values.get("label", {})
        if isinstance(clause, dict):  # else the reader of the clause reports it
            layers[0] = JsonObject({**values, "label": {"top": "label", "label_dim": 1, **clause}}, layers[0].where)
    parts = list(read_parts(layers))
    inputs, last = parts[0], parts[-1]
    assert isinstance(inputs, Input)
    # A graph predicts by its losses, which compute the same probabilities as the activation.
    if isinstance(last, DenseLayer) and last.layer_type in _LOSS_OF:
        bottoms = [last.bottom_names[0], inputs.label_names[0]]
        parts[-1] = DenseLayer(_LOSS_OF[last.layer_type], bottom_names=bottoms, top_names=last.top_names)
    return tuple(parts)


def _of_one_table(part: SparseEmbedding) -> SparseEmbedding:
    """Return an embedding with one table for all slots: rows are found by key alone."""
    kind = Embedding_t.DistributedSlotSparseEmbeddingHash
    return part.with_values(embedding_type=kind, slot_size_array=[]) if part.embedding_type is not kind else part
