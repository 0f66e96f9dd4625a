# SPDX-License-Identifier: Apache-2.0
"""A script whose types mypy checks together with the package, and mistakes in it that both mypy and a call report.

Where a name or a parameter loses its type, mypy finds the ``type: ignore`` comment superfluous and fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_type

import terarec.hugectr as hugectr


def described() -> hugectr.Model:
    """Return a model of two layers, which is not compiled."""
    solver = hugectr.CreateSolver(batchsize=64, batchsize_eval=64, lr=0.01, vvgpu=[[0]])
    reader = hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Parquet,
        source=["train/_file_list.txt"],
        eval_source="valid/_file_list.txt",
        check_type=hugectr.Check_t.Non,
    )
    model = hugectr.Model(solver, reader, hugectr.CreateOptimizer(optimizer_type=hugectr.Adam))
    slots = hugectr.DataReaderSparseParam("data", 1, True, 2)
    model.add(hugectr.Input(1, "label", 3, "dense", [slots]))
    model.add(hugectr.DenseLayer(hugectr.InnerProduct, ["dense"], ["fc"], num_output=1))
    model.add(hugectr.DenseLayer(hugectr.BinaryCrossEntropyLoss, ["fc", "label"], ["loss"]))
    assert_type(solver.lr, float)
    assert_type(reader.source, list[str])
    return model


def trained(model: hugectr.Model) -> list[tuple[str, float]]:
    """Train a compiled model, and return its metrics."""
    model.fit(max_iter=100, display=10, eval_interval=50, snapshot_prefix="dlrm")
    assert_type(model.get_data_reader_train(), hugectr.DataReader32)
    assert_type(model.get_embedding_training_cache(), hugectr.EmbeddingTrainingCache)
    return model.get_eval_metrics()


def scored(graph: str, params: hugectr.inference.InferenceParams) -> float:
    """Return the AUC of a file's first batch."""
    session = hugectr.inference.CreateInferenceSession(graph, params)
    assert_type(session.predict([0.5], [7], [0, 1]), list[float])
    return session.evaluate(1, "valid/_file_list.txt", hugectr.DataReaderType_t.Parquet, hugectr.Check_t.Non)


def _wrong_type() -> object:
    return hugectr.CreateSolver(batchsize="64")  # type: ignore[call-overload]


def _wrong_object() -> object:
    return hugectr.Model(64)  # type: ignore[arg-type]


def _unknown_parameter() -> object:
    return described().fit(dislpay=10)  # type: ignore[call-arg]


def _wrong_number() -> object:
    return described().fit(max_iter="100")  # type: ignore[arg-type]


def _wrong_session() -> object:
    return hugectr.inference.CreateInferenceSession("graph.json", 1)  # type: ignore[arg-type]


MISTAKES: Sequence[Callable[[], object]] = (
    _wrong_type,
    _wrong_object,
    _unknown_parameter,
    _wrong_number,
    _wrong_session,
)
"""Calls that raise `WrongInputError`."""


def unknown_name() -> object:
    """Name what no release has."""
    return hugectr.CreateSolvers  # type: ignore[attr-defined]


def unknown_session() -> object:
    """Name what no release has in its module."""
    return hugectr.inference.InferenceSessions  # type: ignore[attr-defined]
