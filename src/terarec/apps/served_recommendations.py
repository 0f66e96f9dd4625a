# SPDX-License-Identifier: Apache-2.0
"""`ServedRecommendations`: retrieve, then rank, by the models that a server has, for its path ``/v1/recommend``.

Vectors of users are computed in batches, and candidates are scored in the queue of the ranking model, next to its other
requests. A new version of the retrieval model, or a new file of items, is indexed in the background, and then takes
over at once; until then the former version and items answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from typing_extensions import override

from terarec.apps.item_index import Floats, Integers
from terarec.apps.recommend import Candidates, Catalogue, Recommender
from terarec.apps.retrieval_model import RetrievalModel
from terarec.errors import ConfigError, StorageError
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.serving import EncodedRecords
from terarec.formats.table_file import read_table_file
from terarec.io.files import file_identity
from terarec.repeating import Backoff, Repeating
from terarec.serve.batcher import Batcher, ScoredPart
from terarec.serve.client import request_tensors
from terarec.serve.columns import (
    ITEM_BYTES,
    MOST_REPEATED,
    ColumnReader,
    RecordColumns,
    check_repeated,
    value_size,
)
from terarec.serve.joined_scoring import JoinedScoring
from terarec.serve.json_codec import float32_elements
from terarec.serve.models import ServedModels
from terarec.serve.protocol import (
    DeadlineError,
    InferRequest,
    InferResponse,
    RequestTooLargeError,
    ServerBusyError,
    UnavailableError,
    UnknownModelError,
)
from terarec.serve.recommending import (
    Outcome,
    RecommendAnswer,
    RecommendationCounter,
    RecommendationStatistics,
    RecommendRequest,
    ScoringVersion,
)
from terarec.serve.request_memory import HeldMemory, LargeRequestError
from terarec.serve.served_model import ServedModel, Urgency
from terarec.serve.session import Scored
from terarec.spec.checks import quoted
from terarec.spec.registry import unknown_name
from terarec.spec.serving import RecommendationSpec

_LOGGER = logging.getLogger(__name__)
_SEARCH_THREADS = 2
_CANDIDATE_BYTES = 64
"""Memory of a candidate in a column of the ranking model, about: an object of Python, and its places in lists."""

Result = TypeVar("Result")


class _UserVectors:
    """Vectors of users as scores float32[B, D], so that requests are joined as those for scores are."""

    def __init__(self, retrieval: RetrievalModel) -> None:
        self._retrieval = retrieval

    def scored_records(self, encode: Callable[[Workflow], EncodedRecords]) -> Scored:
        return Scored(self._retrieval.encoded_users(encode(self._retrieval.of_users)), self._retrieval.step)


class _Retrieval:
    """One version of the retrieval model, and the index of its items."""

    def __init__(self, model: ServedModel, retrieval: RetrievalModel, recommender: Recommender) -> None:
        self.model, self.recommender = model, recommender
        of_users = [column for column in retrieval.inputs if column.name in recommender.user_columns]
        options = model.options
        self.reader = ColumnReader(of_users, max_batch=options.max_batch, absent_is_missing=options.absent_is_missing)
        self._records = retrieval.user_records
        self._batcher = Batcher(JoinedScoring(_UserVectors(retrieval)), options.batching, name=model.name)

    def submit(self, request: RecommendRequest) -> Future[ScoredPart]:
        """Let the vectors of users be computed; errors are those of `ServedModel.submit`."""
        known = self.reader.metadata()
        users = {column.name: request.users[column.name] for column in known if column.name in request.users}
        question = InferRequest(inputs=tuple(request_tensors(known, users)), parameters=request.parameters)
        columns, num_users = self.reader(question)
        urgency = Urgency.of(question)
        return self._batcher.submit(
            RecordColumns(self._records(columns, num_users), num_users),
            lambda part: part,
            priority=urgency.priority,
            timeout_seconds=urgency.timeout_seconds,
        )

    def close(self) -> None:
        """Answer what waits, and end."""
        self._batcher.close()


class _Ranking(NamedTuple):
    """Scores of the ranking model.

    Attributes:
        scores: Those of the candidates of each user.
        version: What scored them.
    """

    scores: list[Floats]
    version: ScoringVersion


class ServedRecommendations(Repeating):
    """Answers requests by the models of a server. Thread-safe.

    `_current` is replaced as a whole by the thread that polls, and read once by each request.

    Raises:
        ConfigError: A model that is not served, is of another kind or follows a training, a column that is missing or
            of a type that the models do not read, or keys that are neither integers nor texts.
        DataNotFoundError: There is no file of items.
        FormatError: A damaged file.
        MissingDependencyError: Lists are needed, and faiss is not installed.
    """

    def __init__(self, spec: RecommendationSpec, models: ServedModels) -> None:
        self._spec = spec
        self._models = models
        self._counter = RecommendationCounter()
        self._current: _Retrieval | None = None
        self._identity: object = None
        self._failed: tuple[object, Backoff] | None = None
        models.get(spec.retrieval)  # an error here, where `poll` would wait for it
        self.poll()
        self._pool = ThreadPoolExecutor(_SEARCH_THREADS, "recommend")
        super().__init__("terarec-recommendations", spec.poll_seconds)

    @override
    def poll(self) -> int:
        """Index the items anew if they, or the version of the retrieval model, have changed.

        Where that fails it is tried again: at once when the files or a model have changed, and else, since a disk may
        have room or a model be back later, after pauses.
        """
        following: _Retrieval | None = None
        identity: object = None
        model = self._model(self._spec.retrieval)
        if model is not None:
            identity = (model, file_identity(Path(self._spec.items)))
            if identity == self._identity:
                return 0
            tried = (identity, self._model(self._spec.ranker))
            if self._failed is None or self._failed[0] != tried:
                self._failed = tried, Backoff(self._spec.poll_seconds)
            backoff = self._failed[1]
            if not backoff.is_due:
                return 0
            try:
                following = self._opened(model)
            except BaseException:
                backoff.fail()
                raise
        former, self._current, self._identity, self._failed = self._current, following, identity, None
        if former is not None:
            former.close()
        return int(following is not None)

    def _model(self, name: str | None) -> ServedModel | None:
        try:
            return None if name is None else self._models.get(name)
        except UnknownModelError:
            return None

    @override
    def close(self) -> None:
        super().close()
        if self._current is not None:
            self._current.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def statistics(self) -> RecommendationStatistics:
        """Return the counters of the requests."""
        current = self._current
        return self._counter.read(items=0 if current is None else len(current.recommender.index))

    def take(self, request: RecommendRequest, held: HeldMemory) -> None:
        """Count the memory of the candidates that are ranked.

        Before the request has any, since those that hold some and want more would wait for each other.

        Raises:
            LargeRequestError: It has to wait for its turn.
            ServerBusyError: Other requests hold the memory.
        """
        ranker, current = self._model(self._spec.ranker), self._current
        if ranker is None or current is None:
            return
        num_users = max(map(len, request.users.values()), default=0)
        # More are refused, and so are longer values.
        number = min(num_users * self._num_candidates(request), current.model.options.max_batch)
        names = {tensor.name for tensor in ranker.metadata.inputs}
        # Lists of users are as long as the longest one, for each of the candidates.
        items = sum(
            min(number * max(map(value_size, values), default=0), MOST_REPEATED)
            for column, values in request.users.items()
            if column in names
        )
        try:
            held.take(_CANDIDATE_BYTES * number * len(names) + ITEM_BYTES * items)
        except LargeRequestError:  # it comes again
            raise
        except ServerBusyError:
            self._counter.add("rejected", users=0, times_ns={})
            raise

    async def recommend(self, request: RecommendRequest) -> RecommendAnswer:
        """Return items for users.

        Raises:
            ConfigError: A column that is unknown, missing or of another length, a value that a workflow cannot read,
                lists for another number of users, or more items or candidates than the limits.
            RequestTooLargeError: More candidates in all than a request may have records.
            DeadlineError: The request waited for too long.
            UnavailableError: The retrieval model, or its version that is indexed, is unloaded, or too many wait.
        """
        outcome: Outcome = "error"
        answer: RecommendAnswer | None = None
        times_ns: dict[str, int] = {}
        try:
            answer = await self._answer(request, times_ns)
            outcome = "success"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except DeadlineError:
            outcome = "expired"
            raise
        except UnavailableError:
            outcome = "rejected"
            raise
        finally:
            self._counter.add(outcome, users=0 if answer is None else len(answer.items), times_ns=times_ns)
        return answer

    async def _answer(self, request: RecommendRequest, times_ns: dict[str, int]) -> RecommendAnswer:
        begun = time.monotonic_ns()
        # In a thread: it converts the columns of thousands of users, and lists of millions of items.
        current, pending = await self._in_thread(partial(self._submitted, request))
        number = self._num_candidates(request)
        try:
            part = await asyncio.wrap_future(pending)
        except StorageError:
            if self._serves(current.model):
                raise
            # Its rows went with it, where they are in tiers that all versions share.
            problem = f"version {current.model.version} of {current.model.name!r} is unloaded"
            raise UnavailableError("recommendations", f"{problem}, and the next one not indexed; try again") from None
        retrieve = partial(
            current.recommender.retrieve, part.scores, number, exclude=request.exclude, allow=request.allow
        )
        retrieved = await self._in_thread(retrieve)
        arrived = time.monotonic_ns()
        ranking = None
        if self._spec.ranker is not None:
            ranking = await self._ranking(self._spec.ranker, current, request, retrieved)
        ended = time.monotonic_ns()
        scores = [each.logits for each in retrieved] if ranking is None else ranking.scores
        best = current.recommender.best([each.places for each in retrieved], scores, request.k)
        times_ns |= {"retrieve": arrived - begun, "request": ended - begun}
        if ranking is not None:
            times_ns["rank"] = ended - arrived
        return RecommendAnswer(
            items=best.items,
            scores=[float32_elements(np.array(row, np.float32)) for row in best.scores],
            retrieval=ScoringVersion(model=current.model.name, version=current.model.version, step=part.step),
            ranking=None if ranking is None else ranking.version,
            id=request.id,
        )

    def _serves(self, model: ServedModel) -> bool:
        try:
            return self._models.get(model.name, model.version) is model
        except UnknownModelError:
            return False

    def _submitted(self, request: RecommendRequest) -> tuple[_Retrieval, Future[ScoredPart]]:
        """Check a request, and let the vectors of its users be computed."""
        while True:
            current = self._current
            if current is None:
                raise UnavailableError(
                    "recommendations", f"the model {self._spec.retrieval!r} is not loaded; try again"
                )
            self._check(request, current)
            try:
                return current, current.submit(request)
            except ServerBusyError:
                if self._current is current:
                    raise  # else its successor takes the request

    def _check(self, request: RecommendRequest, current: _Retrieval) -> None:
        catalogue, options = current.recommender.catalogue, current.model.options
        needed = dict.fromkeys(current.recommender.user_columns)
        if self._spec.ranker is not None:
            ranker = self._models.get(self._spec.ranker)
            names = [column.name for column in ranker.session.inputs]
            needed |= dict.fromkeys(name for name in names if name not in catalogue.names)
        required = () if options.absent_is_missing else tuple(needed)
        num_users = catalogue.num_users(request.users, required)
        for name in request.users:
            if name not in needed:
                raise unknown_name("users", name, needed)
        if not num_users:
            raise ConfigError("users", "got none, expected at least one")
        if request.exclude is not None and len(request.exclude) != num_users:
            raise ConfigError("exclude", f"got {len(request.exclude)} lists, expected {num_users}, one for each user")
        if request.k > self._spec.most_items:
            raise ConfigError("k", f"got {request.k}, expected at most {self._spec.most_items} items for a user")
        number = self._num_candidates(request)
        if number > self._spec.most_candidates:
            problem = f"got {number}, expected at most {self._spec.most_candidates} for a user"
            raise ConfigError("candidates", problem)
        if num_users * number > options.max_batch:
            problem = f"got {num_users} with {number} candidates each, expected at most {options.max_batch} in all"
            raise RequestTooLargeError("users", f"{problem}; send fewer users at a time")

    def _num_candidates(self, request: RecommendRequest) -> int:
        if self._spec.ranker is None:
            return request.k
        return max(request.k, self._spec.candidates if request.candidates is None else request.candidates)

    async def _ranking(
        self,
        name: str,
        current: _Retrieval,
        request: RecommendRequest,
        retrieved: Sequence[Candidates],
    ) -> _Ranking:
        ranker = self._models.get(name)
        places = [each.places for each in retrieved]
        lengths = [len(rows) for rows in places]
        if not sum(lengths):  # after `exclude` and `allow`
            return _Ranking(
                [each.logits for each in retrieved],
                ScoringVersion(model=ranker.name, version=ranker.version, step=ranker.session.step),
            )
        names = {tensor.name for tensor in ranker.metadata.inputs}
        for column, values in request.users.items():
            for value in values if column in names else ():
                check_repeated(column, value, sum(lengths))
        # In a thread: it converts the columns of thousands of candidates.
        pending, score_names = await self._in_thread(partial(self._ask, ranker, current.recommender, request, places))
        answer = await asyncio.wrap_future(pending)
        scores = np.asarray(answer.outputs[0].data, np.float32).reshape(answer.outputs[0].shape)
        chosen = self._column(score_names[answer.model_version])
        return _Ranking(
            np.split(scores[:, chosen], np.cumsum(lengths)[:-1]),
            ScoringVersion(model=answer.model_name, version=answer.model_version, step=answer.parameters["step"]),
        )

    def _ask(
        self, ranker: ServedModel, recommender: Recommender, request: RecommendRequest, places: Sequence[Integers]
    ) -> tuple[Future[InferResponse], Mapping[str, Sequence[str]]]:
        """Let candidates be scored as the records of any request are; return the names of scores by version, too."""
        names = [tensor.name for tensor in ranker.metadata.inputs]
        of_items = [name for name in names if name in recommender.catalogue.names]
        of_users = [name for name in names if name in request.users]
        if len(places) == 1:  # one value counts for all records
            columns = recommender.ranking_columns(of_items, request.users, places)
            columns |= {name: request.users[name] for name in of_users}
        else:
            columns = recommender.ranking_columns([*of_items, *of_users], request.users, places)
        tensors = request_tensors(ranker.metadata.inputs, columns)
        # Before and after: the version that answers may come, or go, at this moment.
        before = self._score_names(ranker.name)
        pending = self._models.submit(InferRequest(inputs=tuple(tensors), parameters=request.parameters), ranker.name)
        return pending, {**before, **self._score_names(ranker.name)}

    def _score_names(self, name: str) -> Mapping[str, Sequence[str]]:
        names: dict[str, Sequence[str]] = {}
        for version in self._models.versions(name):
            with contextlib.suppress(UnknownModelError):  # retired meanwhile
                names[version] = self._models.get(name, version).session.score_names
        return names

    def _column(self, names: Sequence[str]) -> int:
        """Return the place of the score to rank by, of a version with scores of these names."""
        if self._spec.score is None:
            return 0
        if self._spec.score not in names:
            raise ConfigError("score", f"got {self._spec.score!r}, expected one of {', '.join(names)}")
        return tuple(names).index(self._spec.score)

    def _opened(self, model: ServedModel) -> _Retrieval:
        """Return a version of the retrieval model with the index of the items as they are now."""
        if model.updates is not None:
            problem = f"model {model.name!r} follows a training, expected versions whose index remains true"
            raise ConfigError("retrieval", problem)
        retrieval = RetrievalModel(model.session.loaded, model.session.workflow, model.session.numbers)
        ranker = None if self._spec.ranker is None else self._models.get(self._spec.ranker)
        inputs = [*retrieval.inputs, *(() if ranker is None else ranker.session.inputs)]
        # A CSV has no types: "007" would be read as a number and lose its zeros.
        texts = [column.name for column in inputs if column.kind == "string"]
        catalogue = Catalogue(read_table_file(Path(self._spec.items), texts=texts), self._spec.key)
        keys = catalogue.keys(range(len(catalogue)))
        if not set(map(type, keys)) <= {int, str}:
            got = quoted(next(key for key in keys if type(key) not in (int, str)))
            raise ConfigError(self._spec.items, f"got the key {got} in {self._spec.key!r}, expected integers or texts")
        if ranker is not None:
            self._column(ranker.session.score_names)
            names = [tensor.name for tensor in ranker.metadata.inputs if tensor.name in catalogue.names]
            if not names:
                expected = ", ".join(tensor.name for tensor in ranker.metadata.inputs)
                problem = f"got the columns {', '.join(catalogue.names)}, expected some of {expected} for the ranker"
                raise ConfigError("items", problem)
            # Now and not in a request: a column of a type that the model does not read.
            request_tensors(ranker.metadata.inputs, {name: catalogue.columns.column(name) for name in names})
        # Last, as it takes longest.
        index_dir = None if self._spec.index_dir is None else Path(self._spec.index_dir)
        recommender = Recommender.open(retrieval, catalogue, index=self._spec.index, index_dir=index_dir)
        _LOGGER.info("recommendations: %d items by version %s of %r", len(catalogue), model.version, model.name)
        return _Retrieval(model, retrieval, recommender)

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)
