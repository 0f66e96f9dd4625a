# SPDX-License-Identifier: Apache-2.0
"""A server of a repository: the promoted version answers, and no other one until it has shown that it scores right."""

import contextlib
import gc
import itertools
import json
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch

from terarec.apps.promotion import promote
from terarec.errors import ConfigError, DataNotFoundError, NoSpaceError, StorageError
from terarec.io.opening import sha256_of
from terarec.serve import InferenceClient, InferenceSession, RunningServer, ServedModels, serve
from terarec.serve.api import InferenceApi
from terarec.serve.loading import VersionLoader
from terarec.serve.protocol import InferRequest, InferResponse, Tensor, UnavailableError, UnknownModelError
from terarec.serve.repository import ModelRepository, RepositoryModel
from terarec.serve.routing import Router
from terarec.serve.served_model import ServedModel
from terarec.serve.watching import RepositoryWatcher, repository_models
from terarec.spec import ServedTablesSpec, ServingSpec, to_data
from terarec.spec.serving_repository import AllVersions, PromotionSpec, RepositoryModelSpec, RepositorySpec
from tests.errors import at
from tests.serve.conftest import TrainedRun
from tests.waiting import PATIENCE, wait_for

ALL = PromotionSpec()


def request_of(trained: TrainedRun, start: int, stop: int, **parameters: Any) -> InferRequest:
    columns = trained.records(start, stop)
    tensors = (
        Tensor(name=name, datatype="INT64" if name.startswith("I") else "BYTES", shape=(stop - start,), data=values)
        for name, values in columns.items()
    )
    return InferRequest(inputs=tuple(tensors), parameters=parameters)


def scores_of(answer: InferResponse) -> npt.NDArray[np.float32]:
    return np.asarray(answer.outputs[0].data, dtype=np.float32).reshape(answer.outputs[0].shape)


class Served:
    """The models of a repository whose watcher looks when a test calls `poll`."""

    def __init__(self, models: ServedModels, watcher: RepositoryWatcher, trained: TrainedRun) -> None:
        self.models = models
        self.watcher = watcher
        self._trained = trained

    def version(self, version: str | None = None, name: str = "shop") -> str:
        """The version that answers a request."""
        return self.models.submit(request_of(self._trained, 0, 3), name, version).result(PATIENCE).model_version

    def states(self) -> dict[str, str]:
        return {state.version: state.state for state in self.models.index()}

    def reason(self, version: str) -> str:
        return next(state.reason for state in self.models.index() if state.version == version)

    def poll(self) -> None:
        """Look, and wait for what is loaded."""
        self.watcher.poll()
        self.watcher._wait(list(self.watcher._watched))


@contextmanager
def served(path: Path, trained: TrainedRun, loader: VersionLoader | None = None, **options: Any) -> Iterator[Served]:
    spec = RepositorySpec(path=str(path), **{"poll_seconds": 1e6, **options})
    loader = loader or VersionLoader(follow_runs=spec.follow_runs)
    with closing(loader), ServedModels() as models, closing(Router(models)) as router:
        models.router = router
        with RepositoryWatcher(models, loader, spec, router) as watcher:
            yield Served(models, watcher, trained)


@pytest.fixture
def shop(repository: Path) -> RepositoryModel:
    return ModelRepository(repository).known("shop")


def test_a_promoted_version_takes_over_and_a_return_needs_no_loading(
    repository: Path, shop: RepositoryModel, trained: TrainedRun
) -> None:
    with served(repository, trained) as server:
        assert server.version() == "1"
        first = server.models.get("shop")
        shop.promote(2, ALL)
        server.poll()
        assert server.version() == "2"
        assert server.states() == {"1": "READY", "2": "READY"}
        shop.roll_back()
        assert server.watcher.poll() == 0
        assert server.models.get("shop") is first
        # What was promoted last stays, too: to be promoted again.
        assert server.version("2") == "2"
        server.poll()
        assert server.version() == "1"


def test_former_versions_are_retired_beyond_those_that_are_kept(
    repository: Path, shop: RepositoryModel, trained: TrainedRun
) -> None:
    with served(repository, trained, keep_versions=0) as server:
        shop.promote(2, ALL)
        server.poll()
        wait_for(lambda: server.states() == {"1": "UNAVAILABLE", "2": "READY"})
        with pytest.raises(UnknownModelError):
            server.version("1")
        shop.roll_back()
        server.poll()
        assert server.version() == "1"


