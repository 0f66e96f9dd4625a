# SPDX-License-Identifier: Apache-2.0
"""`ServedModel`: one version of a model that answers the requests of the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch

from terarec.errors import ConfigError
from terarec.serve.batcher import Batcher, ScoredPart
from terarec.serve.calls import Call
from terarec.serve.columns import ColumnReader, RecordColumns
from terarec.serve.joined_scoring import JoinedScoring
from terarec.serve.live import LiveUpdates
from terarec.serve.protocol import InferRequest, InferResponse, ModelMetadata, Tensor, TensorMetadata
from terarec.serve.request_memory import HeldMemory
from terarec.serve.session import InferenceSession
from terarec.serve.statistics import ModelStatistics, StatisticsCounter
from terarec.spec.checks import quoted
from terarec.spec.serving_options import ServedModelOptions

SCORE = "score"
"""Name of the output: FP32 [B, C], the scores of the run's objective, such as the probability of each label."""


class ServedModel:
    """One version of a model: a session, and the batches of its requests. Thread-safe.

    Attributes:
        name: Name of the model.
        version: Its version; what a request names stays valid while the session follows a training.
        session: The session.
        updates: Updates that the session follows; None for none.
        options: Limits and batches.
        metadata: Inputs and outputs.

    Args:
        session: The session, which `close` closes.
        options: Limits and batches.
        name: Name of the model.
        version: Version of the model; None for the step of the session.
        updates: Updates that the session follows, which `close` ends.
        statistics: Counter of its requests; None for one of its own.
        others: Function that returns the counters of other processes that serve this version; None for none.
    """

    def __init__(
        self,
        session: InferenceSession,
        options: ServedModelOptions | None = None,
        *,
        name: str = "model",
        version: str | None = None,
        updates: LiveUpdates | None = None,
        statistics: StatisticsCounter | None = None,
        others: Callable[[], ModelStatistics] | None = None,
    ) -> None:
        self.name = name
        self.version = str(session.step) if version is None else version
        self.session = session
        self.updates = updates
        self.options = ServedModelOptions() if options is None else options
        if self.options.times_lookups:
            session.time_lookups()
        self._columns = ColumnReader(
            session.inputs, max_batch=self.options.max_batch, absent_is_missing=self.options.absent_is_missing
        )
        self._statistics = StatisticsCounter() if statistics is None else statistics
        self._others = others
        self.metadata = ModelMetadata(
            name=name,
            versions=(self.version,),
            platform=f"terarec_{session.run.model.kind}",
            inputs=self._columns.metadata(),
            outputs=(TensorMetadata(name=SCORE, datatype="FP32", shape=(-1, len(session.score_names))),),
        )
        self._batcher = Batcher(
            JoinedScoring(session),
            self.options.batching,
            name=name,
            statistics=self._statistics,
            has_one_core=torch.get_num_threads() == 1,
        )

    def __repr__(self) -> str:
        return f"ServedModel({self.name!r}, version {self.version!r}, {self.session!r})"

    def submit(
        self, request: InferRequest, call: Call | None = None, held: HeldMemory | None = None
    ) -> Future[InferResponse]:
        """Let the records of `request` be scored.

        The request's parameter ``priority`` is its level, and ``timeout`` the microseconds that it may wait.

        Args:
            request: The request.
            call: The call that it came with, which notes who scored it; None where nobody watches.
            held: Counts the memory of its columns; None for no limit.

        Returns:
            The answer, with the training steps of the weights as its parameter ``step``. It fails with `ConfigError`
            for a value that the workflow cannot read, and with `DeadlineError` for a request that waited for too long;
            `cancel` drops a request that waits.

        Raises:
            RequestTooLargeError: More records than `ServedModelOptions.max_batch`.
            ConfigError: An input that is unknown, missing, repeated or of the wrong type or shape.
            ServerBusyError: As many requests wait as may, or hold the memory that it needs; or the model is being
                unloaded.
        """
        for index, wanted in enumerate(request.outputs):
            # Checked although there is one output: a client that names another would take its scores for that.
            if wanted.name != SCORE:
                raise ConfigError(f"outputs[{index}].name", f"got {quoted(wanted.name)}, expected {SCORE!r}")
        urgency = Urgency.of(request)
        return self._batcher.submit(
            self._columns(request, held),
            partial(self._answer, request.id, call),
            priority=urgency.priority,
            timeout_seconds=urgency.timeout_seconds,
        )

    def records(self, request: InferRequest) -> RecordColumns:
        """Return the raw columns of a request; errors are those of `submit`."""
        return self._columns(request)

    def _answer(self, request_id: str | None, call: Call | None, part: ScoredPart) -> InferResponse:
        if call is not None:
            call.scored(self.version, part.step, part.times, part.lookup_ns)
        output = Tensor(name=SCORE, datatype="FP32", shape=part.scores.shape, data=part.scores.reshape(-1))
        return InferResponse(
            model_name=self.name,
            model_version=self.version,
            outputs=(output,),
            id=request_id,
            parameters={"step": part.step},
        )

    def statistics(self) -> ModelStatistics:
        """Return the counters of its requests, with those of other processes that serve it."""
        own = self._statistics.read()
        return own if self._others is None else own.plus(self._others())

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait."""
        return self._batcher.num_waiting

    @property
    def delay_seconds(self) -> float:
        """Time that a request waits for others at present."""
        return self._batcher.delay_seconds

    def close(self) -> None:
        """Answer the requests that wait, and close the session. Further requests are refused."""
        self._batcher.close()
        if self.updates is not None:
            self.updates.close()
        self.session.close()


class Urgency(NamedTuple):
    """What a request states in its parameters ``priority`` and ``timeout`` (microseconds).

    Attributes:
        priority: Its level; 0 for the default one.
        timeout_seconds: Time that it may wait; None for the default one.
    """

    priority: int
    timeout_seconds: float | None

    @classmethod
    def of(cls, request: InferRequest) -> Urgency:
        """Return the urgency of a request; raise `ConfigError` for a parameter that is no integer >= 0."""
        return cls(_parameter(request, "priority"), _parameter(request, "timeout") / 1e6 or None)


def _parameter(request: InferRequest, name: str) -> int:
    """Return a parameter that counts something; 0 where the request does not state it."""
    value = request.parameters.get(name, 0)
    # `type`, because True is an instance of int.
    if type(value) is not int or not 0 <= value < 2**63:
        raise ConfigError(f"parameters.{name}", f"got {quoted(value, is_json=True)}, expected an integer >= 0")
    return value
