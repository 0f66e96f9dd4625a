# SPDX-License-Identifier: Apache-2.0
"""Second versions: the requests that they answer follow from a key, and what they score besides is bounded."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from terarec.serve import InferenceSession, ServedModels
from terarec.serve.protocol import InferRequest, InferResponse, Tensor
from terarec.serve.routing import Route, Router, position
from terarec.serve.served_model import ServedModel
from terarec.spec.dataset import MISSING_KEY
from terarec.spec.serving_repository import ShadowSpec, SplitSpec
from tests.serve.conftest import TrainedRun
from tests.serve.test_watching import request_of
from tests.waiting import PATIENCE, wait_for


@pytest.fixture
def models() -> Iterator[ServedModels]:
    with ServedModels() as models, closing(Router(models)) as router:
        models.router = router
        yield models


@pytest.fixture
def router(models: ServedModels) -> Router:
    assert isinstance(models.router, Router)
    return models.router


def keyed(data: Any) -> InferRequest:
    return InferRequest(inputs=(Tensor(name="user", datatype="BYTES", shape=(len(data),), data=data),))


def test_a_share_of_the_keys_lies_below_it_and_a_larger_one_keeps_them() -> None:
    places = [position("shop", f"user {number}") for number in range(10_000)]
    for share in (0.01, 0.1, 0.5, 0.9):
        below = sum(place < share for place in places) / len(places)
        assert below == pytest.approx(share, abs=4 * (share * (1 - share) / len(places)) ** 0.5)
    # For ever and on every machine; another model has other places.
    assert position("shop", "u1") == 0.418222053416152
    assert position("books", "u1") != position("shop", "u1")


def test_equal_keys_get_the_same_version_however_they_are_written(router: Router) -> None:
    router.set_route("shop", Route(split=SplitSpec(version=2, share=0.5, by="user")))

    def chosen(request: InferRequest) -> str | None:
        return router.choose(request, "shop")

    for number in range(50):
        forms: list[Any] = [
            [number],
            [str(number)],
            [float(number)],
            [str(number).encode()],
            np.array([number]),
            np.array([[number]], dtype=np.float32),
            np.array([str(number)], dtype=object),
            pa.array([str(number)], pa.large_string()),
        ]
        found = {chosen(keyed(form)) for form in forms}
        found |= {chosen(InferRequest(inputs=(), parameters={"user": form})) for form in (number, str(number))}
        assert len(found) == 1, number
    # The first record decides, and a parameter before it.
    first = keyed(["a", "b", "c"])
    assert chosen(first) == chosen(keyed(["a"]))
    by_parameter = InferRequest(inputs=first.inputs, parameters={"user": "b"})
    assert chosen(by_parameter) == chosen(keyed(["b"]))


@pytest.mark.parametrize(
    "data", [[None], [], [""], [b""], [float("nan")], [MISSING_KEY], np.array([MISSING_KEY]), pa.array([""])]
)
def test_requests_without_a_key_go_to_the_version_that_answers(router: Router, data: list[Any]) -> None:
    router.set_route("shop", Route(split=SplitSpec(version=2, share=0.999, by="user")))
    assert router.choose(keyed(data), "shop") is None
    assert router.choose(InferRequest(inputs=()), "shop") is None
    assert router.choose(keyed(["x"]), "books") is None


def test_a_key_that_is_missing_by_another_tensor_is_none(router: Router) -> None:
    """As in the columns that the model reads: a mask, an empty list."""
    router.set_route("shop", Route(split=SplitSpec(version=2, share=0.999, by="user")))
    for name, datatype, values in (("user.missing", "BOOL", [[True], [False]]), ("user.lengths", "INT64", [[0], [1]])):
        companions = [Tensor(name=name, datatype=datatype, shape=(1,), data=data) for data in values]
        requests = [InferRequest(inputs=(*keyed(["u1"]).inputs, tensor)) for tensor in companions]
        assert [router.choose(request, "shop") for request in requests] == [None, "2"]


@pytest.mark.parametrize(
    ("scores", "shape"),
    [([float("nan")] * 2, (2, 1)), ([float("inf")] * 2, (2, 1)), ([0.5], (1, 1)), ([0.5] * 6, (2, 3))],
)
def test_scores_that_cannot_be_compared_are_counted_as_errors(
    models: ServedModels, router: Router, trained: TrainedRun, scores: list[float], shape: tuple[int, int]
) -> None:
    """NaN counted as no difference at all, and one score as that of each record."""
    for version in ("1", "2"):
        session = InferenceSession.open(trained.path)
        models.install(ServedModel(session, name="shop", version=version), is_default=version == "1")
    router.set_route("shop", Route(shadow=ShadowSpec(version=2, share=1.0)))
    answer: Future[InferResponse] = Future()
    output = Tensor(name="score", datatype="FP32", shape=shape, data=np.array(scores, np.float32))
    answer.set_result(InferResponse(model_name="shop", model_version="2", outputs=(output,)))
    with mock.patch.object(models.get("shop", "2"), "submit", return_value=answer):
        models.submit(request_of(trained, 0, 2), "shop").result(PATIENCE)
        wait_for(lambda: router.statistics("shop").failed == 1)
    assert router.statistics("shop").requests == 0
    models.submit(request_of(trained, 0, 2), "shop").result(PATIENCE)
    wait_for(lambda: router.statistics("shop").requests == 1)
    assert (router.statistics("shop").max_difference, router.statistics("shop").sum_difference) == (0.0, 0.0)


def test_a_second_version_that_is_gone_leaves_its_requests_to_the_other(
    models: ServedModels, router: Router, trained: TrainedRun
) -> None:
    models.install(ServedModel(InferenceSession.open(trained.path), name="shop", version="1"))
    router.set_route("shop", Route(split=SplitSpec(version=2, share=0.999, by="user")))
    request = request_of(trained, 0, 2, user="u1")
    assert router.choose(request, "shop") == "2"
    assert models.submit(request, "shop").result(PATIENCE).model_version == "1"


def test_a_version_that_is_named_is_not_changed(models: ServedModels, router: Router, trained: TrainedRun) -> None:
    for version in ("1", "2"):
        session = InferenceSession.open(trained.path)
        models.install(ServedModel(session, name="shop", version=version), is_default=version == "1")
    router.set_route("shop", Route(split=SplitSpec(version=2, share=0.999, by="user")))
    request = request_of(trained, 0, 2, user="u1")
    assert models.submit(request, "shop").result(PATIENCE).model_version == "2"
    assert models.submit(request, "shop", "1").result(PATIENCE).model_version == "1"


def test_what_waits_for_a_second_version_is_bounded(router: Router) -> None:
    router.set_route("shop", Route(shadow=ShadowSpec(version=2, share=1.0)))
    never: Future[InferResponse] = Future()
    for number in range(300):
        router.observe(keyed([number]), "shop", never)
    wait_for(lambda: router.statistics("shop").dropped >= 43)
    # One is being compared, 256 wait.
    assert router.statistics("shop").dropped in (43, 44)
    large = keyed(["x"] * 65_536)
    router.observe(large, "shop", never)
    assert router.statistics("shop").dropped in (44, 45)
    never.cancel()
    wait_for(lambda: router._records == router._num_bytes == 0)
    assert router.statistics("shop").requests == 0


def test_long_values_that_wait_for_a_second_version_are_bounded(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records alone were counted, of which each may be as long as a body."""
    monkeypatch.setattr("terarec.serve.routing._MOST_BYTES", 10_000)
    router.set_route("shop", Route(shadow=ShadowSpec(version=2, share=1.0)))
    never: Future[InferResponse] = Future()
    for _ in range(5):
        router.observe(keyed(["x" * 4000]), "shop", never)
    assert router.statistics("shop").dropped == 3
    never.cancel()
    wait_for(lambda: router._records == router._num_bytes == 0)


