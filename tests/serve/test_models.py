# SPDX-License-Identifier: Apache-2.0
"""`ServedModels` and `ServedModel`: versions, the default one, replacement, parameters, statistics."""

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from terarec.errors import ConfigError
from terarec.serve import InferenceSession, ServedModel, ServedModels
from terarec.serve.models import ModelState
from terarec.serve.protocol import InferRequest, InferResponse, Tensor, UnknownModelError
from terarec.serve.served_records import ServedRecords
from terarec.spec import BatchingSpec, WatchingSpec
from terarec.spec.serving_options import ServedModelOptions
from tests.errors import at
from tests.serve.conftest import DENSE, TrainedRun
from tests.waiting import PATIENCE, wait_for


@pytest.fixture
def served() -> Iterator[ServedModels]:
    with ServedModels() as models:
        yield models


def request_of(trained: TrainedRun, start: int, stop: int, **parameters: object) -> InferRequest:
    inputs = tuple(
        Tensor(name=name, datatype="FP32" if name in DENSE else "BYTES", shape=(len(values),), data=values)
        for name, values in trained.records(start, stop).items()
    )
    return InferRequest(inputs=inputs, id=str(start), parameters=parameters)


def scores_of(response: InferResponse) -> np.ndarray:
    (output,) = response.outputs
    return np.array(output.data, dtype=np.float32).reshape(output.shape)


def test_a_request_gets_the_scores_of_the_session(
    served: ServedModels, trained: TrainedRun, session: InferenceSession
) -> None:
    served.install(ServedModel(session, name="dlrm"))
    response = served.submit(request_of(trained, 3, 8), "dlrm").result(timeout=PATIENCE)
    assert np.array_equal(scores_of(response), session.predict(trained.records(3, 8)))
    assert (response.model_name, response.model_version, response.id) == ("dlrm", str(session.step), "3")
    assert response.parameters == {"step": session.step}
    found = served.get("dlrm").statistics()
    assert (found.succeeded, found.records, found.failed) == (1, 5, {})
    assert found.times.compute_infer > 0
    assert found.success_ns == sum(found.times)
    assert found.last_inference_ms > 0


def test_an_answer_that_somebody_holds_does_not_keep_the_model(
    served: ServedModels, trained: TrainedRun, tmp_path: Path
) -> None:
    """A stream without further requests kept a retired version, with its tables."""
    served.observer = records = ServedRecords(WatchingSpec(record_directory=str(tmp_path), record_share=1.0))
    session = InferenceSession.open(trained.path)
    gone = weakref.ref(session)
    served.install(ServedModel(session, name="dlrm"))
    answer = served.submit(request_of(trained, 0, 1), "dlrm")
    assert answer.result(PATIENCE).outputs[0].shape == (1, 1)
    served.retire("dlrm", str(session.step))
    records.close()
    del session
    wait_for(lambda: gc.collect() >= 0 and gone() is None)
    assert not answer.cancel()


def test_the_default_version_is_the_one_installed_last(
    served: ServedModels, trained: TrainedRun, session: InferenceSession
) -> None:
    for version, is_default in (("1", False), ("2", True), ("3", False)):
        served.install(ServedModel(session, version=version), is_default=is_default)
    answers = {
        version: served.submit(request_of(trained, 0, 1), "model", version).result(timeout=PATIENCE).model_version
        for version in (None, "", "1", "3")
    }
    assert answers == {None: "2", "": "2", "1": "1", "3": "3"}
    assert served.versions("model") == ("1", "2", "3")
    served.set_default("model", "1")
    assert served.get("model").version == "1"
    served.retire("model", "1")
    assert served.get("model").version == "3"  # installed last
    assert served.index() == (
        ModelState("model", "1", "UNAVAILABLE", "unloaded"),
        ModelState("model", "2", "READY"),
        ModelState("model", "3", "READY"),
    )


