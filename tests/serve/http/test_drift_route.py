# SPDX-License-Identifier: Apache-2.0
"""The path of the drift, and its metrics."""

from collections.abc import Iterator, Mapping, Sequence

import httpx
import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families

from terarec.serve import InferenceSession, ServedModel, ServedModels
from terarec.serve.drift_counts import DriftCounts
from terarec.serve.input_drift import InputDrift, ModelDrift
from tests.serve.http.serving import served
from tests.waiting import PATIENCE


class FixedDrift:
    """Comparisons that are there already."""

    def __init__(self, *found: ModelDrift) -> None:
        self._found = found

    def add(self, model: ServedModel, columns: Mapping[str, pa.Array], num_records: int) -> None:
        raise AssertionError("no records are sampled here")

    def counts(self) -> Sequence[DriftCounts]:
        return ()

    def read(self, others: Sequence[DriftCounts] = ()) -> Sequence[ModelDrift]:
        return self._found

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def models(session: InferenceSession) -> Iterator[ServedModels]:
    """Two models."""
    with ServedModels() as found:
        found.install(ServedModel(session, name="dlrm", version="3"))
        found.install(ServedModel(session, name="other", version="1"))
        yield found


def drift_of_two() -> FixedDrift:
    """Drift of a column that has moved, of one that has a little, and of one without values; and none of a model."""
    inputs = (
        InputDrift(name="C1", stability_index=0.71, missing=(0.01, 0.4), rare=(0.02, 0.03)),
        InputDrift(name="I1", stability_index=0.12, missing=(0.2, 0.21), rare=(0.0, 0.0)),
        InputDrift(name="C2", stability_index=None, missing=(0.0, 1.0), rare=(0.0, 0.0)),
    )
    found = ModelDrift(model="dlrm", version="3", records=420, reference_records=131072, inputs=inputs)
    former = ModelDrift(model="dlrm", version="2", records=9, reference_records=131072, inputs=inputs)
    return FixedDrift(ModelDrift(model="other", version="1", problem="shop/data: no data set"), former, found)


def test_the_last_comparisons_of_what_is_served_are_shown(models: ServedModels) -> None:
    with served(models, drift=drift_of_two()) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        dlrm, other = client.get("/drift").json()["models"]
        text = client.get("/metrics").text
    assert (dlrm["model"], dlrm["version"], dlrm["records"], dlrm["reference_records"]) == ("dlrm", "3", 420, 131072)
    assert dlrm["inputs"][0] == {"name": "C1", "stability_index": 0.71, "missing": [0.01, 0.4], "rare": [0.02, 0.03]}
    assert dlrm["inputs"][2]["stability_index"] is None
    assert other["problem"] == "shop/data: no data set"
    found = {family.name: family.samples for family in text_string_to_metric_families(text)}
    indices = {sample.labels["column"]: sample.value for sample in found["terarec_input_drift"]}
    assert indices == {"C1": 0.71, "I1": 0.12}
    assert [sample.value for sample in found["terarec_input_drift_records"]] == [420, 0]


def test_nothing_is_compared_without_being_asked(models: ServedModels) -> None:
    with served(models) as server:
        assert httpx.get(f"{server.url}/drift", timeout=PATIENCE).json() == {"models": None}
