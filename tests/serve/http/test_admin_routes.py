# SPDX-License-Identifier: Apache-2.0
"""What administrators change over HTTP: the pointer that the command line changes, and nothing outside it."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from terarec.serve import ServedModels
from terarec.serve.loading import VersionLoader
from terarec.serve.repository import POINTER_FILE, ModelRepository
from terarec.serve.watching import repository_models
from terarec.spec import AccessSpec, ServingSpec
from terarec.spec.serving_repository import PromotionSpec, RepositorySpec
from tests.serve.conftest import TrainedRun
from tests.serve.http.serving import Served, served
from tests.serve.http.test_api_routes import tensors
from tests.waiting import PATIENCE, wait_for

SHOP = "/v1/repository/models/shop"


@contextmanager
def serving(repository: Path, *, access: AccessSpec | None = None, control: str = "none") -> Iterator[Served]:
    """A server of a repository that follows nothing but calls."""
    spec = RepositorySpec(path=str(repository), control=control)  # type: ignore[arg-type]
    with (
        repository_models(spec, VersionLoader()) as models,
        served(models, ServingSpec(access=access or AccessSpec())) as server,
    ):
        yield server


def version_of(client: httpx.Client, trained: TrainedRun, **parameters: str) -> str:
    """The version that answers a request."""
    body = {"inputs": tensors(trained.records(0, 2)), "parameters": parameters}
    answer = client.post("/v2/models/shop/infer", json=body)
    assert answer.status_code == 200, answer.text
    version: str = answer.json()["model_version"]
    return version


def client_of(url: str, **headers: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=PATIENCE, headers=headers)


@pytest.mark.slow
def test_versions_change_as_by_the_command_line(repository: Path, trained: TrainedRun) -> None:
    model = ModelRepository(repository).model("shop")
    with serving(repository) as server, client_of(server.url) as client:
        assert version_of(client, trained) == "1"
        answer = client.post(f"{SHOP}/promote", json={"version": 2, "share": 0.5, "by": "user"})
        assert (answer.status_code, answer.json()) == (200, {"model": "shop", **model.pointer().roles()})
        assert (answer.json()["answers"], answer.json()["split_version"]) == (1, 2)
        # The call has begun to load the version, which takes its share once it is ready.
        wait_for(lambda: {version_of(client, trained, user=str(user)) for user in range(20)} == {"1", "2"})
        assert client.post(f"{SHOP}/promote", json={"version": 2, "shadow": 0.25}).json()["shadow_share"] == 0.25
        assert client.post(f"{SHOP}/promote", json={"version": 2}).json()["answers"] == 2
        wait_for(lambda: version_of(client, trained) == "2")
        assert client.post(f"{SHOP}/rollback").json()["answers"] == 1
        assert version_of(client, trained) == "1"  # which was in memory
        assert client.post(f"{SHOP}/rollback", json={"to": 2}).json()["answers"] == 2
        actions = [event.action for event in model.pointer().history][-5:]
        assert actions == ["split", "shadow", "promote", "rollback", "rollback"]


def test_calls_and_the_command_line_change_one_pointer(repository: Path) -> None:
    """No change is lost, whoever makes it: each finds the pointer that the one before has left."""
    model = ModelRepository(repository).model("shop")
    before = len(model.pointer().history)
    with serving(repository, control="poll") as server, client_of(server.url) as client, ThreadPoolExecutor(4) as pool:

        def call(number: int) -> str:
            answer = client.post(f"{SHOP}/promote", json={"version": 1 + number % 2})
            return "" if answer.status_code == 200 else answer.text

        def command(number: int) -> str:
            model.promote(1 + number % 2, PromotionSpec())
            return ""

        assert set(pool.map(lambda number: (call, command)[number % 2](number // 2), range(32))) == {""}
    assert len(model.pointer().history) == before + 32


WRONG: dict[str, tuple[str, Any, int, str]] = {
    "no body": ("promote", None, 400, "version: missing"),
    "no number": ("promote", {"version": "2"}, 400, "version: got '2'"),
    "truth": ("promote", {"version": True}, 400, "version: got True"),
    "a path": ("promote", {"version": "../../shop/1"}, 400, "version: got '../../shop/1'"),
    "below one": ("promote", {"version": -1}, 400, "version: got -1"),
    "too high": ("promote", {"version": 10**10}, 400, "version: got 10000000000"),
    "no version": ("promote", {"version": 7}, 400, "version: model 'shop' has no version 7"),
    "a share of all": ("promote", {"version": 2, "share": 1.5, "by": "user"}, 400, "share: got 1.5"),
    "a share by nothing": ("promote", {"version": 2, "share": 0.5}, 400, "by: got"),
    "of a run": ("promote", {"version": 2, "keep": 1}, 400, "the body: unknown field 'keep'"),
    "a shadow of itself": ("promote", {"version": 2, "shadow": 0.5}, 400, "PromotionSpec.shadow: version 2 answers"),
    "no list": ("rollback", [1], 400, "the body: got [1]"),
    "back to nothing": ("rollback", {"to": 9}, 400, "version: model 'shop' has no version 9"),
}


@pytest.fixture(scope="module")
def standing(two_versions: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Path]]:
    """A client of a server, and its repository, which no test changes."""
    path = tmp_path_factory.mktemp("standing") / "models"
    shutil.copytree(two_versions, path)
    with serving(path) as server, client_of(server.url) as client:
        yield client, path


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_changes_nothing(standing: tuple[httpx.Client, Path], case: str) -> None:
    client, repository = standing
    call, body, status, error = WRONG[case]
    pointer = (repository / "shop" / POINTER_FILE).read_bytes()
    answer = client.post(f"{SHOP}/{call}", content=b"" if body is None else json.dumps(body))
    assert answer.status_code == status
    assert answer.json()["error"].startswith(error), answer.text
    assert (repository / "shop" / POINTER_FILE).read_bytes() == pointer


@pytest.mark.parametrize("name", ["other", "..", "%2e%2e", "..%2Fshop", "shop%2F1", "%2Ftmp", "shop%00", ".", "%0A"])
def test_names_lead_to_models_of_the_repository_alone(standing: tuple[httpx.Client, Path], name: str) -> None:
    client, repository = standing
    before = sorted(repository.parent.rglob("*"))
    for call, body in (("promote", {"version": 1}), ("rollback", {})):
        # Sent as it is: a client's library would resolve the dots.
        answer = client.send(raw_post(client, f"/v1/repository/models/{name}/{call}", json.dumps(body)))
        assert answer.status_code in (400, 404)
        assert list(answer.json()) == ["error"]
    assert sorted(repository.parent.rglob("*")) == before


def raw_post(client: httpx.Client, path: str, body: str) -> httpx.Request:
    request = client.build_request("POST", "/", content=body)
    request.url = request.url.copy_with(raw_path=path.encode())
    return request


def test_a_link_that_leads_out_is_not_written_through(repository: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(repository / "shop", outside)
    model = ModelRepository(tmp_path).model("outside")
    model.promote(2, PromotionSpec(shadow=0.5))
    pointer = (outside / POINTER_FILE).read_bytes()
    with serving(repository) as server, client_of(server.url) as client:
        (repository / "evil").symlink_to(outside)
        for call, body in (("promote", {"version": 2}), ("rollback", {}), ("rollback", {"to": 2})):
            answer = client.post(f"/v1/repository/models/evil/{call}", json=body)
            assert answer.status_code == 400
            assert "a link to" in answer.json()["error"]
    assert (outside / POINTER_FILE).read_bytes() == pointer


def test_administration_needs_its_token_or_its_address(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "users").write_text("user\n")
    (tmp_path / "admins").write_text("admin\n")
    access = AccessSpec(token_file=str(tmp_path / "users"), admin_token_file=str(tmp_path / "admins"), admin_port=0)
    calls = (f"{SHOP}/promote", f"{SHOP}/rollback")
    with serving(repository, access=access) as server:
        pointer = (repository / "shop" / POINTER_FILE).read_bytes()
        admin_url = f"http://127.0.0.1:{server.admin_port}"
        for url, token, status in ((server.url, "admin", 403), (admin_url, "user", 401), (admin_url, "other", 401)):
            with client_of(url, Authorization=f"Bearer {token}") as client:
                assert {client.post(call, json={"version": 2}).status_code for call in calls} == {status}
        assert (repository / "shop" / POINTER_FILE).read_bytes() == pointer
        with client_of(admin_url, Authorization="Bearer admin") as client:
            assert client.post(calls[0], json={"version": 2}).json()["answers"] == 2


def test_a_server_without_a_repository_has_no_versions_to_choose(models: ServedModels) -> None:
    with served(models) as server, client_of(server.url) as client:
        for call in ("promote", "rollback"):
            answer = client.post(f"/v1/repository/models/dlrm/{call}", json={"version": 1} if call == "promote" else {})
            assert answer.status_code == 503
            assert "expected a model repository" in answer.json()["error"]
        assert client.post("/v1/shutdown").status_code == 404  # only the server that is assembled can be ended


def test_bodies_are_described(standing: tuple[httpx.Client, Path]) -> None:
    client, _ = standing
    document = client.get("/openapi.json").json()
    body = document["paths"]["/v1/repository/models/{name}/promote"]["post"]["requestBody"]
    assert body["required"]
    assert body["content"]["application/json"]["schema"]["$ref"].endswith("/Promotion")
    assert set(document["components"]["schemas"]["Promotion"]["properties"]) == {"version", "share", "by", "shadow"}
