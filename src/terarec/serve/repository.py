# SPDX-License-Identifier: Apache-2.0
"""`ModelRepository`: models on a disk, their numbered versions, and the pointer to the version that answers.

``DIR/MODEL/N/`` is version N: a run with one checkpoint, and ``version.json``. ``DIR/MODEL/pointer.json`` says which
version answers, and ``DIR/MODEL/model.json`` which versions a server loads. docs/operating.md describes them.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from terarec.config.files import CHECKPOINT_DIRECTORY, DATASET_DIRECTORY, RUN_FILE
from terarec.errors import ConfigError, DataNotFoundError, FormatError, StorageError, TerarecError
from terarec.io.directories import ensure_parents
from terarec.io.files import file_identity, read_versioned_json, write_versioned_json
from terarec.io.locks import file_lock, wait_for_lock
from terarec.io.owned import OWNED, remove_abandoned
from terarec.io.remote import PARTIAL_SUFFIX
from terarec.io.removal import MARKER, begin_removal, remove_tree
from terarec.serve.executor_file import EXECUTORS_FILE
from terarec.spec import checks, from_data, to_data
from terarec.spec.checks import FieldError, did_you_mean
from terarec.spec.serving_repository import (
    MOST_EVENTS,
    MOST_VERSIONS,
    AllVersions,
    LatestVersions,
    PointerAction,
    PointerEvent,
    PointerSpec,
    PromotedVersions,
    PromotionSpec,
    RepositoryModelSpec,
    SpecificVersions,
    VersionSpec,
)

MODEL_FILE, POINTER_FILE, VERSION_FILE = "model.json", "pointer.json", "version.json"
GOLDEN_FILE = "golden.safetensors"
_PROMOTING, _POINTING = ".promoting.lock", ".pointer.lock"
_LOCK_SECONDS = 30.0
_FORMAT_VERSION = 1
_NUMBER = re.compile(r"[1-9]\d{0,9}")
_UNFINISHED = re.compile(rf"[1-9]\d{{0,9}}{re.escape(PARTIAL_SUFFIX)}{OWNED}")
_ENTRIES = "|".join(
    (
        *map(re.escape, (RUN_FILE, DATASET_DIRECTORY, CHECKPOINT_DIRECTORY, EXECUTORS_FILE, VERSION_FILE, GOLDEN_FILE)),
        r"\.terarec-loaded.*",
        rf".*{re.escape(PARTIAL_SUFFIX)}.*",
    )
)
"""Names of the entries of a version, by which one is recognized before it is removed."""

_Spec = TypeVar("_Spec", RepositoryModelSpec, PointerSpec, VersionSpec)


def now() -> str:
    """Return the present time in UTC, as files have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class ModelRepository:
    """Models in a directory. Several processes may use it at the same time."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the models: of the directories that hold a version, a pointer or a description."""
        if not self.path.is_dir():
            raise DataNotFoundError(self.path, "no such directory, expected a model repository")
        entries = sorted(entry for entry in self.path.iterdir() if checks.is_name(entry.name) and entry.is_dir())
        return tuple(entry.name for entry in entries if RepositoryModel(entry).is_model)

    def model(self, name: str) -> RepositoryModel:
        """Return a model, which may be one that has no version yet."""
        # Part of a path: it must not lead out of the repository.
        if not checks.is_name(name) or name.startswith("."):
            raise ConfigError("model", f"got {checks.quoted(name)}, expected a name without slashes")
        return RepositoryModel(self.path / name)

    def known(self, name: str) -> RepositoryModel:
        """Return a model that is there.

        Raises:
            ConfigError: There is none of that name.
            DataNotFoundError: The repository is not there.
        """
        names = self.names
        if name not in names:
            expected = f"one of {', '.join(map(repr, names))}" if names else "a repository with models"
            problem = f"the repository holds no {checks.quoted(name)}{did_you_mean(name, names)}, expected {expected}"
            raise ConfigError("model", problem)
        return RepositoryModel(self.path / name)


