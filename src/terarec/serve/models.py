# SPDX-License-Identifier: Apache-2.0
"""`ServedModels`: the models of a server, and their versions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, Self

from terarec.errors import ConfigError
from terarec.serve.calls import Call
from terarec.serve.protocol import InferRequest, InferResponse, ServerBusyError, UnknownModelError
from terarec.serve.request_memory import HeldMemory
from terarec.serve.served_model import ServedModel
from terarec.serve.statistics import ShadowStatistics
from terarec.spec.checks import quoted
from terarec.spec.serving_repository import PointerSpec, PromotionSpec

_MOST_GONE = 256
"""Versions that are no longer served and still shown in the index: a server may be given a new one every minute."""


class ModelState(NamedTuple):
    """State of one version of a model.

    Attributes:
        name: Name of the model.
        version: Its version; "" for all of a model whose files cannot be read.
        state: "READY" for requests; "LOADING", "UNLOADING" or "UNAVAILABLE", as Triton names them.
        reason: Why it is not ready; "" for one that is.
    """

    name: str
    version: str
    state: Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
    reason: str = ""


class VersionRole(NamedTuple):
    """What a version does with requests that name none.

    Attributes:
        version: The version.
        role: "answers", or "shadow" for one that scores requests without answering.
        share: Share of the requests.
    """

    version: str
    role: Literal["answers", "shadow"]
    share: float


class ModelLoader(Protocol):
    """Loads and unloads models on request of a client."""

    def show_unloaded(self) -> None:
        """Show in the index what may be loaded at present."""

    def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Load a model, or load it again; return once it is ready."""

    def unload(self, name: str) -> None:
        """Unload all versions of a model."""


class ModelPointers(Protocol):
    """Changes which versions of a repository answer; see `terarec.serve.repository.RepositoryModel`."""

    def promote(self, name: str, version: int, spec: PromotionSpec) -> PointerSpec:
        """Let a version of a model answer, or a share of the requests; return the new pointer."""

    def roll_back(self, name: str, to: int | None) -> PointerSpec:
        """Take back the last promotion of a model; return the new pointer."""


class RequestRouter(Protocol):
    """Chooses versions for requests that name none."""

    def choose(self, request: InferRequest, name: str) -> str | None:
        """Return the version that answers a request; None for the default one."""

    def observe(self, request: InferRequest, name: str, answer: Future[InferResponse]) -> None:
        """See a request that a version was chosen for, and its answer to come. It does not wait."""

    def statistics(self, name: str) -> ShadowStatistics:
        """Return the counters of the model's version that scores without answering."""

    def roles(self, name: str) -> tuple[VersionRole, ...]:
        """Return the roles of the versions of a model beside the default one."""


class RequestObserver(Protocol):
    """Sees the requests that models score."""

    def observe(self, request: InferRequest, model: ServedModel, answer: Future[InferResponse]) -> None:
        """See a request, the version that scores it, and its answer to come. It does not wait."""


