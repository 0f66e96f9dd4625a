"""CreateETC, CreateHMemCache and CreateMOS: training with more rows than fast memory holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terarec.hugectr.enums import TrainPSType_t
from terarec.hugectr.tables.kinds import TEXT, TRUTH, instance, listed, member, number, one_or_list, whole
from terarec.hugectr.tables.record import Record
from terarec.hugectr.tables.table import Parameter, Status, Table

_HOST = "every table lies in host memory, so that no block is ever moved"


def _of_cache(name: str, kind: Any, meaning: str) -> Parameter:
    return Parameter(
        name=name, kind=kind, since="3.3", until="23.12", status=Status.IGNORED, why=_HOST, meaning=meaning
    )


CREATE_HMEM_CACHE = Table(
    name="CreateHMemCache",
    meaning="blocks of rows in host memory",
    rows=(
        _of_cache("num_blocks", whole(1), "blocks"),
        _of_cache("target_hit_rate", number(0.0), "share of keys found, below which blocks are replaced"),
        _of_cache("max_num_evict", whole(0), "replacements, at most"),
    ),
)


class HMemCacheConfig(Record, forms=(CREATE_HMEM_CACHE,)):
    """What `CreateHMemCache` makes."""


def _a_model_for_each(values: Mapping[str, Any]) -> str | None:
    kinds, models, caches = (values[name] for name in ("ps_types", "sparse_models", "hmem_cache_configs"))
    if models and len(models) != len(kinds):
        return f"sparse_models: got {len(models)} paths, expected one for each of the {len(kinds)} ps_types"
    cached = sum(kind is TrainPSType_t.Cached for kind in kinds)
    if len(caches) not in (0, 1, cached, len(kinds)):
        return f"hmem_cache_configs: got {len(caches)}, expected one, or one for each of the {cached} Cached tables"
    return None


CREATE_ETC = Table(
    name="CreateETC",
    meaning="an embedding training cache (3.3 to 23.12)",
    rows=(
        Parameter(
            name="ps_types",
            kind=listed(member(TrainPSType_t)),
            since="3.3",
            until="23.12",
            meaning="where each embedding keeps its rows; both kinds are in host memory here",
        ),
        Parameter(
            name="sparse_models",
            kind=one_or_list(TEXT),
            default=[],
            since="3.3",
            until="23.12",
            meaning="folder of each embedding: read if it is there, written at the end",
        ),
        Parameter(
            name="local_paths",
            kind=one_or_list(TEXT),
            default=[],
            since="3.3",
            until="23.12",
            status=Status.IGNORED,
            why=_HOST,
            meaning="folders for temporary files",
        ),
        Parameter(
            name="hmem_cache_configs",
            kind=one_or_list(instance(HMemCacheConfig)),
            default=[],
            since="3.3",
            until="23.12",
            status=Status.IGNORED,
            why=_HOST,
            meaning="blocks of each Cached table",
        ),
    ),
    rules=(_a_model_for_each,),
)


class EmbeddingTrainingCacheParams(Record, forms=(CREATE_ETC,)):
    """What `CreateETC` makes."""


def _scratch_or_trained(values: Mapping[str, Any]) -> str | None:
    if not values["train_from_scratch"] and not values["trained_sparse_models"]:
        return "trained_sparse_models: got none with train_from_scratch=False, expected a path for each embedding"
    return None


CREATE_MOS = Table(
    name="CreateMOS",
    meaning="a model oversubscriber (3.1 and 3.2)",
    rows=(
        Parameter(name="train_from_scratch", kind=TRUTH, since="3.1", until="3.2", meaning="start with empty tables"),
        Parameter(
            name="use_host_memory_ps",
            kind=TRUTH,
            default=True,
            since="3.1",
            until="3.2",
            status=Status.IGNORED,
            why=_HOST,
            meaning="tables in host memory, else in files",
        ),
        Parameter(
            name="trained_sparse_models",
            kind=one_or_list(TEXT),
            default=[],
            since="3.1",
            until="3.2",
            meaning="folders to start from",
        ),
        Parameter(
            name="dest_sparse_models",
            kind=one_or_list(TEXT),
            default=[],
            since="3.1",
            until="3.2",
            meaning="folders to write",
        ),
    ),
    rules=(_scratch_or_trained,),
)


class ModelOversubscriberParams(Record, forms=(CREATE_MOS,)):
    """What `CreateMOS` makes."""
