"""Models of graph files and of the inference files of release 3.0, without tables, scoring batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.batch import Batch, Jagged, to_device
from terarec.embedding import LookupCollection, RowLookup
from terarec.embedding.tables import record_tables
from terarec.hugectr.dense_weights import load_dense
from terarec.hugectr.embedding_collection import EmbeddingCollectionConfig
from terarec.hugectr.enums import Embedding_t, Layer_t
from terarec.hugectr.errors import WrongInputError, as_hugectr_errors
from terarec.hugectr.graph_json import DATA, Part, read_graph, read_parts
from terarec.hugectr.json_files import JsonObject, read_json
from terarec.hugectr.network import HAS_STATIC_TABLES, Network, Plan
from terarec.hugectr.objects import DenseLayer, Input, OptParamsPy, Solver, SparseEmbedding
from terarec.hugectr.schema.types import BOOL, STRING, either, integer, number, one_of, scalar_or_list
from terarec.models import GraphModel
from terarec.models.artifact import without_tables
from terarec.nn.precision import Precision, autocast

_HAS_SLOTS = (Embedding_t.LocalizedSlotSparseEmbeddingHash, Embedding_t.LocalizedSlotSparseEmbeddingOneHot)
_LOSS_OF = {Layer_t.Sigmoid: Layer_t.BinaryCrossEntropyLoss, Layer_t.Softmax: Layer_t.CrossEntropyLoss}


_MIXED_PRECISION = either(BOOL, one_of(128, 256, 512, 1024))  # a flag, or the loss scale of the training


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
    key_types = one_of("I32", "I64")
    files: list[str] = clause.take("sparse_model_file", scalar_or_list(STRING))
    found = InferenceClause(
        max_batchsize=clause.take("max_batchsize", integer(1), 1024),
        hit_rate_threshold=clause.take("hit_rate_threshold", number(0.0), 0.5),
        dense_model_file=clause.take("dense_model_file", STRING),
        sparse_model_files=tuple(files),
        key_bytes=8 if clause.take("input_key_type", key_types, "I32") == "I64" else 4,
        has_mixed_precision=clause.take("mixed_precision", _MIXED_PRECISION, False) is not False,
    )
    for name in ("algorithm_search", "cuda_graph"):
        clause.take(name, BOOL, True)
    clause.take("label", integer(1), 1)
    clause.finish()
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceGraph:
    """Description of a model in a file.

    Attributes:
        inputs: The `Input`.
        embeddings: The embeddings, in the order of the file: the tables of the model.
        plan: The graph; every embedding is one table of any keys.
    """

    inputs: Input
    embeddings: tuple[SparseEmbedding, ...]
    plan: Plan

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each table."""
        return tuple(one.embedding_vec_size for one in self.embeddings)

    @property
    def has_slots(self) -> tuple[bool, ...]:
        """Whether single files of each table have slots."""
        return tuple(one.embedding_type in _HAS_SLOTS for one in self.embeddings)

    @property
    def key_bases(self) -> tuple[int, ...]:
        """Offset of the keys of each slot, if they start at 0 in files, as for one-hot embeddings."""
        sizes: list[int] = []
        for one in self.embeddings:
            if one.embedding_type in HAS_STATIC_TABLES:
                sizes += accumulate(one.slot_size_array[:-1], initial=0)
        return tuple(sizes)


def read_inference_graph(path: str) -> InferenceGraph:
    """Return the model in a graph file, or in an inference file of release 3.0.

    Raises:
        FileCannotOpenError: No such file.
        BrokenFileError: No JSON.
        WrongInputError: An unknown kind or key, a value that is not accepted, or an embedding collection.
    """
    data = read_json(path)
    parts = _parts_with_loss(data) if data.has("inference") else read_graph(data).parts
    if any(isinstance(part, EmbeddingCollectionConfig) for part in parts):
        raise WrongInputError(path, "got an embedding collection, expected embeddings, each with its sparse model")
    network = Network(Solver(), OptParamsPy())
    for part in parts:
        network.add(_of_one_table(part) if isinstance(part, SparseEmbedding) else part)
    embeddings = tuple(part for part in parts if isinstance(part, SparseEmbedding))
    return InferenceGraph(inputs=network.inputs, embeddings=embeddings, plan=network.plan({}))


