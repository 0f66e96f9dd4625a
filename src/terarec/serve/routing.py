# SPDX-License-Identifier: Apache-2.0
"""`Router`: which version answers a request, and which one scores it, too, without answering."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import random
import threading
from bisect import bisect_left
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.cleaning import Cleaning
from terarec.serve.models import ServedModels, VersionRole
from terarec.serve.padding import LENGTHS, MISSING
from terarec.serve.protocol import InferRequest, InferResponse, Tensor, UnknownModelError
from terarec.serve.statistics import DIFFERENCES, ShadowStatistics
from terarec.spec.dataset import MISSING_KEY
from terarec.spec.serving_repository import ShadowSpec, SplitSpec

_MOST_WAITING = 256  # requests
_MOST_RECORDS, _MOST_BYTES = 1 << 16, 64 << 20  # of the requests that wait: a record may be of long texts and lists
_SHADOW_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Further versions of a model, beside the default one.

    Attributes:
        split: Share of the requests that a second version answers; None for none.
        shadow: Share of the requests that a second version scores without answering; None for none.
    """

    split: SplitSpec | None = None
    shadow: ShadowSpec | None = None


class _Shadowed(NamedTuple):
    request: InferRequest
    name: str
    version: str
    num_records: int
    num_bytes: int
    answer: Future[InferResponse]