def test_a_request_that_the_second_version_cannot_score_is_counted(
    models: ServedModels, router: Router, trained: TrainedRun
) -> None:
    models.install(ServedModel(InferenceSession.open(trained.path), name="shop", version="1"))
    router.set_route("shop", Route(shadow=ShadowSpec(version=2, share=1.0)))
    assert models.submit(request_of(trained, 0, 2), "shop").result(PATIENCE).model_version == "1"
    wait_for(lambda: router.statistics("shop").failed == 1)
    # Its model may raise anything, which ends nothing else.
    second = ServedModel(InferenceSession.open(trained.path), name="shop", version="2")
    models.install(second, is_default=False)
    with mock.patch.object(second, "submit", side_effect=RuntimeError("a defect")):
        models.submit(request_of(trained, 0, 2), "shop").result(PATIENCE)
        wait_for(lambda: router.statistics("shop").failed == 2)
    models.submit(request_of(trained, 0, 2), "shop").result(PATIENCE)
    wait_for(lambda: router.statistics("shop").requests == 1)


def test_a_router_ends_while_requests_wait(models: ServedModels) -> None:
    router = Router(models)
    router.set_route("shop", Route(shadow=ShadowSpec(version=2, share=1.0)))
    never: Future[InferResponse] = Future()
    for number in range(300):
        router.observe(keyed([number]), "shop", never)
    time.sleep(0.01)
    never.set_exception(RuntimeError())
    router.close()
    assert not router._thread.is_alive()