def test_a_version_that_is_retired_leaves_memory_and_goes_on_counting(
    repository: Path, shop: RepositoryModel, trained: TrainedRun
) -> None:
    with served(repository, trained, keep_versions=0) as server:
        server.version()
        first = weakref.ref(server.models.get("shop"))
        shop.promote(2, ALL)
        server.poll()
        wait_for(lambda: server.states() == {"1": "UNAVAILABLE", "2": "READY"})
        wait_for(lambda: gc.collect() >= 0 and first() is None)
        shop.roll_back()
        server.poll()
        server.version()
        assert server.models.get("shop").statistics().succeeded == 2


def test_scores_are_those_of_the_runs(
    repository: Path, shop: RepositoryModel, trained: TrainedRun, other_run: Path
) -> None:
    request, records = request_of(trained, 0, 40), trained.records(0, 40)
    with served(repository, trained) as server:
        answer = server.models.submit(request, "shop").result(PATIENCE)
        assert np.allclose(scores_of(answer), InferenceSession.open(trained.path).predict(records), atol=1e-6)
        shop.promote(2, ALL)
        server.poll()
        answer = server.models.submit(request, "shop").result(PATIENCE)
        assert np.allclose(scores_of(answer), InferenceSession.open(other_run).predict(records), atol=1e-6)
        assert answer.parameters["step"] == 8


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()  # not through a link
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("checkpoints/step-00000008/dense.safetensors", "SHA-256"),
        ("checkpoints/step-00000008/tables/C3-00000.safetensors", "SHA-256"),
        ("dataset/workflow/states/02-categorify-C3.parquet", "SHA-256 is not the one that was promoted"),
        ("run.json", "SHA-256 is not the one that was promoted"),
        ("golden.safetensors", "SHA-256 is not the one that was promoted"),
    ],
)
def test_a_damaged_version_is_refused_and_the_former_one_answers(
    repository: Path, shop: RepositoryModel, trained: TrainedRun, file: str, problem: str
) -> None:
    sound = (shop.path / "2" / file).read_bytes()
    damage(shop.path / "2" / file)
    with served(repository, trained) as server:
        shop.promote(2, ALL)
        server.poll()
        assert server.version() == "1"
        assert server.states() == {"1": "READY", "2": "UNAVAILABLE"}
        reason = server.reason("2")
        assert reason.startswith("model 'shop' version 2: ")
        assert problem in reason
        assert "\n" not in reason
        (shop.path / "2" / file).write_bytes(sound)
        assert server.watcher.poll() == 0  # it is not loaded again and again
        shop.promote(2, ALL)
        server.poll()
        assert server.version() == "2"


def test_a_version_that_scores_otherwise_than_its_run_is_refused(
    repository: Path, shop: RepositoryModel, trained: TrainedRun
) -> None:
    shutil.rmtree(shop.path / "2" / "checkpoints")
    shutil.copytree(shop.path / "1" / "checkpoints", shop.path / "2" / "checkpoints")
    loader = VersionLoader(tables=ServedTablesSpec())
    with served(repository, trained, loader) as server:
        shop.promote(2, ALL)
        server.poll()
        assert server.version() == "1"
        assert "off those of the run, expected at most 0.0001" in server.reason("2")
        assert loader._server is not None
        assert loader._server.versions == {"shop": (1,)}


def test_a_version_that_does_not_fit_in_memory_is_refused_before_it_is_read(
    repository: Path, shop: RepositoryModel, trained: TrainedRun
) -> None:
    file = shop.path / "2" / "version.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"memory_bytes": 1 << 50}))
    shutil.rmtree(shop.path / "2" / "checkpoints")
    with served(repository, trained) as server:
        shop.promote(2, ALL)
        server.poll()
        assert server.version() == "1"
        assert "tables and layers: 1,125,899,906,842,624 bytes requested" in server.reason("2")