class ServedModels:
    """The models of a server by name and version. Thread-safe.

    `_lock` guards the tables below and is held for look-ups alone: models are closed without it.

    Attributes:
        loader: Loads models on request; None where clients may not.
        pointers: Changes which versions answer; None where there is no repository.
        router: Chooses versions for requests that name none; None for the default ones.
        observer: Sees all requests; None for nobody.
        on_change: Called without the lock after a version has come or gone; None for nothing.
    """

    def __init__(self) -> None:
        self.loader: ModelLoader | None = None
        self.pointers: ModelPointers | None = None
        self.router: RequestRouter | None = None
        self.observer: RequestObserver | None = None
        self.on_change: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._versions: dict[str, dict[str, ServedModel]] = {}
        self._defaults: dict[str, str] = {}
        self._states: dict[tuple[str, str], ModelState] = {}
        self._lasting: set[tuple[str, str]] = set()  # of these, the ones that are not forgotten

    def get(self, name: str, version: str | None = None) -> ServedModel:
        """Return a version of a model.

        Args:
            name: Name of the model.
            version: Its version; None or "" for the default one.

        Raises:
            UnknownModelError: It is not served.
        """
        with self._lock:
            versions = self._versions.get(name)
            if not versions:
                # Only a short list is worth its place in a line.
                served = ", ".join(map(repr, sorted(self._versions)[:8])) or "a model that is loaded"
                raise UnknownModelError(f"model {quoted(name)}", f"not served here, expected {served}")
            model = versions.get(version or self._defaults[name])
            if model is None:
                expected = ", ".join(map(repr, list(versions)[-8:]))
                raise UnknownModelError(f"model {name!r}", f"has no version {quoted(version)}, expected {expected}")
            return model

    def versions(self, name: str) -> tuple[str, ...]:
        """Return the versions of a model in the order of their installation; none for a model that is not served."""
        with self._lock:
            return tuple(self._versions.get(name, ()))

    def roles(self, name: str) -> tuple[VersionRole, ...]:
        """Return the roles of the versions of a model; none for a model that is not served."""
        with self._lock:
            default = self._defaults.get(name)
        if default is None:
            return ()
        others = () if self.router is None else self.router.roles(name)
        answered = sum(other.share for other in others if other.role == "answers")
        return VersionRole(default, "answers", 1.0 - answered), *others

    def submit(
        self,
        request: InferRequest,
        name: str,
        version: str | None = None,
        call: Call | None = None,
        held: HeldMemory | None = None,
    ) -> Future[InferResponse]:
        """Let the records of a request be scored; see `ServedModel.submit`.

        A request that was submitted is answered by the version that it was submitted to, also while that is retired.

        Raises:
            UnknownModelError: The model is not served.
        """
        router = None if version else self.router
        chosen = version if router is None else router.choose(request, name)
        while True:
            try:
                model = self.get(name, chosen)
            except UnknownModelError:
                if chosen == version:
                    raise
                chosen = version  # the second version was retired after it was chosen
                continue
            try:
                answer = model.submit(request, call, held)
                break
            except ServerBusyError:
                # Of a version that was replaced after the look-up the successor takes the request.
                if self._is_served(model):
                    raise
        if router is not None:
            router.observe(request, name, answer)
        if self.observer is not None:
            self.observer.observe(request, model, answer)
        return answer

    def _is_served(self, model: ServedModel) -> bool:
        with self._lock:
            return self._versions.get(model.name, {}).get(model.version) is model

    def index(self) -> tuple[ModelState, ...]:
        """Return the states of all versions that are or were served, or that were named by `set_state`."""
        with self._lock:
            return tuple(self._states[key] for key in sorted(self._states))

    def set_state(self, state: ModelState, *, is_bounded: bool = True) -> None:
        """Show a version that is not served in the index, such as one that is being loaded or could not be.

        Args:
            state: Its state; without a version that of a model whose files cannot be read.
            is_bounded: Whether it is forgotten once many others are gone; not so for what lies in a repository.
        """
        with self._lock:
            if state.version in self._versions.get(state.name, {}):
                return
            key = state.name, state.version
            # Last in the order, so that those that have been gone for longest are forgotten first.
            self._states.pop(key, None)
            self._states[key] = state
            self._lasting.discard(key)
            if not is_bounded:
                self._lasting.add(key)
            gone = [key for key, other in self._states.items() if other.state == "UNAVAILABLE"]
            for key in [key for key in gone if key not in self._lasting][:-_MOST_GONE]:
                del self._states[key]

    def forget_state(self, name: str, version: str = "") -> None:
        """Show what is not served in the index no longer."""
        with self._lock:
            if version not in self._versions.get(name, {}):
                self._states.pop((name, version), None)
                self._lasting.discard((name, version))

    def install(self, model: ServedModel, *, is_default: bool = True) -> None:
        """Serve a version of a model, to which new requests go at once.

        Args:
            model: The version.
            is_default: Whether requests that name no version go to it; the first version of a model is the default.

        Raises:
            ConfigError: The version is served already.
        """
        with self._lock:
            versions = self._versions.setdefault(model.name, {})
            if model.version in versions:
                problem = f"version {model.version!r} is served already, expected another one"
                raise ConfigError(f"model {model.name!r}", problem)
            if is_default or not versions:
                self._defaults[model.name] = model.version
            versions[model.version] = model
            self._states[model.name, model.version] = ModelState(model.name, model.version, "READY")
        self._notify()

    def set_default(self, name: str, version: str) -> None:
        """Let requests that name no version go to this one.

        Raises:
            UnknownModelError: It is not served.
        """
        self.get(name, version)
        with self._lock:
            if version in self._versions.get(name, {}):
                self._defaults[name] = version

    def retire(self, name: str, version: str) -> None:
        """Send a version no more requests, and close it; return once those that it has are answered.

        Where it was the default one, the version that was installed last becomes that.

        Raises:
            UnknownModelError: It is not served.
        """
        model = self.get(name, version)
        with self._lock:
            versions = self._versions.get(name, {})
            if versions.get(version) is not model:
                return  # another thread retires it
            del versions[version]
            if not versions:
                del self._versions[name], self._defaults[name]
            elif self._defaults[name] == version:
                self._defaults[name] = next(reversed(versions))
            self._states[name, version] = ModelState(name, version, "UNLOADING")
        model.close()
        self.set_state(ModelState(name, version, "UNAVAILABLE", "unloaded"))
        del model  # which would still be there
        self._notify()

    def _notify(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def close(self) -> None:
        """Retire all versions."""
        for state in self.index():
            if state.state == "READY":
                try:
                    self.retire(state.name, state.version)
                except UnknownModelError:  # another thread has retired it
                    continue

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
