# SPDX-License-Identifier: Apache-2.0
"""`VersionLoader`: a version of a repository becomes a served model, once it is known to score as its run does."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from terarec.errors import ConfigError, DataNotFoundError, FormatError, NoSpaceError, StorageError, TerarecError
from terarec.io.opening import sha256_of
from terarec.kernels import memory
from terarec.ps import ParameterServer
from terarec.serve.golden import GoldenRecords, tolerance
from terarec.serve.live import LiveUpdates
from terarec.serve.repository import GOLDEN_FILE, RepositoryModel
from terarec.serve.served_model import ServedModel
from terarec.serve.session import InferenceSession
from terarec.serve.statistics import ModelCounters
from terarec.serve.tables import ServedTables
from terarec.spec import HostMemorySpec, Numbers, ParameterServerSpec, ServedTablesSpec
from terarec.spec.checks import one_line
from terarec.spec.serving_options import ServedModelOptions
from terarec.spec.serving_repository import VersionSpec

if TYPE_CHECKING:  # it needs a system that can fork
    from terarec.serve.shared_tables import SharedTables

_LOGGER = logging.getLogger(__name__)
_FOLLOW_SECONDS = 1.0


class VersionLoader:
    """Opens versions, checks them and lets them score a few batches.

    Args:
        options: Limits and batches of the models.
        tables: Tiers of the tables' rows, which all versions share; None for the memory of the device.
        device: Device of the models; the CPU by default.
        numbers: Numbers of rows and layers.
        executor: Executor of the dense parts, as in `InferenceSession.open`.
        allow_import: Packages whose code workflows and models may name.
        follow_runs: Whether versions take over later checkpoints of the runs that they name.
        shared: Rows that other processes map, too, which load the same versions; None for one process.
        statistics: Counters of the versions; None for new ones of this process alone.
    """

    def __init__(
        self,
        options: ServedModelOptions | None = None,
        *,
        tables: ServedTablesSpec | None = None,
        device: torch.device | None = None,
        numbers: Numbers | None = None,
        executor: str = "auto",
        allow_import: Sequence[str] = (),
        follow_runs: bool = False,
        shared: SharedTables | None = None,
        statistics: ModelCounters | None = None,
    ) -> None:
        self._options = options or ServedModelOptions()
        self._tables = tables
        self._server = None if tables is None else ParameterServer(tables.server)
        self._device = device
        self._numbers = numbers
        self._executor = executor
        self._allow_import = tuple(allow_import)
        self._follow_runs = follow_runs
        self._shared = shared
        self._statistics = ModelCounters() if statistics is None else statistics
        self._identities: dict[ServedModel, object] = {}

    def load(self, model: RepositoryModel, version: int) -> ServedModel:
        """Open a version; return it once it is ready for requests.

        Raises:
            TerarecError: In one line: a damaged file, not enough memory, scores that are not those of its run, or any
                other reason for which it cannot be opened.
        """
        where = f"model {model.name!r} version {version}"
        try:
            return self._load(model, version)
        except TerarecError as error:
            kinds = (NoSpaceError, StorageError, DataNotFoundError, FormatError)
            kind = next((kind for kind in kinds if isinstance(error, kind)), None)
            raise (kind or ConfigError)(where, error.where, error.problem) from error
        except MemoryError as error:
            raise NoSpaceError(where, "it does not fit in memory") from error
        # A file of another party may fail in any way, which must not end what watches the repository.
        except Exception as error:
            _LOGGER.debug("%s", where, exc_info=True)
            raise StorageError(where, f"{type(error).__name__}: {one_line(str(error))}") from error

    def unload(self, model: ServedModel) -> None:
        """Remove the rows of a model that was closed from what other versions, or other processes, have, too."""
        self._statistics.release(_counted(model.name, model.version))
        identity = self._identities.pop(model, None)  # in any case: it would keep the model in memory
        if self._shared is not None:
            self._shared.forget(identity)
        served = model.session.served
        if self._server is not None and served is not None and served.server is self._server:
            served.unload()

    def close(self) -> None:
        """Close the tiers that all versions share; their models are closed before."""
        if self._server is not None:
            self._server.close()

    def _load(self, model: RepositoryModel, version: int) -> ServedModel:
        with contextlib.nullcontext() if self._shared is None else self._shared.turn():
            return self._load_in_turn(model, version)

    def _load_in_turn(self, model: RepositoryModel, version: int) -> ServedModel:
        path, described = model.version_path(version), model.described(version)
        follows = described is not None and described.follows is not None and self._follow_runs
        tables = self._tables_of(model.name, version, follows=follows)
        if described is not None:
            self._check_files(path, described)
            if tables is None:
                self._check_memory(described)
        session = InferenceSession.open(
            path,
            device=self._device,
            allow_import=self._allow_import,
            tables=tables,
            executor=self._executor,
            numbers=self._numbers,
        )
        updates: LiveUpdates | None = None
        identity = (model.name, version, model.identity(version), session.step)
        try:
            if self._shared is not None:
                self._shared.share(session.loaded.model, identity)
            if described is not None:
                golden = GoldenRecords.read(path / GOLDEN_FILE)
                difference = golden.check(session.score_batch, tolerance(session.numbers, session.run))
                _LOGGER.info("model %r version %d scores its golden records: %.3g off", model.name, version, difference)
                golden.warm(session.score_batch)
            if described is not None and described.follows is not None and follows:
                # After the comparison, which is with the scores of the checkpoint that was promoted.
                every = None if self._tables is None else self._tables.follow_seconds
                updates = LiveUpdates(session, Path(described.follows), every_seconds=every or _FOLLOW_SECONDS)
            served = served_model(
                session,
                self._options,
                name=model.name,
                version=str(version),
                updates=updates,
                statistics=self._statistics,
            )
            self._identities[served] = identity
            return served
        except BaseException:
            if self._shared is not None:
                self._shared.forget(identity)
            if updates is not None:
                updates.close()
            session.discard()
            raise

    def _tables_of(self, name: str, version: int, *, follows: bool) -> ServedTables | None:
        if self._tables is not None and self._server is not None:
            # Its own number and not its step: several versions may have that, and the same rows, and go one by one.
            return ServedTables(server=self._server, name=name, cache=self._tables.cache, version=version)
        # Updates change the rows of a parameter server.
        return ServedTables(server=ParameterServerSpec(tiers=(HostMemorySpec(),)), name=name) if follows else None

    def _check_files(self, path: Path, described: VersionSpec) -> None:
        """Compare the files that no checkpoint has a checksum of; it compares the others when it is read."""
        for name, expected in described.files.items():
            file = path / name
            if not file.resolve().is_relative_to(path.resolve()):
                raise FormatError(file, f"a link to {file.resolve()}, expected a file inside {path}")
            if sha256_of(file) != expected:
                raise FormatError(file, "damaged: its SHA-256 is not the one that was promoted")

    def _check_memory(self, described: VersionSpec) -> None:
        # Before anything is read: a machine that runs out of memory takes the version that answers with it.
        if self._device is None or self._device.type == "cpu":
            memory.require(described.memory_bytes, "tables and layers")
            return
        if self._device.type == "cuda":
            available, _ = torch.cuda.mem_get_info(self._device)
            if described.memory_bytes > available:
                problem = f"{described.memory_bytes:,} bytes requested, {available:,} available on {self._device}"
                raise NoSpaceError("tables and layers", problem)


def served_model(
    session: InferenceSession,
    options: ServedModelOptions,
    *,
    name: str,
    version: str | None = None,
    updates: LiveUpdates | None = None,
    statistics: ModelCounters | None = None,
) -> ServedModel:
    """Return a model whose requests are counted by `statistics`, if there are such; see `ServedModel`."""
    counted = _counted(name, version)
    return ServedModel(
        session,
        options,
        name=name,
        version=version,
        updates=updates,
        statistics=None if statistics is None else statistics.counter(counted),
        others=None if statistics is None else partial(statistics.others, counted),
    )


def _counted(name: str, version: str | None) -> str:
    return name if version is None else f"{name}/{version}"