def test_an_unknown_model_is_named(served: ServedModels, session: InferenceSession, trained: TrainedRun) -> None:
    with pytest.raises(UnknownModelError, check=at("model 'x'", "not served here")):
        served.get("x")
    served.install(ServedModel(session, name="x", version="4"))
    with pytest.raises(UnknownModelError, check=at("model 'x'", "has no version '5', expected '4'")):
        served.submit(request_of(trained, 0, 1), "x", "5")
    with pytest.raises(UnknownModelError, check=at("model 'x'")):
        served.set_default("x", "5")
    other = ServedModel(session, name="x", version="4")
    with pytest.raises(ConfigError, check=at("model 'x'", "version '4' is served already")):
        served.install(other)
    other.close()
    served.retire("x", "4")
    with pytest.raises(UnknownModelError, check=at("model 'x'", "not served here")):
        served.retire("x", "4")


def test_a_state_is_shown_until_the_version_is_ready(served: ServedModels, session: InferenceSession) -> None:
    served.set_state(ModelState("model", "1", "LOADING"))
    assert served.index() == (ModelState("model", "1", "LOADING"),)
    served.install(ServedModel(session, version="1"))
    served.set_state(ModelState("model", "1", "UNAVAILABLE", "late"))
    assert served.index() == (ModelState("model", "1", "READY"),)
    for version in range(2, 600):
        served.set_state(ModelState("model", str(version), "UNAVAILABLE", "damaged"))
    assert len(served.index()) < 300
    for name in map(str, range(300)):  # which lie in a repository
        served.set_state(ModelState(name, "1", "UNAVAILABLE", "unloaded"), is_bounded=False)
    served.set_state(ModelState("model", "601", "UNAVAILABLE", "damaged"))
    assert len({state.name for state in served.index()}) == 301
    assert ModelState("model", "599", "UNAVAILABLE", "damaged") in served.index()


def test_no_request_is_lost_while_versions_are_replaced(
    served: ServedModels, trained: TrainedRun, session: InferenceSession
) -> None:
    served.install(ServedModel(session, version="0"))
    is_over = threading.Event()
    expected = session.predict(trained.records(0, 4))

    def ask() -> int:
        asked = 0
        while not is_over.is_set():
            response = served.submit(request_of(trained, 0, 4), "model").result(timeout=PATIENCE)
            assert np.array_equal(scores_of(response), expected)
            asked += 1
        return asked

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        for version in range(1, 20):
            served.install(ServedModel(session, version=str(version)))
            served.retire("model", str(version - 1))
        is_over.set()
        assert all(asked.result(timeout=PATIENCE) for asked in asking)


@pytest.mark.parametrize(("name", "value"), [("priority", -1), ("priority", True), ("timeout", 1.5), ("timeout", "1")])
def test_a_bad_parameter_is_named(session: InferenceSession, trained: TrainedRun, name: str, value: object) -> None:
    model = ServedModel(session)
    with pytest.raises(ConfigError, check=at(f"parameters.{name}")):
        model.submit(request_of(trained, 0, 1, **{name: value}))
    model.close()


def test_parameters_reach_the_batcher(session: InferenceSession, trained: TrainedRun) -> None:
    batching = BatchingSpec(priority_levels=2, default_priority_level=2, max_queue_delay_microseconds=50_000_000)
    model = ServedModel(session, ServedModelOptions(batching=batching))
    response = model.submit(request_of(trained, 0, 1, priority=1, timeout=100_000))
    assert response.result(timeout=PATIENCE).outputs[0].shape == (1, 1)
    model.close()


def test_changes_are_told(trained: TrainedRun) -> None:
    changes: list[int] = []
    models = ServedModels()
    models.on_change = lambda: changes.append(len(models.versions("m")) if models.index()[0].state == "READY" else 0)
    models.install(ServedModel(InferenceSession.open(trained.path), name="m"))
    models.close()
    assert changes == [1, 0]