class RepositoryModel:
    """A model of a repository."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    @property
    def is_model(self) -> bool:
        """Whether the directory holds a version, a pointer or a description, or cannot be read."""
        try:
            return bool(self.versions) or any((self.path / name).is_file() for name in (POINTER_FILE, MODEL_FILE))
        except OSError:  # such as one of another user: whoever reads it says so, and others are served
            return True

    @property
    def versions(self) -> tuple[int, ...]:
        """Numbers of the versions, rising: of the directories with a run in them, or that cannot be read."""
        if not self.path.is_dir():
            return ()
        entries = [entry for entry in self.path.iterdir() if _NUMBER.fullmatch(entry.name)]
        return tuple(sorted(int(entry.name) for entry in entries if _is_run(entry)))

    def version_path(self, version: int) -> Path:
        """Return the directory of a version, which is a run.

        Raises:
            ConfigError: There is no such version.
            FormatError: It is a link that leads out of the repository.
        """
        path = self.path / str(version)
        if version not in self.versions:
            numbers = ", ".join(map(str, self.versions))
            expected = f"one of {numbers}" if numbers else "a model with versions"
            raise ConfigError("version", f"model {self.name!r} has no version {version}, expected {expected}")
        return self._inside(path)

    def _inside(self, path: Path) -> Path:
        # A repository of another party must not make a server read or write elsewhere.
        real = os.path.realpath(path)  # which takes links in a circle, too
        if not Path(real).is_relative_to(os.path.realpath(self.path.parent)):
            raise FormatError(path, f"a link to {real}, expected a directory inside {self.path.parent}")
        return path

    def spec(self) -> RepositoryModelSpec:
        """Return the description of the model."""
        return _read(self.path / MODEL_FILE, RepositoryModelSpec) or RepositoryModelSpec()

    def pointer(self) -> PointerSpec:
        """Return the pointer; of a model that was not promoted, an empty one."""
        return _read(self.path / POINTER_FILE, PointerSpec) or PointerSpec()

    def identity(self, version: int) -> object:
        """Return what tells a version from one that took its number later; None where it is gone."""
        path = self.path / str(version)
        return file_identity(path / VERSION_FILE) or file_identity(path)

    def described(self, version: int) -> VersionSpec | None:
        """Return the description of a version; None for a run that was put there by hand.

        Raises:
            ConfigError: There is no such version.
            FormatError: The file is damaged.
        """
        return _read(self.version_path(version) / VERSION_FILE, VersionSpec)

    def wanted(self, pointer: PointerSpec) -> tuple[int, ...]:
        """Return the versions that a server loads; the one that answers comes first."""
        policy, versions = self.spec().versions, self.versions
        named = pointer.versions if pointer.current is not None else versions[-1:]
        match policy:
            case PromotedVersions():
                others: tuple[int, ...] = ()
            case LatestVersions(count=count):
                others = versions[-count:]
            case AllVersions():
                others = versions
            case SpecificVersions(versions=numbers):
                others = numbers
                named = named if pointer.current is not None else tuple(sorted(numbers)[-1:])
        return tuple(dict.fromkeys((*named, *reversed(others))))

    @contextlib.contextmanager
    def promoting(self) -> Iterator[int]:
        """Keep other promotions away in the block, and yield the number of the next version.

        What a promotion that was killed has left is removed. A model that is new goes again if the block fails.
        """
        with ensure_parents(self.path / _PROMOTING), file_lock(self.path / _PROMOTING) as is_held:
            if not is_held:
                raise ConfigError(self.path, "another promotion of this model runs, expected one at a time; try again")
            for entry in self.path.iterdir():
                with contextlib.suppress(OSError):  # one that cannot be read stays
                    is_half_removed = _NUMBER.fullmatch(entry.name) and (entry / MARKER).is_file()
                    if _UNFINISHED.fullmatch(entry.name):
                        remove_abandoned(entry)
                    elif is_half_removed:
                        remove_tree(entry, names=_ENTRIES, ignore_errors=True)
            # Also beyond those that are gone: a number means the same weights for ever.
            pointer = self.pointer()
            former = (*pointer.versions, *pointer.before, *(event.version for event in pointer.history))
            taken = [int(entry.name) for entry in self.path.iterdir() if _NUMBER.fullmatch(entry.name)]
            version = max((*former, *taken), default=0) + 1
            if version > MOST_VERSIONS:
                raise ConfigError(self.path, f"version {MOST_VERSIONS} is taken, expected room for a higher one")
            yield version

    def promote(self, version: int, spec: PromotionSpec) -> PointerSpec:
        """Let a version answer all requests, or a share of them, or score a share of them without answering.

        Returns:
            The new pointer.

        Raises:
            ConfigError: No such version; or a share where no version answers, or where this one does.
            StorageError: Other changes of the pointer do not end, or its file cannot be written.
        """

        def change(pointer: PointerSpec) -> PointerSpec:
            self.version_path(version)
            split, shadow = spec.split_of(version), spec.shadow_of(version)
            if split is not None or shadow is not None:
                self.check_second(spec, pointer, version)
                if split is not None:
                    return _logged(replace(pointer, split=split), "split", version)
                return _logged(replace(pointer, shadow=shadow), "shadow", version)
            former = (*pointer.before, *pointer.versions[:1]) if pointer.current is not None else pointer.before
            # One that answers again is no earlier version of itself. Of those that are gone, the highest number alone
            # is needed: the next version gets a higher one.
            known = {*self.versions, max(former, default=0)} - {version}
            before = tuple(number for number in dict.fromkeys(reversed(former)) if number in known)[::-1]
            moved = replace(pointer, current=version, since=now(), before=before, split=None, shadow=None)
            return _logged(moved, "promote", version)

        return self._change(change)

    def check_second(self, spec: PromotionSpec, pointer: PointerSpec, version: int | None = None) -> None:
        """Raise `ConfigError` if a version is to share the requests of none, or of itself."""
        if spec.share is None and spec.shadow is None:
            return
        if pointer.current in (None, version):
            what = "no version answers yet" if pointer.current is None else f"version {version} answers already"
            problem = f"{what} for model {self.name!r}, expected another version that answers"
            raise FieldError("PromotionSpec", "share" if spec.share is not None else "shadow", problem)

    def roll_back(self, to: int | None = None) -> PointerSpec:
        """Take back the last promotion.

        Args:
            to: Version that is to answer. None to end a split and a shadow, or, where there are none, for the version
                that answered before.

        Returns:
            The new pointer.

        Raises:
            ConfigError: No such version, or none that answered before.
            StorageError: Other changes of the pointer do not end, or its file cannot be written.
        """

        def change(pointer: PointerSpec) -> PointerSpec:
            ended = replace(pointer, split=None, shadow=None)
            seconds = [second.version for second in (pointer.split, pointer.shadow) if second is not None]
            if to is None and seconds:
                return _logged(ended, "end", seconds[0])
            versions = self.versions
            before = [number for number in pointer.before if number in versions]
            if to is None and not before:
                raise ConfigError("version", f"model {self.name!r} has no earlier version to return to")
            target = before[-1] if to is None else to
            self.version_path(target)
            # Returning to an earlier version takes back all that were promoted after it; any other one comes on top.
            present = [pointer.current] if pointer.current not in (None, target) else []
            kept = before[: before.index(target)] if target in before else [*before, *present]
            return _logged(replace(ended, current=target, since=now(), before=tuple(kept)), "rollback", target)

        return self._change(change)

    def remove_old(self, keep: int) -> tuple[int, ...]:
        """Remove versions but for the highest ones and those that the pointer names; return what was removed.

        A version that terarec has not made, or that cannot be removed, stays.
        """
        versions = self.versions
        highest = versions[len(versions) - min(keep, len(versions)) :]
        removed = []
        for version in versions:
            path = self.path / str(version)
            try:
                if version in highest or path.is_symlink() or not (path / VERSION_FILE).is_file():
                    continue
                with self._pointing():
                    pointer, present = self.pointer(), self.versions
                    # What a rollback returns to next stays as well.
                    before = [number for number in pointer.before if number in present]
                    if version in (*pointer.versions, *before[-1:]):
                        continue
                    # Without the run's file it is no version any longer, which a pointer could name.
                    begin_removal(path, names=_ENTRIES, first=RUN_FILE)
                remove_tree(path)
                removed.append(version)
            except StorageError:  # others do not end changing the pointer; the next promotion removes what is left
                break
            except (ConfigError, OSError):
                continue
        return tuple(removed)

    def _change(self, change: Callable[[PointerSpec], PointerSpec]) -> PointerSpec:
        self._inside(self.path)
        try:
            with self._pointing():
                pointer = change(self.pointer())
                write_versioned_json(self.path / POINTER_FILE, PointerSpec.format, _FORMAT_VERSION, to_data(pointer))
                return pointer
        except TerarecError:  # some are errors of the system, too
            raise
        except OSError as error:
            raise StorageError(self.path / POINTER_FILE, f"cannot be changed: {error.strerror}") from error

    @contextlib.contextmanager
    def _pointing(self) -> Iterator[None]:
        """Keep changes of the pointer by others away in the block; raise `StorageError` where they do not end."""
        with wait_for_lock(self.path / _POINTING, _LOCK_SECONDS) as is_held:
            if not is_held:
                raise StorageError(self.path / POINTER_FILE, "is being changed by others, which do not end")
            yield


def _is_run(directory: Path) -> bool:
    try:
        return stat.S_ISREG((directory / RUN_FILE).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # such as one of another user: whoever loads it says so, and others are served
        return True


def _logged(pointer: PointerSpec, action: PointerAction, version: int) -> PointerSpec:
    event = PointerEvent(time=now(), action=action, version=version)
    return replace(pointer, history=(*pointer.history, event)[-MOST_EVENTS:])


def _read(path: Path, kind: type[_Spec]) -> _Spec | None:
    """Read a description; None where there is no file."""
    try:
        return from_data(kind, read_versioned_json(path, kind.format, _FORMAT_VERSION), f"{path}: $")
    except DataNotFoundError:
        return None
    except FormatError:
        raise
    except ConfigError as error:
        raise FormatError(error.where, error.problem) from None


def write_version(path: Path, spec: VersionSpec) -> None:
    """Write the description of a version into its directory, which is not complete before that."""
    write_versioned_json(path / VERSION_FILE, VersionSpec.format, _FORMAT_VERSION, to_data(spec), flushes=False)
