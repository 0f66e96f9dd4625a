"""SparseEmbedding and HybridEmbeddingParam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terarec.hugectr.enums import CommunicationType, Embedding_t, HybridEmbeddingType
from terarec.hugectr.tables.kinds import TEXT, TRUTH, instance, listed, member, number, one_of, optional, whole
from terarec.hugectr.tables.optimizer import OptParamsPy
from terarec.hugectr.tables.record import Record
from terarec.hugectr.tables.table import Parameter, Status, Table

_PLACING = "it only places rows on GPUs; the lookup is the same"


def _placing(name: str, kind: Any, default: Any, meaning: str) -> Parameter:
    return Parameter(
        name=name,
        kind=kind,
        default=default,
        since="3.1",
        until="23.12",
        status=Status.IGNORED,
        why=_PLACING,
        meaning=meaning,
    )


_COUNTS = (
    _placing("max_num_frequent_categories", whole(-1), 1, "rows on every GPU"),
    _placing("max_num_infrequent_samples", whole(-1), -1, "samples with infrequent rows"),
    _placing("p_dup_max", number(0.0), 0.01, "share of duplicates allowed"),
    _placing("max_all_reduce_bandwidth", number(0.0), 1.3e11, "bytes per second"),
    _placing("max_all_to_all_bandwidth", number(0.0), 1.9e11, "bytes per second"),
    _placing("efficiency_bandwidth_ratio", number(0.0), 1.0, "ratio of what the wires reach"),
)
_WIRES = (
    _placing("communication_type", member(CommunicationType), CommunicationType.NVLink_SingleNode, "wires"),
    _placing("hybrid_embedding_type", member(HybridEmbeddingType), HybridEmbeddingType.Distributed, "its kind"),
)
_PRECOMPUTE = tuple(
    _placing(name, TRUTH, False, "indices made ahead")
    for name in ("use_train_precompute_indices", "use_eval_precompute_indices")
)
HYBRID_EMBEDDING_PARAM = Table(
    name="HybridEmbeddingParam", meaning="where a hybrid embedding keeps its rows", rows=(*_COUNTS, *_WIRES)
)
HYBRID_EMBEDDING_PARAM_3_3 = Table(
    name="HybridEmbeddingParam",
    meaning="where a hybrid embedding keeps its rows (3.3 to 3.9)",
    rows=(*_COUNTS, *_PRECOMPUTE, *_WIRES),
    fits=lambda args, kwargs: len(args) > 8 or any(row.name in kwargs for row in _PRECOMPUTE),
)


class HybridEmbeddingParam(Record, forms=(HYBRID_EMBEDDING_PARAM, HYBRID_EMBEDDING_PARAM_3_3)):
    """Where a hybrid embedding keeps its rows."""


_TYPE = Parameter(name="embedding_type", kind=member(Embedding_t), meaning="its kind")
_SIZE = Parameter(name="embedding_vec_size", kind=whole(1), meaning="width of a vector")
_NAMES = (
    Parameter(name="sparse_embedding_name", kind=TEXT, meaning="name of its output [B, slots, width]"),
    Parameter(name="bottom_name", kind=TEXT, meaning="sparse input that it reads"),
    Parameter(
        name="slot_size_array",
        kind=listed(whole(0)),
        default=[],
        meaning="number of keys of every slot; rows of a Localized embedding start from U(+-sqrt(1 / size)) then",
    ),
)
_OWN = (
    Parameter(
        name="optimizer",
        kind=optional(instance(OptParamsPy)),
        default=None,
        since="3.1",
        meaning="its optimizer; None: the model's",
    ),
    Parameter(
        name="hybrid_embedding_param",
        kind=instance(HybridEmbeddingParam),
        default=HybridEmbeddingParam(),
        since="3.1",
        until="23.12",
        status=Status.IGNORED,
        why=_PLACING,
        meaning="where a hybrid embedding keeps its rows",
    ),
)


def _vectors_fit(values: Mapping[str, Any]) -> str | None:
    if values["embedding_vec_size"] > 1024:
        return f"embedding_vec_size: got {values['embedding_vec_size']}, expected at most 1024"
    return None


def _sizes_are_there(values: Mapping[str, Any]) -> str | None:
    kind = values["embedding_type"]
    needs = (Embedding_t.LocalizedSlotSparseEmbeddingOneHot, Embedding_t.HybridSparseEmbedding)
    if kind in needs and not values["slot_size_array"]:
        return f"slot_size_array: got none, expected the number of keys of every slot for {kind.name}"
    return None


def _has_room(values: Mapping[str, Any]) -> str | None:
    if not values["workspace_size_per_gpu_in_mb"] and not values["slot_size_array"]:
        return "got neither workspace_size_per_gpu_in_mb nor slot_size_array, expected one of them"
    return None


SPARSE_EMBEDDING = Table(
    name="SparseEmbedding",
    meaning="an embedding that looks all slots of a sparse input up",
    rows=(
        _TYPE,
        Parameter(
            name="workspace_size_per_gpu_in_mb",
            kind=whole(0),
            default=0,
            since="3.1",
            meaning="memory of its rows and their optimizer states, which bounds their number",
        ),
        _SIZE,
        Parameter(name="combiner", kind=one_of("sum", "mean"), meaning="how the vectors of a slot become one"),
        *_NAMES,
        *_OWN,
    ),
    rules=(_vectors_fit, _sizes_are_there, _has_room),
    derive=lambda values: {"max_vocabulary_size_per_gpu": 0},
)


def _combiner_by_name(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "combiner": {0: "sum", 1: "mean"}.get(values["combiner"], values["combiner"]),
        "workspace_size_per_gpu_in_mb": 0,
    }


SPARSE_EMBEDDING_3_0 = Table(
    name="SparseEmbedding",
    meaning="an embedding whose room is told in rows (2.3 and 3.0)",
    rows=(
        _TYPE,
        Parameter(name="max_vocabulary_size_per_gpu", kind=whole(1), until="3.0", meaning="rows, at most"),
        _SIZE,
        Parameter(name="combiner", kind=one_of(0, 1, "sum", "mean"), until="3.0", meaning="0: sum, 1: mean"),
        *_NAMES,
        *_OWN,
    ),
    rules=(_vectors_fit, _sizes_are_there),
    fits=lambda args, kwargs: "max_vocabulary_size_per_gpu" in kwargs or (len(args) > 3 and isinstance(args[3], int)),
    derive=_combiner_by_name,
)


class SparseEmbedding(Record, forms=(SPARSE_EMBEDDING, SPARSE_EMBEDDING_3_0)):
    """An embedding; its room is in ``workspace_size_per_gpu_in_mb``, ``max_vocabulary_size_per_gpu`` or the sizes."""
