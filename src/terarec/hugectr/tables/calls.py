"""What calls of `Model` take that have parameters of their own, several names for one, or others in some releases."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

from terarec.hugectr.tables.data_source import DataSourceParams
from terarec.hugectr.tables.kinds import (
    PATH,
    TEXT,
    Kind,
    either,
    instance,
    listed,
    mapped,
    number,
    one_or_list,
    optional,
    whole,
)
from terarec.hugectr.tables.optimizer import OptParamsPy
from terarec.hugectr.tables.reader import DataReaderParams
from terarec.hugectr.tables.record import Record
from terarec.hugectr.tables.solver import Solver
from terarec.hugectr.tables.table import Parameter, Table
from terarec.hugectr.tables.training_cache import EmbeddingTrainingCacheParams, ModelOversubscriberParams


def _made(expected: str, *classes: type) -> Kind:
    return Kind(expected, instance(*classes).read)


_CACHE = _made("what CreateETC or CreateMOS makes", EmbeddingTrainingCacheParams, ModelOversubscriberParams, NoneType)


def _optimizer_is_there(values: Mapping[str, Any]) -> str | None:
    if isinstance(values["reader_params"], OptParamsPy) == isinstance(values["opt_params"], OptParamsPy):
        return f"opt_params: got {values['opt_params']!r}, expected what CreateOptimizer makes, once"
    return None


MODEL = Table(
    name="Model",
    meaning="a model, its data and its training",
    rows=(
        Parameter(
            name="solver",
            kind=_made("what CreateSolver makes", Solver),
            since="3.0",
            aliases=("solver_parser",),
            meaning="how it trains",
        ),
        Parameter(
            name="reader_params",
            kind=_made("a DataReaderParams", DataReaderParams, OptParamsPy, NoneType),
            default=None,
            since="3.0",
            meaning="where its data is; in 3.0 the Input tells, and the optimizer has this place",
        ),
        Parameter(
            name="opt_params",
            kind=_made("what CreateOptimizer makes", OptParamsPy, NoneType),
            default=None,
            since="3.0",
            meaning="its optimizer",
        ),
        Parameter(
            name="etc_params",
            kind=_CACHE,
            default=None,
            since="3.1",
            until="23.12",
            aliases=("mos_params",),
            meaning="its training cache",
        ),
    ),
    rules=(_optimizer_is_there,),
)
ADD = Table(
    name="Model.add",
    meaning="a part on top of those that are there",
    rows=(
        Parameter(
            name="input",
            kind=_made("an Input, an embedding, a collection, a DenseLayer or a GroupDenseLayer", Record),
            since="3.0",
            aliases=(
                "sparse_embedding",
                "dense_layer",
                "group_dense_layer",
                "embedding_collection_place_holder",
                "embedding_collection",
                "ebc_config",
            ),
            meaning="an Input, an embedding, a layer, a group of layers or an embedding collection",
        ),
    ),
)
_SOURCE = Parameter(
    name="data_source_params",
    kind=optional(instance(DataSourceParams)),
    default=None,
    since="3.4",
    until="3.4",
    meaning="file system of the files, with paths that take the place of those given, or go before them",
)
FIT = Table(
    name="Model.fit",
    meaning="train, evaluate and save",
    rows=(
        Parameter(
            name="num_epochs", kind=whole(), default=0, since="3.0", meaning="times over the data, repeat_dataset=False"
        ),
        Parameter(name="max_iter", kind=whole(), default=2000, since="3.0", meaning="iterations, repeat_dataset=True"),
        Parameter(name="display", kind=whole(), default=200, since="3.0", meaning="iterations between messages"),
        Parameter(
            name="eval_interval", kind=whole(), default=1000, since="3.0", meaning="iterations between evaluations"
        ),
        Parameter(name="snapshot", kind=whole(), default=10000, since="3.0", meaning="iterations between snapshots"),
        Parameter(name="snapshot_prefix", kind=TEXT, default="", since="3.0", meaning="of their files' names"),
        _SOURCE,
    ),
)
SET_LEARNING_RATE = Table(
    name="Model.set_learning_rate",
    meaning="the rate of the next iterations",
    rows=(Parameter(name="lr", kind=number(0.0), meaning="the rate"),),
)
SAVE_PARAMS_TO_FILES = Table(
    name="Model.save_params_to_files",
    meaning="write weights and optimizer states",
    rows=(
        Parameter(name="prefix", kind=PATH, since="3.1", meaning="of the files' names"),
        Parameter(name="iter", kind=whole(), default=0, since="3.1", meaning="number in the files' names"),
        _SOURCE,
    ),
)


def _load(name: str, file: str, meaning: str) -> Table:
    row = Parameter(name=file, kind=PATH, since="3.1", meaning="the file")
    return Table(name=f"Model.{name}", meaning=meaning, rows=(row, _SOURCE))


def _load_sparse(name: str, files: str, meaning: str) -> Table:
    row = Parameter(
        name=files,
        kind=either(one_or_list(PATH), mapped(TEXT, PATH)),
        since="3.1",
        aliases=(f"{files}_map",),
        meaning="paths, one for each embedding, or a mapping from the names of some",
    )
    return Table(name=f"Model.{name}", meaning=meaning, rows=(row, _SOURCE))


LOAD_DENSE_WEIGHTS = _load("load_dense_weights", "dense_model_file", "read weights of the dense layers")
LOAD_DENSE_OPTIMIZER_STATES = _load(
    "load_dense_optimizer_states", "dense_opt_states_file", "read the dense layers' optimizer states"
)
LOAD_SPARSE_WEIGHTS = _load_sparse("load_sparse_weights", "sparse_embedding_files", "read embeddings")
LOAD_SPARSE_OPTIMIZER_STATES = _load_sparse(
    "load_sparse_optimizer_states", "sparse_opt_states_files", "read embeddings' optimizer states"
)
UPDATE = Table(
    name="EmbeddingTrainingCache.update",
    meaning="begin the next pass",
    rows=(
        Parameter(
            name="keyset_file",
            kind=either(PATH, listed(PATH)),
            until="23.12",
            aliases=("keyset_file_list",),
            meaning="keys that the pass may touch: one file for all embeddings, or one for each",
        ),
    ),
)