def test_a_version_is_tried_again_where_the_machine_may_have_room_by_then(
    repository: Path, shop: RepositoryModel, trained: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After pauses, and with its reason in the index; one that is damaged is not."""
    sizes, available = list[int](), 1 << 50

    def available_bytes() -> int:
        sizes.append(available)
        return available

    monkeypatch.setattr("terarec.kernels.memory.available_bytes", available_bytes)
    with served(repository, trained, poll_seconds=0.02) as server:
        available = 0
        shop.promote(2, ALL)
        wait_for(lambda: sizes.count(0) > 2)
        assert server.version() == "1"
        assert "0 available" in server.reason("2")
        available = 1 << 50
        wait_for(lambda: server.version() == "2")
        assert server.states() == {"1": "READY", "2": "READY"}


def test_a_version_that_does_not_fit_on_a_gpu_is_refused(
    shop: RepositoryModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (1000, 2000))
    with (
        closing(VersionLoader(device=torch.device("cuda", 0))) as loader,
        pytest.raises(NoSpaceError, check=at("model 'shop' version 2: tables and layers", "1,000 available")),
    ):
        loader.load(shop, 2)


def test_a_file_that_a_version_names_outside_of_it_is_not_read(
    repository: Path, shop: RepositoryModel, trained: TrainedRun, tmp_path: Path
) -> None:
    description = shop.path / "2" / "version.json"
    content = json.loads(description.read_text())
    with served(repository, trained) as server:
        for files in ({"../../../secret": "0" * 64}, {"/etc/passwd": "0" * 64}):
            description.write_text(json.dumps(content | {"files": files}))
            shop.promote(2, ALL)
            server.poll()
            assert "expected relative paths inside the version" in server.reason("2")
        (tmp_path / "secret").write_text("secret")
        golden = shop.path / "2" / "golden.safetensors"
        golden.unlink()
        golden.symlink_to(tmp_path / "secret")
        description.write_text(json.dumps(content | {"files": {"golden.safetensors": sha256_of(tmp_path / "secret")}}))
        shop.promote(2, ALL)
        server.poll()
        assert "a link to" in server.reason("2")
        assert server.version() == "1"


def test_a_damaged_pointer_changes_nothing(repository: Path, shop: RepositoryModel, trained: TrainedRun) -> None:
    with served(repository, trained) as server:
        sound = (shop.path / "pointer.json").read_text()
        (shop.path / "pointer.json").write_text(sound[:-5])
        server.poll()
        assert server.version() == "1"
        assert "pointer.json" in server.reason("")
        (shop.path / "pointer.json").write_text(sound)
        shop.promote(2, ALL)
        server.poll()
        assert server.version() == "2"
        assert "" not in server.states()


def test_where_the_promoted_version_is_refused_at_the_start_the_one_before_answers(
    repository: Path, shop: RepositoryModel, trained: TrainedRun
) -> None:
    shop.promote(2, ALL)
    damage(shop.path / "2" / "run.json")
    with served(repository, trained) as server:
        assert server.version() == "1"
        assert server.states() == {"1": "READY", "2": "UNAVAILABLE"}
        assert server.watcher.poll() == 0


@pytest.mark.parametrize("second", ["shadow", "policy", "alone"])
def test_where_the_promoted_version_is_refused_at_the_start_no_second_one_answers_all_requests(
    repository: Path, shop: RepositoryModel, trained: TrainedRun, second: str
) -> None:
    shop.promote(2, ALL)
    shutil.copytree(shop.path / "1", shop.path / "3")
    if second == "policy":
        policy = to_data(RepositoryModelSpec(versions=AllVersions()))
        (shop.path / "model.json").write_text(json.dumps({"format": RepositoryModelSpec.format, "version": 1} | policy))
    else:
        shop.promote(3, PromotionSpec(shadow=0.05))
    damage(shop.path / "2" / "run.json")
    if second == "alone":
        damage(shop.path / "1" / "run.json")
    with served(repository, trained) as server:
        if second == "alone":
            with pytest.raises(UnknownModelError):
                server.version()
        else:
            assert server.version() == "1"
            assert server.watcher.poll() == 0


@pytest.mark.parametrize("control", ["poll", "explicit"])
def test_a_model_that_cannot_be_read_does_not_keep_others_from_being_followed(
    repository: Path, shop: RepositoryModel, trained: TrainedRun, monkeypatch: pytest.MonkeyPatch, control: str
) -> None:
    (repository / "foreign" / "1").mkdir(parents=True)
    versions: Callable[[RepositoryModel], tuple[int, ...]] = vars(RepositoryModel)["versions"].fget

    def readable(model: RepositoryModel) -> tuple[int, ...]:
        if model.name == "foreign":
            raise PermissionError(13, "Permission denied", str(model.path))
        return versions(model)

    monkeypatch.setattr(RepositoryModel, "versions", property(readable))
    load = ("shop",) if control == "explicit" else ()
    with served(repository, trained, control=control, load=load) as server:
        assert server.version() == "1"
        assert "Permission denied" in server.reason("")
        shop.promote(2, ALL)
        server.poll()
        assert server.version() == "2"
        if control == "explicit":
            with pytest.raises(StorageError, match="Permission denied"):
                server.watcher.load("foreign")


def test_models_come_and_go_with_the_repository(
    repository: Path, shop: RepositoryModel, trained: TrainedRun, tmp_path: Path
) -> None:
    with served(repository, trained) as server:
        shutil.copytree(shop.path, repository / "books")
        server.poll()
        assert server.version(name="books") == "1"
        (repository / "books").rename(tmp_path / "books")
        server.poll()
        wait_for(lambda: not server.models.versions("books"))
        repository.rename(tmp_path / "elsewhere")
        with pytest.raises(DataNotFoundError):
            server.watcher.poll()
        assert server.version() == "1"


def test_an_empty_repository_is_served_until_a_model_comes(
    repository: Path, trained: TrainedRun, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with served(tmp_path / "empty", trained) as server:
        assert server.models.index() == ()
        (repository / "shop").rename(tmp_path / "empty" / "shop")
        server.poll()
        assert server.version() == "1"
    with pytest.raises(DataNotFoundError, check=at(tmp_path / "none")), served(tmp_path / "none", trained):
        pass


def test_a_run_that_is_put_there_by_hand_is_served(trained: TrainedRun, tmp_path: Path) -> None:
    shutil.copytree(trained.path, tmp_path / "models" / "shop" / "3")
    with served(tmp_path / "models", trained) as server:
        assert server.version() == "3"


def test_explicit_control_loads_on_request_alone(repository: Path, shop: RepositoryModel, trained: TrainedRun) -> None:
    with served(repository, trained, control="explicit") as server:
        assert server.states() == {"2": "UNAVAILABLE"}
        server.watcher.load("shop")
        assert server.version() == "1"
        shop.promote(2, ALL)
        assert server.version() == "1"
        server.watcher.load("shop", {})
        assert server.version() == "2"
        damage(shop.path / "1" / "run.json")
        server.watcher.unload("shop")
        with pytest.raises(UnknownModelError):
            server.version()
        with pytest.raises(ConfigError, check=at("model", "is not loaded")):
            server.watcher.unload("shop")
        shop.roll_back()
        with pytest.raises(StorageError, match="SHA-256 is not the one that was promoted"):
            server.watcher.load("shop")
        with pytest.raises(ConfigError, check=at("model", "holds no 'books'")):
            server.watcher.load("books")
        # What comes and goes is seen in the index before it is loaded.
        shutil.copytree(trained.path, repository / "books" / "4")
        shutil.copytree(trained.path, repository / "shop" / "7")
        server.watcher.unload("shop")
        server.models.loader = server.watcher
        index = InferenceApi(server.models).repository_index
        assert [(state.name, state.version, state.state) for state in index()] == [
            ("books", "4", "UNAVAILABLE"),
            ("shop", "7", "UNAVAILABLE"),
        ]
        assert index(ready_only=True) == ()
        server.watcher.load("books")
        server.watcher.unload("books")
        assert [(state.name, state.state) for state in index() if state.name == "books"] == [("books", "UNAVAILABLE")]
        shutil.rmtree(repository / "books")
        assert {state.name for state in index()} == {"shop"}
        shown = index()
        repository.rename(repository.with_name("away"))
        assert index() == shown
        repository.with_name("away").rename(repository)
        with pytest.raises(ConfigError, check=at("model")):
            server.watcher.load("../shop")
        with pytest.raises(ConfigError, check=at("parameters", "got 'config'")):
            server.watcher.load("shop", {"config": "{}"})
    with served(repository, trained, control="explicit", load=("*",)) as server:
        assert server.states() == {"1": "UNAVAILABLE"}
    with (
        pytest.raises(ConfigError, check=at("model", "holds no 'books'")),
        served(repository, trained, control="explicit", load=("books",)),
    ):
        pass


def test_clients_load_models_in_explicit_control_alone(repository: Path) -> None:
    for control, is_allowed in (("poll", False), ("none", False), ("explicit", True)):
        spec = RepositorySpec(path=str(repository), control=control)  # type: ignore[arg-type]
        with repository_models(spec, VersionLoader()) as models:
            assert (models.loader is not None) == is_allowed


class GatedLoader(VersionLoader):
    """A loader that waits for a test before it loads version 2."""

    def __init__(self) -> None:
        super().__init__()
        self.is_loading = threading.Event()
        self.gate = threading.Event()

    def load(self, model: RepositoryModel, version: int) -> ServedModel:
        if version == 2:
            self.is_loading.set()
            assert self.gate.wait(PATIENCE)
        return super().load(model, version)


def test_a_rollback_does_not_wait_for_a_version_that_is_being_loaded(
    repository: Path, shop: RepositoryModel, trained: TrainedRun
) -> None:
    shutil.copytree(shop.path / "1", shop.path / "3")
    loader = GatedLoader()
    with served(repository, trained, loader) as server:
        shop.promote(3, ALL)
        server.poll()
        shop.promote(2, ALL)
        server.watcher.poll()
        assert loader.is_loading.wait(PATIENCE)
        assert server.version() == "3"
        assert server.states() == {"1": "READY", "2": "LOADING", "3": "READY"}
        shop.roll_back(1)
        server.watcher.poll()
        assert server.version() == "1"
        loader.gate.set()
        server.poll()
        # Nothing needs version 2 any longer.
        assert server.version() == "1"
        assert "2" not in server.models.versions("shop")


def test_calls_of_clients_end_with_the_server(repository: Path, shop: RepositoryModel, trained: TrainedRun) -> None:
    """Nobody loads and unloads any longer, so that who waits for it would wait for ever."""
    loader = GatedLoader()
    with ThreadPoolExecutor() as pool:
        with served(repository, trained, loader, control="explicit") as server:
            shop.promote(2, ALL)
            loading = pool.submit(server.watcher.load, "shop")
            assert loader.is_loading.wait(PATIENCE)
            unloading = pool.submit(server.watcher.unload, "shop")
            with pytest.raises(UnavailableError, match="it was unloaded meanwhile"):
                loading.result(PATIENCE)
            loading = pool.submit(server.watcher.load, "shop")
            wait_for(lambda: server.states().get("2") == "LOADING")
            closing_it = pool.submit(server.watcher.close)
            for waiting in (loading, unloading):
                with pytest.raises(UnavailableError, match="the server is being stopped"):
                    waiting.result(PATIENCE)
            loader.gate.set()
            closing_it.result(PATIENCE)
        for call in (server.watcher.load, server.watcher.unload):
            with pytest.raises(UnavailableError, match="the server is being stopped"):
                pool.submit(call, "shop").result(PATIENCE)


def test_a_model_may_be_unloaded_while_it_is_loaded(
    repository: Path, shop: RepositoryModel, trained: TrainedRun
) -> None:
    loader = GatedLoader()
    with ThreadPoolExecutor() as pool, served(repository, trained, loader, control="explicit") as server:
        shop.promote(2, ALL)  # so that both are gated
        loading = pool.submit(server.watcher.load, "shop")
        assert loader.is_loading.wait(PATIENCE)
        unloading = pool.submit(server.watcher.unload, "shop")
        with pytest.raises(UnavailableError, match="it was unloaded meanwhile"):
            loading.result(PATIENCE)
        loader.gate.set()
        unloading.result(PATIENCE)
        assert set(server.states().values()) == {"UNAVAILABLE"}
        server.watcher.load("shop")
        assert server.version() == "2"


def test_a_share_of_the_requests_goes_to_a_second_version(
    repository: Path, shop: RepositoryModel, trained: TrainedRun
) -> None:
    with served(repository, trained) as server:
        shop.promote(2, PromotionSpec(share=0.3, by="user"))
        server.poll()

        def answered(user: int) -> str:
            request = request_of(trained, 0, 1, user=f"u{user}")
            return server.models.submit(request, "shop").result(PATIENCE).model_version

        versions = [answered(user) for user in range(100)]
        assert set(versions) == {"1", "2"}
        assert [answered(user) for user in range(100)] == versions
        assert server.version() == "1"  # without a key
        counted = [server.models.get("shop", version).statistics().succeeded for version in ("1", "2")]
        assert counted == [2 * versions.count("1") + 1, 2 * versions.count("2")]
        shop.roll_back()
        server.poll()
        assert {answered(user) for user in range(100)} == {"1"}


def test_answers_of_a_second_version_are_compared_and_not_sent(
    repository: Path, shop: RepositoryModel, trained: TrainedRun
) -> None:
    with served(repository, trained) as server:
        router = server.models.router
        assert isinstance(router, Router)
        shop.promote(2, PromotionSpec(shadow=1.0))
        server.poll()
        request = request_of(trained, 0, 20)
        answer = server.models.submit(request, "shop").result(PATIENCE)
        assert answer.model_version == "1"
        wait_for(lambda: router.statistics("shop").requests == 1)
        second = server.models.submit(request, "shop", "2").result(PATIENCE)
        difference = np.abs(scores_of(answer) - scores_of(second))
        counted = router.statistics("shop")
        assert (counted.version, counted.records, counted.dropped, counted.failed) == ("2", 20, 0, 0)
        assert counted.sum_difference == pytest.approx(float(difference.sum()), rel=1e-4)
        assert counted.max_difference == pytest.approx(float(difference.max()), rel=1e-4)
        assert sum(counted.differences) == 20
        shop.roll_back()
        server.poll()
        server.version()
        assert router.statistics("shop").version == ""


@pytest.mark.slow
def test_versions_follow_their_run_only_where_the_server_allows_it(trained: TrainedRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained.path, run)
    promote(run, tmp_path / "models", "shop", PromotionSpec(follow=True))
    request = request_of(trained, 0, 3)
    for is_allowed in (False, True):
        with served(tmp_path / "models", trained, follow_runs=is_allowed) as server:
            model = server.models.get("shop")
            assert (model.updates is not None) == is_allowed
            if model.updates is not None:
                later = run / "checkpoints" / "step-00000020"
                shutil.copytree(run / "checkpoints" / "step-00000016", later)
                for name in ("manifest.json", "state.json"):
                    file = later / name
                    file.write_text(file.read_text().replace('"step": 16', '"step": 20'))
                manifest = json.loads((later / "manifest.json").read_text())
                for entry in manifest["files"]:
                    if entry["file"] == "state.json":
                        entry |= {"sha256": sha256_of(later / "state.json")}
                (later / "manifest.json").write_text(json.dumps(manifest))
                model.updates.poll()
            answer = server.models.submit(request, "shop").result(PATIENCE)
            assert (answer.model_version, answer.parameters["step"]) == ("1", 20 if is_allowed else 16)


def test_a_model_that_is_unloaded_as_it_becomes_ready_is_not_loaded_again(
    repository: Path, trained: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(repository, trained, control="explicit", load=("shop",)) as server:
        server.watcher.unload("shop")
        unloading = threading.Thread(target=server.watcher.unload, args=["shop"])
        reconcile = RepositoryWatcher._reconcile

        def reconciled(watcher: RepositoryWatcher, model: RepositoryModel, done: int | None = None) -> int:
            if done is not None:
                unloading.start()
                unloading.join(0.2)  # time to come between, if it may
            return reconcile(watcher, model, done)

        monkeypatch.setattr(RepositoryWatcher, "_reconcile", reconciled)
        with contextlib.suppress(UnavailableError):
            server.watcher.load("shop")
        unloading.join()
        wait_for(lambda: server.states() == {"1": "UNAVAILABLE"})
        assert not server.watcher._watched


def test_versions_share_tiers_and_leave_them(repository: Path, shop: RepositoryModel, trained: TrainedRun) -> None:
    loader = VersionLoader(tables=ServedTablesSpec())
    expected = {
        version: InferenceSession.open(shop.path / version).predict(trained.records(0, 20)) for version in ("1", "2")
    }
    with served(repository, trained, loader, keep_versions=0) as server:
        for version in ("1", "2", "1"):
            shop.promote(int(version), ALL)
            server.poll()
            answer = server.models.submit(request_of(trained, 0, 20), "shop").result(PATIENCE)
            assert np.array_equal(scores_of(answer), expected[version])
        assert loader._server is not None
        wait_for(lambda: loader._server.versions == {"shop": (1,)})  # type: ignore[union-attr]


@pytest.mark.parametrize("place", ["terarec.serve.loading.served_model", "terarec.serve.session._open_programs"])
def test_a_version_that_cannot_be_loaded_leaves_no_rows_in_shared_tiers(
    repository: Path, shop: RepositoryModel, trained: TrainedRun, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    loader = VersionLoader(tables=ServedTablesSpec())
    with served(repository, trained, loader) as server:
        assert loader._server is not None
        before = scores_of(server.models.submit(request_of(trained, 0, 20), "shop").result(PATIENCE))
        with monkeypatch.context() as failing:
            failing.setattr(place, mock.Mock(side_effect=RuntimeError("a defect")))
            shop.promote(2, ALL)
            server.poll()
        assert "a defect" in server.reason("2")
        assert loader._server.versions == {"shop": (1,)}
        assert loader._server.active("shop") == 1
        answer = server.models.submit(request_of(trained, 0, 20), "shop").result(PATIENCE)
        assert np.array_equal(scores_of(answer), before)
        server.watcher.unload("shop")  # also the last one
        assert loader._server.versions == {}


def test_versions_with_the_same_rows_leave_tiers_one_by_one(
    repository: Path, shop: RepositoryModel, trained: TrainedRun
) -> None:
    shutil.copytree(shop.path / "1", shop.path / "3")  # a run that was promoted twice
    loader = VersionLoader(tables=ServedTablesSpec())
    with served(repository, trained, loader, keep_versions=1) as server:
        expected = scores_of(server.models.submit(request_of(trained, 0, 20), "shop").result(PATIENCE))
        for version in (3, 2):
            shop.promote(version, ALL)
            server.poll()
        assert loader._server is not None
        wait_for(lambda: loader._server.versions == {"shop": (2, 3)})  # type: ignore[union-attr]
        shop.roll_back()
        server.poll()
        answer = server.models.submit(request_of(trained, 0, 20), "shop").result(PATIENCE)
        assert (answer.model_version, np.array_equal(scores_of(answer), expected)) == ("3", True)
        # The one that was loaded last goes like any other.
        for version, spec in ((1, ALL), (2, PromotionSpec(shadow=0.5))):
            shop.promote(version, spec)
            server.poll()
        shop.roll_back()
        server.poll()
        wait_for(lambda: loader._server.versions == {"shop": (1, 3)})  # type: ignore[union-attr]


def test_no_request_fails_or_is_mixed_while_versions_change(
    repository: Path, shop: RepositoryModel, trained: TrainedRun
) -> None:
    """Each answer has the scores of the version that it names."""
    expected = {
        version: InferenceSession.open(shop.path / version).predict(trained.records(0, 100)) for version in ("1", "2")
    }
    is_over = threading.Event()
    wrong: list[object] = []
    seen: list[set[str]] = [set() for _ in range(3)]
    with served(repository, trained, keep_versions=0) as server:

        def send(client: int) -> None:
            for number in itertools.count():
                if is_over.is_set():
                    return
                start = (17 * number + client) % 90
                request = request_of(trained, start, start + 1 + number % 10)
                try:
                    answer = server.models.submit(request, "shop").result(PATIENCE)
                except Exception as error:
                    wrong.append(error)
                    return
                scores = scores_of(answer)
                seen[client].add(answer.model_version)
                mine = expected[answer.model_version][start : start + len(scores)]
                if not np.allclose(scores, mine, atol=1e-6):
                    wrong.append((answer, mine))

        clients = [threading.Thread(target=send, args=(client,)) for client in range(3)]
        for client in clients:
            client.start()
        try:
            for swap in range(6):
                shop.promote(2 - swap % 2, ALL)
                server.poll()
                assert server.version() == str(2 - swap % 2)
        finally:
            is_over.set()
            for client in clients:
                client.join()
    assert wrong == []
    assert all(versions == {"1", "2"} for versions in seen)


def test_a_server_takes_a_promotion_over_while_it_runs(
    repository: Path, shop: RepositoryModel, trained: TrainedRun
) -> None:
    found: list[RunningServer] = []
    is_ready = threading.Event()

    def ready(running: RunningServer) -> None:
        found.append(running)
        is_ready.set()

    source = RepositorySpec(path=str(repository), poll_seconds=0.02)
    thread = threading.Thread(target=serve, args=(source, ServingSpec(port=0), ready))
    thread.start()
    try:
        assert is_ready.wait(PATIENCE)
        client = InferenceClient(found[0].url, model="shop")
        records = trained.records(0, 20)
        first = client.infer(records)["score"]
        shop.promote(2, ALL)
        expected = InferenceSession.open(shop.path / "2").predict(records)
        wait_for(lambda: np.allclose(client.infer(records)["score"], expected, atol=1e-6))
        shop.roll_back()
        wait_for(lambda: np.array_equal(client.infer(records)["score"], first))
    finally:
        for running in found:
            running.stop()
        thread.join(PATIENCE)
    assert not thread.is_alive()