class Router:
    """Chooses versions for requests that name none. Thread-safe.

    `_lock` guards `_statistics`, `_records` and `_num_bytes`; `_routes` is replaced as a whole and never changed;
    `_is_closed` only becomes true.
    """

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._routes: Mapping[str, Route] = {}
        self._lock = threading.Lock()
        self._statistics: dict[str, ShadowStatistics] = {}
        self._records = self._num_bytes = 0
        self._is_closed = False
        self._waiting: queue.Queue[_Shadowed | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="terarec-shadow", daemon=True)
        self._thread.start()

    def set_route(self, name: str, route: Route) -> None:
        """Choose by `route` from now on."""
        with self._lock:
            self._routes = {**self._routes, name: route}
            version = "" if route.shadow is None else str(route.shadow.version)
            # Of another version, differences count anew.
            if self._statistics.get(name, ShadowStatistics()).version != version:
                self._statistics[name] = ShadowStatistics(version=version)

    def route(self, name: str) -> Route:
        """Return how requests for a model are distributed."""
        return self._routes.get(name, Route())

    def statistics(self, name: str) -> ShadowStatistics:
        """Return the counters of the model's version that scores without answering."""
        with self._lock:
            return self._statistics.get(name, ShadowStatistics())

    def roles(self, name: str) -> tuple[VersionRole, ...]:
        """Return the roles of the versions of a model beside the default one."""
        route = self.route(name)
        roles: list[VersionRole] = []
        if route.split is not None:
            roles.append(VersionRole(str(route.split.version), "answers", route.split.share))
        if route.shadow is not None:
            roles.append(VersionRole(str(route.shadow.version), "shadow", route.shadow.share))
        return tuple(roles)

    def choose(self, request: InferRequest, name: str) -> str | None:
        """Return the version that answers a request; None for the default one."""
        split = self.route(name).split
        if split is None:
            return None
        key = _key(request, split.by, self._cleaning(name))
        return str(split.version) if key is not None and position(name, key) < split.share else None

    def _cleaning(self, name: str) -> Cleaning:
        """Return which texts the workflow of a model takes as missing."""
        try:
            return Cleaning.of_records(self._models.get(name).session.workflow.spec.source)
        except UnknownModelError:  # it is unloaded meanwhile
            return Cleaning()

    def observe(self, request: InferRequest, name: str, answer: Future[InferResponse]) -> None:
        """Let a second version score a request, if its turn has come, when it was answered."""
        shadow = self.route(name).shadow
        if shadow is None or random.random() >= shadow.share:
            return
        item = _Shadowed(request, name, str(shadow.version), request.num_records, request.num_bytes, answer)
        with self._lock:
            records, num_bytes = self._records + item.num_records, self._num_bytes + item.num_bytes
            is_taken = records <= _MOST_RECORDS and num_bytes <= _MOST_BYTES
            if is_taken:
                self._records, self._num_bytes = records, num_bytes
        if is_taken:
            try:
                self._waiting.put_nowait(item)
                return
            except queue.Full:
                self._release(item)
        self._count(name, str(shadow.version), dropped=1)

    def close(self) -> None:
        """End; what waits is not scored."""
        self._is_closed = True
        self._routes = {}
        with contextlib.suppress(queue.Full):  # the thread wakes up anyway then
            self._waiting.put_nowait(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed and (item := self._waiting.get()) is not None:
            try:
                self._compare(item)
            finally:
                self._release(item)

    def _release(self, item: _Shadowed) -> None:
        with self._lock:
            self._records -= item.num_records
            self._num_bytes -= item.num_bytes

    def _compare(self, item: _Shadowed) -> None:
        try:
            answer = item.answer.result(_SHADOW_SECONDS)
        # Whatever kept it from being answered: there is nothing to compare with.
        except BaseException:
            return
        if answer.model_version == item.version:
            return  # it has taken over in the meantime
        try:
            # After the answer: the processor's time goes to answers first.
            scored = self._models.get(item.name, item.version).submit(item.request).result(_SHADOW_SECONDS)
            difference = _difference(answer.outputs[0], scored.outputs[0])
        except Exception:  # whatever a model raises: the thread goes on with the next request
            self._count(item.name, item.version, failed=1)
            return
        classes = np.bincount([bisect_left(DIFFERENCES, value) for value in difference], minlength=len(DIFFERENCES) + 1)
        self._count(item.name, item.version, records=item.num_records, difference=difference, classes=classes.tolist())

    def _count(
        self,
        name: str,
        version: str,
        *,
        records: int = 0,
        difference: NDArray[np.float64] | None = None,
        classes: list[int] | None = None,
        dropped: int = 0,
        failed: int = 0,
    ) -> None:
        with self._lock:
            former = self._statistics.get(name, ShadowStatistics())
            if former.version != version:
                return
            counted = replace(former, dropped=former.dropped + dropped, failed=former.failed + failed)
            if difference is not None and classes is not None:
                counted = replace(
                    counted,
                    requests=former.requests + 1,
                    records=former.records + records,
                    sum_difference=former.sum_difference + float(difference.sum()),
                    max_difference=max(former.max_difference, float(difference.max(initial=0.0))),
                    differences=tuple(a + b for a, b in zip(former.differences, classes, strict=True)),
                )
            self._statistics[name] = counted


def _difference(answered: Tensor, scored: Tensor) -> NDArray[np.float64]:
    """Return the absolute differences of scores; raise `ValueError` for those that cannot be compared."""
    mine, others = (np.asarray(of.data, dtype=np.float64).reshape(of.shape) for of in (answered, scored))
    if mine.shape != others.shape:
        raise ValueError(f"scores {others.shape}, expected {mine.shape}")  # NumPy would repeat the shorter ones
    # NaN would be in no class, and in no maximum.
    if not (np.isfinite(mine).all() and np.isfinite(others).all()):
        raise ValueError("scores that are no finite numbers")
    differences: NDArray[np.float64] = np.abs(mine - others).reshape(-1)
    return differences


def position(name: str, key: str) -> float:
    """Return the place of a key from 0 to 1, the same for ever: a share of the keys lies below it.

    A larger share of a model keeps the keys of a smaller one.
    """
    digest = hashlib.blake2b(f"{name}\0{key}".encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) / 2.0**64


def _key(request: InferRequest, by: str, cleaning: Cleaning) -> str | None:
    """Return the value that decides for a request, as text: of a parameter, or of its first record; None for none."""
    if by in request.parameters:
        return _text(request.parameters[by])
    tensors = {tensor.name: tensor for tensor in request.inputs}
    mask, lengths = tensors.get(by + MISSING), tensors.get(by + LENGTHS)
    if by not in tensors or (mask is not None and mask.datatype == "BOOL" and _first(mask)):
        return None
    # Of an empty list the first place is padding.
    return None if lengths is not None and _first(lengths) == 0 else _text(cleaning.value(_first(tensors[by])))


def _first(tensor: Tensor) -> object:
    """Return the first element of a tensor as a plain value; None for a tensor without any."""
    if not len(tensor.data):
        return None
    value = tensor.data.reshape(-1)[0] if isinstance(tensor.data, np.ndarray) else tensor.data[0]
    if isinstance(value, np.generic):
        value = value.item()
    elif isinstance(value, pa.Scalar):
        value = value.as_py()
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else value


def _text(value: object) -> str | None:
    """Return one text for equal values, however a client writes them; None for those that mean a missing one."""
    # Clients whose arrays have no null send NaN, the lowest integer, or no text; only NaN differs from itself.
    if value is None or value != value or value in ("", MISSING_KEY):
        return None
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
