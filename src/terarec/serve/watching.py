# SPDX-License-Identifier: Apache-2.0
"""`RepositoryWatcher`: a server's models are those that a repository says, also when it changes."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from typing_extensions import override

from terarec.errors import ConfigError, DataNotFoundError, StorageError, TerarecError
from terarec.repeating import Backoff, Repeating
from terarec.serve.loading import VersionLoader
from terarec.serve.models import ModelState, ServedModels
from terarec.serve.protocol import UnavailableError
from terarec.serve.repository import ModelRepository, RepositoryModel
from terarec.serve.routing import Route, Router
from terarec.serve.served_model import ServedModel
from terarec.spec.checks import quoted
from terarec.spec.serving_repository import PointerSpec, PromotionSpec, RepositorySpec

_LOGGER = logging.getLogger(__name__)
_CLOSE_SECONDS = 10.0  # with those of requests in flight, a server ends within 60 s, as its unit expects


class _Refused(NamedTuple):
    """A version that could not be loaded.

    Attributes:
        identity: What it and the pointer were.
        reason: Why not.
        backoff: When it is loaded again, since a machine may have room by then, or a file be there; None for never.
    """

    identity: object
    reason: str
    backoff: Backoff | None


@dataclass(slots=True)
class _Watched:
    """What is known of a model.

    Attributes:
        loaded: Versions in memory; all of them are installed, and remain while they are wanted or kept.
        loading: Versions that the worker loads, or will load.
        refused: Versions that could not be loaded.
        answered: Versions that were the default one, the last at the end.
        problem: Why the files of the model cannot be read; "" if they can.
    """

    loaded: dict[int, ServedModel] = field(default_factory=dict)
    loading: set[int] = field(default_factory=set)
    refused: dict[int, _Refused] = field(default_factory=dict)
    answered: list[int] = field(default_factory=list)
    problem: str = ""


class RepositoryWatcher(Repeating):
    """Loads the versions that a repository names, and lets the promoted one answer.

    A version is loaded, checked and warmed in the background, and then takes over at once; until then, and if it is
    refused, the former one answers. Former versions stay in memory for an instant return, as many as the spec says.

    `_changed`, whose lock its holder may take again, guards `_watched` and what is below it, and what comes into
    `_jobs`, which takes none once the watcher is being closed: nobody would do it, and nobody must wait for it. Models
    are loaded and closed by one worker thread without it, so that a return to a version in memory never waits for
    another one that is being loaded.

    Args:
        models: Models of the server.
        loader: Opens versions; the watcher closes it.
        spec: How the repository is followed.
        router: Routes of requests to second versions; None for no second versions.

    Raises:
        ConfigError: A model to load that is not there.
        DataNotFoundError: The repository is not there.
    """

    def __init__(
        self, models: ServedModels, loader: VersionLoader, spec: RepositorySpec, router: Router | None = None
    ) -> None:
        self._repository = ModelRepository(spec.path)
        self._models = models
        self._loader = loader
        self._spec = spec
        self._router = router
        self._changed = threading.Condition()
        self._watched: dict[str, _Watched] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_closing = False
        self._worker = threading.Thread(target=self._work, name="terarec-loading", daemon=True)
        names = self._first_names()
        self._worker.start()
        for name in names:
            self._reconcile(self._repository.model(name))
        if spec.control == "explicit":
            self.show_unloaded()
        self._wait(names)
        super().__init__("terarec-repository", spec.poll_seconds if spec.control == "poll" else None)

    @override
    def poll(self) -> int:
        names = self._repository.names
        with self._changed:
            gone = [name for name in self._watched if name not in names]
        for name in gone:
            self._unload(name)
        return sum(self._reconcile(self._repository.model(name)) for name in names) + len(gone)

    def load(self, name: str, parameters: Mapping[str, Any] | None = None) -> None:
        """Load the versions of a model that the repository names now; return once they are ready.

        Args:
            name: Name of the model.
            parameters: None are accepted: a client must not change what an operator has promoted.

        Raises:
            ConfigError: No such model, or parameters.
            UnavailableError: The watcher is closed, or the model is unloaded, meanwhile.
            TerarecError: The version that is to answer is refused; the former one answers.
        """
        if parameters:
            raise ConfigError("parameters", f"got {quoted(next(iter(parameters)))}, expected none")
        model = self._repository.known(name)
        with self._changed:
            self._watched.setdefault(name, _Watched()).refused.clear()  # what was refused is tried again
        self._reconcile(model)
        self._wait([name])
        with self._changed:
            if self._is_closing:
                raise UnavailableError(f"model {name!r}", "not loaded: the server is being stopped")
            watched = self._watched.get(name)
            if watched is None:
                raise UnavailableError(f"model {name!r}", "not loaded: it was unloaded meanwhile")
            problem = watched.problem
            if not problem:  # else they cannot be read
                refused = [watched.refused.get(version) for version in model.wanted(model.pointer())[:1]]
                problem = next((version.reason for version in refused if version is not None), "")
        if problem:
            raise StorageError(problem)

    def unload(self, name: str) -> None:
        """Unload all versions of a model; return once their requests are answered.

        Raises:
            ConfigError: It is not loaded.
            UnavailableError: The watcher is closed meanwhile, which unloads all.
        """
        done = threading.Event()

        def end() -> None:
            with self._changed:
                done.set()
                self._changed.notify_all()

        with self._changed:
            if name not in self._watched:
                raise ConfigError("model", f"{quoted(name)} is not loaded, expected one that is")
            self._unload(name)
            if not self._is_closing:
                self._jobs.put(end)
            self._changed.wait_for(lambda: done.is_set() or self._is_closing)
        if not done.is_set():
            raise UnavailableError(f"model {name!r}", "not unloaded yet: the server is being stopped")

    def promote(self, name: str, version: int, spec: PromotionSpec) -> PointerSpec:
        """Promote a version as `RepositoryModel.promote` does, and follow at once.

        Raises:
            ConfigError: No such model, or as `RepositoryModel.promote`.
            StorageError: As `RepositoryModel.promote`.
        """
        model = self._repository.known(name)
        pointer = model.promote(version, spec)
        self._follow(model)
        return pointer

    def roll_back(self, name: str, to: int | None) -> PointerSpec:
        """Take back a promotion as `RepositoryModel.roll_back` does, and follow at once.

        Raises:
            ConfigError: No such model, or as `RepositoryModel.roll_back`.
            StorageError: As `RepositoryModel.roll_back`.
        """
        model = self._repository.known(name)
        pointer = model.roll_back(to)
        self._follow(model)
        return pointer

    def _follow(self, model: RepositoryModel) -> None:
        # Also without polls: whoever changes the pointer through this server wants it to answer so.
        with self._changed:
            if model.name in self._watched or self._spec.control == "poll":
                self._reconcile(model)

    @override
    def close(self) -> None:
        super().close()
        with self._changed:
            self._is_closing = True
            for watched in self._watched.values():
                watched.loading.clear()
            self._changed.notify_all()
            self._jobs.put(None)
        # A large model that is being loaded is not worth waiting for: the process ends.
        self._worker.join(_CLOSE_SECONDS)

    def _first_names(self) -> tuple[str, ...]:
        names = self._repository.names
        if self._spec.control != "explicit" or "*" in self._spec.load:
            return names
        return tuple(self._repository.known(name).name for name in self._spec.load)

    def show_unloaded(self) -> None:
        """Show the models that a client may load in the index, each by its last version, and none that are gone."""
        try:
            present = {name: self._last_state(name) for name in self._repository.names}
        except OSError as error:  # what is in memory is shown all the same
            _LOGGER.warning("%s; the index stays as it is", error)
            return
        with self._changed:
            shown: dict[str, list[ModelState]] = {}
            for state in self._models.index():
                shown.setdefault(state.name, []).append(state)
            for name in {*present, *shown} - {*self._watched}:
                former, last = shown.get(name, []), present.get(name)
                if last in former or any(state.state != "UNAVAILABLE" for state in former):  # it is being unloaded
                    continue
                for state in former:
                    self._models.forget_state(name, state.version)
                if last is not None:
                    self._models.set_state(last, is_bounded=False)

    def _last_state(self, name: str) -> ModelState | None:
        """Return the state of the last version of a model that is not loaded; None for none."""
        try:
            versions = self._repository.model(name).versions
        except OSError as error:
            return ModelState(name, "", "UNAVAILABLE", str(error))
        return ModelState(name, str(versions[-1]), "UNAVAILABLE", "unloaded") if versions else None

    def _reconcile(self, model: RepositoryModel, done: int | None = None) -> int:
        """Compare a model with its files; return how many versions have to be loaded."""
        # All of it under the lock: of two threads, the one that read an older pointer must not apply it last.
        with self._changed:
            if self._is_closing:
                return 0
            watched = self._watched.setdefault(model.name, _Watched())
            watched.loading -= {done}
            try:
                pointer = model.pointer()
                wanted = model.wanted(pointer)
            except (TerarecError, OSError) as error:
                if watched.problem != str(error):  # once, and not at each look
                    watched.problem = str(error)
                    _LOGGER.warning("%s; the model stays as it is", error)
                    self._models.set_state(ModelState(model.name, "", "UNAVAILABLE", watched.problem))
                self._changed.notify_all()
                return 0
            watched.problem = ""
            self._models.forget_state(model.name)
            for version, refused in list(watched.refused.items()):
                if refused.identity != (pointer, model.identity(version)):  # it was made anew, or promoted again
                    del watched.refused[version]
            fallback = self._fallback(watched, pointer, wanted)
            needed = [*wanted, *fallback]
            watched.loading &= set(needed)  # others are not worth loading any longer
            rejected = {
                version
                for version, refused in watched.refused.items()
                if refused.backoff is None or not refused.backoff.is_due
            }
            known = {*watched.loaded, *watched.loading, *rejected}
            missing = [version for version in needed if version not in known]
            for version in missing:
                watched.loading.add(version)
                if version not in watched.refused:  # whose reason is shown until it is loaded
                    self._models.set_state(ModelState(model.name, str(version), "LOADING"))
                self._jobs.put(functools.partial(self._load, model, version, (pointer, model.identity(version))))
            # What a pointer names beside the promoted version gets its share of the requests, and never all of them.
            defaults = needed if pointer.current is None else [*wanted[:1], *fallback]
            self._apply(model.name, watched, pointer, needed, defaults)
            self._changed.notify_all()
        return len(missing)

    @staticmethod
    def _fallback(watched: _Watched, pointer: PointerSpec, wanted: tuple[int, ...]) -> list[int]:
        """Return the version that answers where the promoted one is refused and none answers yet."""
        if not wanted or wanted[0] not in watched.refused or watched.answered:
            return []
        others = [version for version in reversed(pointer.before) if version not in watched.refused]
        return others[:1]

    def _apply(
        self, name: str, watched: _Watched, pointer: PointerSpec, needed: list[int], defaults: list[int]
    ) -> None:
        """Let the versions in memory answer as the pointer says, and retire those that nothing needs."""
        target = next((version for version in defaults if version in watched.loaded), None)
        is_promoted = bool(needed) and target == needed[0]
        # A second version must not answer all requests while the promoted one is being loaded.
        if target is not None and not is_promoted and (watched.answered or needed[0] not in watched.refused):
            target = None
        if target is not None and watched.answered[-1:] != [target]:
            if str(target) in self._models.versions(name):
                self._models.set_default(name, str(target))
            else:
                self._models.install(watched.loaded[target])
            watched.answered = [*(version for version in watched.answered if version != target), target]
            _LOGGER.info("model %r: version %d answers", name, target)
        if not watched.answered:
            return
        for version in needed:
            if version in watched.loaded and str(version) not in self._models.versions(name):
                self._models.install(watched.loaded[version], is_default=False)
        if self._router is not None:
            self._router.set_route(name, _route(pointer, watched))
        # While a new version is loaded, what it replaces is kept in any case.
        former = watched.answered[:-1]
        kept = {*needed, *watched.answered[-1:], *former[len(former) - min(self._spec.keep_versions, len(former)) :]}
        for version in [version for version in watched.loaded if version not in kept]:
            self._retire(name, watched, version)

    def _retire(self, name: str, watched: _Watched, version: int) -> None:
        model = watched.loaded.pop(version)
        watched.answered = [other for other in watched.answered if other != version]

        is_installed = str(version) in self._models.versions(name)

        def end() -> None:
            if is_installed:
                self._models.retire(name, str(version))
            else:
                model.close()
            self._loader.unload(model)

        self._jobs.put(end)  # waits for requests

    def _unload(self, name: str) -> None:
        with self._changed:
            watched = self._watched.pop(name, _Watched())
            self._models.forget_state(name)
            if self._router is not None:
                self._router.set_route(name, Route())
            for version in list(watched.loaded):
                self._retire(name, watched, version)
            self._changed.notify_all()

    def _load(self, model: RepositoryModel, version: int, identity: object) -> None:
        with self._changed:
            if model.name not in self._watched or version not in self._watched[model.name].loading:
                self._models.set_state(ModelState(model.name, str(version), "UNAVAILABLE", "unloaded"))
                return  # it is not wanted any longer
        served: ServedModel | None = None
        reason, may_pass = "", False
        try:
            served = self._loader.load(model, version)
        except TerarecError as error:
            reason, may_pass = str(error), isinstance(error, StorageError | DataNotFoundError)
            _LOGGER.warning("%s; it is refused", error)
            self._models.set_state(ModelState(model.name, str(version), "UNAVAILABLE", reason))
        with self._changed:
            watched = self._watched.get(model.name)
            is_wanted = watched is not None and version in watched.loading
            if watched is not None and is_wanted:
                former = watched.refused.pop(version, None)
                if served is None:
                    backoff = former.backoff if former is not None and may_pass else None
                    if may_pass:
                        backoff = backoff or Backoff(self._spec.poll_seconds)
                        backoff.fail()
                    watched.refused[version] = _Refused(identity, reason, backoff)
                else:
                    watched.loaded[version] = served
                # Under the lock: a model that was unloaded between the two would be loaded again.
                self._reconcile(model, done=version)
        if not is_wanted and served is not None:  # in the meantime nothing needs it any longer
            self._models.set_state(ModelState(model.name, str(version), "UNAVAILABLE", "unloaded"))
            served.close()
            self._loader.unload(served)

    def _wait(self, names: tuple[str, ...] | list[str]) -> None:
        """Return once nothing is loaded for some models."""
        with self._changed:
            self._changed.wait_for(
                lambda: not any(self._watched[name].loading for name in names if name in self._watched)
            )

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except TerarecError as error:
                _LOGGER.warning("%s", error)
            # The thread must live: without it no version is loaded any more.
            except Exception:
                _LOGGER.exception("a version could not be loaded or unloaded")
            del job  # whose model would be there until the next one


def _route(pointer: PointerSpec, watched: _Watched) -> Route:
    """Return the route to second versions: to those in memory, beside the promoted version alone."""
    if watched.answered[-1:] != [pointer.current]:
        return Route()
    split, shadow = pointer.split, pointer.shadow
    return Route(
        split=split if split is not None and split.version in watched.loaded else None,
        shadow=shadow if shadow is not None and shadow.version in watched.loaded else None,
    )


@contextlib.contextmanager
def repository_models(spec: RepositorySpec, loader: VersionLoader) -> Iterator[ServedModels]:
    """Serve the models of a repository in the block; what is loaded is closed at its end, after the last request.

    Args:
        spec: The repository, and how it is followed.
        loader: Opens versions; closed at the end.

    Raises:
        ConfigError: A model to load that is not there.
        DataNotFoundError: The repository is not there.
    """
    with contextlib.closing(loader), ServedModels() as models, contextlib.closing(Router(models)) as router:
        models.router = router
        with RepositoryWatcher(models, loader, spec, router) as watcher:
            # As Triton: clients load and unload models only where nothing else does.
            models.loader = watcher if spec.control == "explicit" else None
            models.pointers = watcher
            yield models
