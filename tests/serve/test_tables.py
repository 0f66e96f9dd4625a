# SPDX-License-Identifier: Apache-2.0
"""Sessions whose tables are in a parameter server."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from terarec.errors import ConfigError
from terarec.ps import ParameterServer
from terarec.serve import InferenceSession, ServedTables
from terarec.spec import (
    CacheSpec,
    DLRMSpec,
    DynamicTablesSpec,
    HostMemorySpec,
    ParameterServerSpec,
    RowFileSpec,
    RunSpec,
    StaticTablesSpec,
    Tiers,
    TrainingSpec,
)
from terarec.train.run import build
from tests.errors import at
from tests.serve.conftest import TrainedRun

HOST = ParameterServerSpec(tiers=(HostMemorySpec(),))


def on_disk(path: Path) -> ParameterServerSpec:
    return ParameterServerSpec(tiers=(RowFileSpec(path=str(path)),))


def test_scores_are_those_of_tables_in_memory(trained: TrainedRun, session: InferenceSession, tmp_path: Path) -> None:
    records = trained.records(0, 300)
    expected = session.predict(records)
    for spec in (HOST, on_disk(tmp_path / "rows")):
        with InferenceSession.open(trained.path, tables=ServedTables(server=spec)) as other:
            assert np.array_equal(other.predict(records), expected)
            assert other.step == session.step


@pytest.mark.parametrize(("form", "tolerance"), [("dynamic", 0.0), ("static", 0.0), ("int8", 0.01)])
def test_caches_in_front_of_the_tiers(
    trained: TrainedRun, session: InferenceSession, form: str, tolerance: float
) -> None:
    records = trained.records(0, 300)
    expected = session.predict(records)
    tables = ServedTables(server=HOST, cache=CacheSpec(form=form, share=0.1))  # type: ignore[arg-type]
    with InferenceSession.open(trained.path, tables=tables) as other:
        for _ in range(2):
            assert np.abs(other.predict(records) - expected).max() <= tolerance


def test_sessions_share_a_server(trained: TrainedRun, session: InferenceSession) -> None:
    with ParameterServer(HOST) as server:
        tables = ServedTables(server=server, name="dlrm")
        first, second = (InferenceSession.open(trained.path, tables=tables) for _ in range(2))
        records = trained.records(0, 10)
        assert np.array_equal(first.predict(records), session.predict(records))
        first.close()
        assert np.array_equal(second.predict(records), session.predict(records))
        assert server.versions == {"dlrm": (session.step,)}


@pytest.mark.parametrize("kind", ["dynamic", "tiers"])
def test_dynamic_tables_and_tables_in_tiers(trained: TrainedRun, tmp_path: Path, kind: str) -> None:
    """Of tables in tiers a checkpoint leaves out the rows that training has not changed."""
    in_tiers = StaticTablesSpec(tiers=Tiers(host="1MiB", file=str(tmp_path / "files")))
    spec = RunSpec(
        data=str(trained.data),
        model=DLRMSpec(width=4, bottom=(8, 4), top=(8,), tables=in_tiers if kind == "tiers" else DynamicTablesSpec()),
        training=TrainingSpec(batch_size=128, max_steps=2, reader_threads=1),
    )
    build(spec, tmp_path / "run").fit()
    records = trained.records(0, 500)
    expected = InferenceSession.open(tmp_path / "run").predict(records)
    with InferenceSession.open(tmp_path / "run", tables=ServedTables(server=HOST)) as session:
        assert np.array_equal(session.predict(records), expected)


def test_a_split_is_scored_batch_by_batch(trained: TrainedRun, session: InferenceSession) -> None:
    done: list[int] = []
    scores = list(session.predict_split(trained.data, "valid", batch_size=300, progress=done.append))
    assert [len(part) for part in scores] == [300] * (len(trained.lines) // 300) + [len(trained.lines) % 300]
    assert done[-1] == len(trained.lines)
    raw = session.predict(trained.records(0, len(trained.lines)))
    assert np.abs(np.concatenate(scores) - raw).max() <= 1e-6
    with InferenceSession.open(trained.path, tables=ServedTables(server=HOST)) as other:
        again = np.concatenate(list(other.predict_split(trained.data, "valid", batch_size=300)))
    assert np.array_equal(again, np.concatenate(scores))


def test_a_model_without_tables_holds_no_rows(trained: TrainedRun) -> None:
    with InferenceSession.open(trained.path, tables=ServedTables(server=HOST)) as session:
        held = sum(tensor.numel() for tensor in copy.copy(session._weights.current.model).state_dict().values())
        assert held == sum(parameter.numel() for parameter in session._weights.current.model.parameters())
        assert not torch.is_inference_mode_enabled()


def test_a_name_that_no_server_takes_is_rejected(trained: TrainedRun) -> None:
    with pytest.raises(ConfigError, check=at("ServedModelSpec.name")):
        InferenceSession.open(trained.path, tables=ServedTables(server=HOST, name="a b"))