def _parts_with_loss(data: JsonObject) -> tuple[Part, ...]:
    """Return the parts of a file of release 3.0, whose last layer is an activation in place of a loss."""
    layers = data.children("layers")
    if layers and layers[0].take("type", STRING, "") == DATA and not layers[0].has("label"):
        clause = {"top": "label", "label_dim": 1}
        layers[0] = JsonObject({**layers[0].values(), "label": clause}, layers[0].where)
    parts = list(read_parts(layers))
    inputs, last = parts[0], parts[-1]
    assert isinstance(inputs, Input)
    if isinstance(last, DenseLayer) and last.layer_type in _LOSS_OF:
        bottoms = [last.bottom_names[0], inputs.label_names[0]]
        parts[-1] = DenseLayer(_LOSS_OF[last.layer_type], bottom_names=bottoms, top_names=last.top_names)
    return tuple(parts)


def _of_one_table(part: SparseEmbedding) -> SparseEmbedding:
    """Return an embedding with one table for all slots: rows are found by key alone."""
    kind = Embedding_t.DistributedSlotSparseEmbeddingHash
    return part.with_values(embedding_type=kind, slot_size_array=[]) if part.embedding_type is not kind else part


class Scorer:
    """A model without tables that scores batches.

    Attributes:
        graph: Description of the model.
        model: The layers.
        tensors: The tensors of the last batch by name, with probabilities in place of the logits that losses read.

    Args:
        graph: Description of the model.
        dense_model_file: File of the dense weights.
        lookups: Rows of each embedding, in their order.
        device: Device of the layers.
        precision: Precision of products.
        statistics: File of BatchNorm statistics; None for the one next to the dense weights.

    Raises:
        FileCannotOpenError: A file does not exist.
        BrokenFileError: A file of another model.
    """

    def __init__(
        self,
        graph: InferenceGraph,
        dense_model_file: str,
        lookups: Sequence[RowLookup],
        device: torch.device,
        *,
        precision: Precision = "fp32",
        statistics: str = "",
    ) -> None:
        self.graph = graph
        self.tensors: Mapping[str, Tensor] = {}
        with as_hugectr_errors("CreateInferenceSession"):
            with record_tables():
                model = GraphModel(graph.plan.spec)
            assert isinstance(without_tables(model), GraphModel)
            load_dense(model, Path(dense_model_file), statistics=Path(statistics) if statistics else None)
        self.model = model.to(device).eval()
        self._precision: Precision = precision
        by_name = dict(zip((one.sparse_embedding_name for one in graph.embeddings), lookups, strict=True))
        for module in self.model.modules():
            if isinstance(module, LookupCollection):
                module.connect({table.name: by_name[table.name] for table in module.specs})

    def score(self, batch: Batch) -> NDArray[np.float32]:
        """Return the probabilities float32[B, n] of all labels side by side."""
        batch = to_device(batch, self.model.device)
        with as_hugectr_errors("predict"), torch.inference_mode(), autocast(self._precision, self.model.device):
            tensors = self.model(batch)
            predictions = self.model.predictions(tensors)
        scores = {name: predictions[label] for name, label in self.model.logits().items()}
        self.tensors = {**tensors, **scores}
        found: NDArray[np.float32] = torch.cat(list(predictions.values()), dim=1).float().cpu().numpy()
        return found

    def batch(self, dense_feature: Sequence[float], embeddingcolumns: Sequence[int], row_ptrs: Sequence[int]) -> Batch:
        """Return the batch of a request.

        Args:
            dense_feature: The dense numbers, sample by sample.
            embeddingcolumns: Keys, table by table.
            row_ptrs: For each table the first key of each bag and the end, from 0 on; bags sample by sample.

        Raises:
            WrongInputError: Numbers that do not fit each other.
        """
        inputs = self.graph.inputs
        dense = _numbers("dense_feature", dense_feature, np.float32)
        keys, ends = _numbers("embeddingcolumns", embeddingcolumns, np.int64), _numbers("row_ptrs", row_ptrs, np.int64)
        slots = {one.top_name: int(one.slot_num) for one in inputs.data_reader_sparse_param_array}
        tables = [(one.bottom_name, slots[one.bottom_name]) for one in self.graph.embeddings]
        # Each table has B * slots + 1 row_ptrs, so that B follows from their number alone.
        bags, rest = divmod(len(ends) - len(tables), sum(count for _, count in tables) or 1)
        if rest or bags < 0 or len(dense) != bags * inputs.dense_dim:
            expected = " + ".join(f"B * {count} + 1" for _, count in tables)
            raise WrongInputError(
                "predict",
                f"got {len(dense)} dense numbers and {len(ends)} row_ptrs, "
                f"expected B * {inputs.dense_dim} and {expected} of B samples",
            )
        names, parts, lengths = list[str](), list[NDArray[np.int64]](), list[NDArray[np.int64]]()
        first_key = first_end = 0
        for bottom, count in tables:
            mine = ends[first_end : first_end + bags * count + 1]
            first_end += len(mine)
            is_rising = len(mine) > 0 and mine[0] == 0 and bool((np.diff(mine) >= 0).all())
            if not is_rising or first_key + mine[-1] > len(keys):
                raise WrongInputError(
                    "predict",
                    "row_ptrs",
                    f"got {mine.tolist()[:4]}... of input {bottom!r}, expected numbers that rise "
                    f"from 0 to its keys, {len(keys) - first_key} at most",
                    field="row_ptrs",
                )
            of_table = keys[first_key : first_key + mine[-1]]
            first_key += int(mine[-1])
            if f"{bottom}.0" in names:  # another embedding of the same input, which reads the same keys
                continue
            for slot in range(count):
                # Bags are sample by sample in a request, slot by slot in a batch: every `count`-th is of this slot.
                starts, sizes = mine[slot:-1:count], np.diff(mine)[slot::count]
                places = np.repeat(starts - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
                names.append(f"{bottom}.{slot}")
                parts.append(of_table[places])
                lengths.append(sizes)
        if first_key != len(keys):
            got = f"got {len(keys)} keys, expected {first_key} as row_ptrs say"
            raise WrongInputError("predict", "embeddingcolumns", got, field="embeddingcolumns")
        return Batch(
            dense=torch.from_numpy(dense.reshape(bags, inputs.dense_dim)),
            label=torch.zeros(bags, sum(inputs.label_dims)),
            sparse=Jagged(
                names=tuple(names),
                keys=torch.from_numpy(np.concatenate([*parts, np.zeros(0, np.int64)])),
                offsets=torch.from_numpy(np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()),
            ),
        )

    def with_bases(self, batch: Batch) -> Batch:
        """Return a batch of files with the offsets of slots added to keys, if these start at 0 in each slot."""
        bases = self.graph.key_bases
        sparse, size = batch.sparse, batch.batch_size
        if not bases or not size:
            return batch
        counts = sparse.offsets[::size].diff()
        shifts = torch.tensor(bases).repeat_interleave(counts)
        return replace(batch, sparse=replace(sparse, keys=sparse.keys + shifts))


def _numbers(name: str, values: Any, kind: type[Any]) -> NDArray[Any]:
    try:
        found = np.asarray(values, dtype=kind).reshape(-1)
    except (ValueError, TypeError, OverflowError):
        raise WrongInputError("predict", name, f"expected a list of {kind.__name__}", field=name) from None
    if kind is np.float32 and not np.isfinite(found).all():
        raise WrongInputError("predict", name, "got NaN or infinity, expected finite numbers", field=name)
    return found
