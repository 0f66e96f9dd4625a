# SPDX-License-Identifier: Apache-2.0
"""Sessions with narrower numbers, and what they change."""

import numpy as np
import pytest

from terarec.embedding import QuantizedCollection
from terarec.errors import ConfigError
from terarec.models.narrow import Int8Linear
from terarec.serve import InferenceSession, ServedTables
from terarec.spec import HostMemorySpec, Numbers, ParameterServerSpec
from tests.cli.conftest import figures
from tests.errors import at
from tests.serve.conftest import TrainedRun

TABLES = ServedTables(server=ParameterServerSpec(tiers=(HostMemorySpec(),)))


@pytest.mark.parametrize(
    ("row_type", "precision", "kind"),
    [("int8", None, QuantizedCollection), ("fp32", "int8", Int8Linear), ("fp32", "bf16", None)],
)
def test_scores_move_a_little(
    trained: TrainedRun, session: InferenceSession, row_type: str, precision: str | None, kind: type | None
) -> None:
    records = trained.records(0, 300)
    narrow = InferenceSession.open(trained.path, numbers=Numbers(row_type=row_type, precision=precision))
    assert kind is None or any(isinstance(module, kind) for module in narrow._weights.current.model.modules())
    difference = np.abs(narrow.predict(records) - session.predict(records))
    assert 0 < difference.max() <= 0.05  # inputs of 7 bits
    assert narrow.predict(trained.records(0, 0)).shape == (0, 1)


def test_layers_of_integers_score_each_record_by_itself(trained: TrainedRun) -> None:
    session, records = InferenceSession.open(trained.path, numbers=Numbers(precision="int8")), trained.records(0, 20)
    alone = session.predict(records)
    strange = trained.records(0, 21)
    for name in ("I1", "I2", "I3"):
        strange[name][20] = 10**18
    assert np.abs(session.predict(strange)[:20] - alone).max() <= 1e-6
    assert np.abs(session.predict(trained.records(0, 1)) - alone[:1]).max() <= 1e-6


def test_layers_of_integers_over_a_parameter_server(trained: TrainedRun) -> None:
    records = trained.records(0, 50)
    expected = InferenceSession.open(trained.path, numbers=Numbers(precision="int8")).predict(records)
    with InferenceSession.open(trained.path, tables=TABLES, numbers=Numbers(precision="int8")) as served:
        assert np.array_equal(served.predict(records), expected)
    with pytest.raises(ConfigError, check=at("row_type")):
        InferenceSession.open(trained.path, tables=TABLES, numbers=Numbers(row_type="int8"))


def test_executors_are_for_fp32(trained: TrainedRun) -> None:
    assert InferenceSession.open(trained.path, numbers=Numbers(precision="int8"), executor="measure").executors == {}
    with pytest.raises(ConfigError, check=at("executor")):
        InferenceSession.open(trained.path, numbers=Numbers(precision="bf16"), executor="onnxruntime")


def test_evaluate_tells_the_change(trained: TrainedRun) -> None:
    run, data = trained.path, trained.data
    whole = figures("evaluate", run, "--data", data)
    narrow = figures("evaluate", run, "--data", data, "--row-type", "int8", "--precision", "int8")
    assert narrow["auc"] == pytest.approx(whole["auc"] + narrow["auc_change"], abs=1e-9)
    assert 0 < abs(narrow["logloss_change"]) <= 0.01
    assert "auc_change" not in whole
