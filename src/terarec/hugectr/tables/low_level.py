"""solver_parser_helper of 2.3 and 3.0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from terarec.hugectr.tables.kinds import TEXT, TRUTH, instance, one_or_list, whole
from terarec.hugectr.tables.solver import CREATE_SOLVER, Solver, batches_are_divisible
from terarec.hugectr.tables.table import REQUIRED, Parameter, Status, Table

_CREATE = {row.name: row for row in CREATE_SOLVER.rows}


def _as_now(*names: str, **changes: Any) -> tuple[Parameter, ...]:
    return tuple(replace(_CREATE[name], since="2.3", until="3.0", **changes) for name in names)


def _old(name: str, kind: Any, default: Any, meaning: str, **rest: Any) -> Parameter:
    return Parameter(name=name, kind=kind, default=default, meaning=meaning, until="3.0", **rest)


_MODEL_FILE = _old("model_file", TEXT, "", "dense weights to start from")
_EMBEDDING_FILES = _old("embedding_files", one_or_list(TEXT), [], "embeddings to start from")
_PLACES = _as_now("vvgpu", "use_mixed_precision")
_SPEED = _as_now("i64_input_key", "use_algorithm_search", "use_cuda_graph")

SOLVER_PARSER_HELPER = Table(
    name="solver_parser_helper",
    meaning="what a training run is (3.0)",
    rows=(
        *_as_now("seed", "max_eval_batches", "batchsize_eval", "batchsize"),
        _MODEL_FILE,
        _old("dense_opt_states_file", TEXT, "", "dense optimizer states to start from", since="3.0"),
        _EMBEDDING_FILES,
        _old("sparse_opt_states_file", one_or_list(TEXT), [], "embedding optimizer states", since="3.0"),
        *_PLACES,
        *_as_now("enable_tf32_compute", "scaler"),
        *_SPEED,
        *_as_now("repeat_dataset"),
        _old("max_iter", whole(0), 0, "iterations", since="3.0"),
        _old("num_epochs", whole(0), 0, "epochs", since="3.0"),
        _old("display", whole(1), 200, "iterations between messages", since="3.0"),
        _old("snapshot", whole(1), 10000, "iterations between snapshots", since="3.0"),
        _old("eval_interval", whole(0), 1000, "iterations between evaluations", since="3.0"),
        _old("use_model_oversubscriber", TRUTH, False, "train pass by pass", since="3.0"),
        _old(
            "temp_embedding_dir",
            TEXT,
            "./",
            "folder for rows",
            since="3.0",
            status=Status.IGNORED,
            why="every table lies in host memory",
        ),
    ),
    rules=(batches_are_divisible,),
    derive=lambda values: _of_solver(values),
)
SOLVER_PARSER_HELPER_2_3 = Table(
    name="solver_parser_helper",
    meaning="what a training run is (2.3)",
    rows=(
        *_as_now("seed"),
        _old("eval_batches", whole(1), 100, "batches of an evaluation"),
        *_as_now("batchsize_eval", "batchsize", default=16384),
        _MODEL_FILE,
        _EMBEDDING_FILES,
        *_PLACES,
        *_as_now("scaler"),
        *_SPEED,
        *_as_now("repeat_dataset", default=False),
    ),
    rules=(batches_are_divisible,),
    fits=lambda args, kwargs: "eval_batches" in kwargs,
    derive=lambda values: {
        **{name: default for name, default in _of_helper().items() if name not in values},
        **_of_solver(values),
        "max_eval_batches": values["eval_batches"],
    },
)


def _of_solver(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a newer solver has besides, at its defaults."""
    return {row.name: row.default for row in CREATE_SOLVER.rows if row.name not in values} | {"compat_release": "3.0"}


def _of_helper() -> dict[str, Any]:
    return {row.name: row.default for row in SOLVER_PARSER_HELPER.rows}


class SolverConfig(Solver, forms=(SOLVER_PARSER_HELPER, SOLVER_PARSER_HELPER_2_3)):
    """What `solver_parser_helper` makes: a solver that also knows its iterations and the files to start from."""


SESSION = Table(
    name="Session",
    meaning="a model of a training file, iteration by iteration (2.3 to 3.0)",
    rows=(
        _old("solver_config", instance(SolverConfig), REQUIRED, "what solver_parser_helper made"),
        _old("config_file", TEXT, REQUIRED, "the training file; its clause solver is not read"),
        _old("use_model_oversubscriber", TRUTH, False, "train pass by pass"),
        _old(
            "temp_embedding_dir",
            TEXT,
            "",
            "folder for rows",
            status=Status.IGNORED,
            why="every table lies in host memory",
        ),
    ),
)
