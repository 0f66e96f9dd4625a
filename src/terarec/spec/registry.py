# SPDX-License-Identifier: Apache-2.0
"""Registries of what descriptions name: entries of one kind, workflow operators, and code of other packages.

`terarec.etl.ops` registers terarec's operators when it is imported; users register theirs with the same decorator.
A run or a workflow from another party could run any code as ``package.module:name``, so it is imported only where the
caller allows its package.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from terarec.errors import ConfigError, TerarecError, UserCodeError
from terarec.spec.checks import did_you_mean, quoted
from terarec.user_code import describe, note_import

Entry = TypeVar("Entry")
Registered = TypeVar("Registered")


class Registry(Mapping[str, Entry]):
    """Entries by name, in the order in which they were added. A name has one entry.

    Args:
        what: Noun for an entry in errors, such as "layer".
        entries: First entries: name -> entry, or pairs of them.

    Raises:
        ConfigError: A repeated name.
    """

    def __init__(self, what: str, entries: Mapping[str, Entry] | Iterable[tuple[str, Entry]] = ()) -> None:
        self.what = what
        self._entries: dict[str, Entry] = {}
        for name, entry in entries.items() if isinstance(entries, Mapping) else entries:
            self.add(name, entry)

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, name: str, entry: Entry) -> None:
        """Add an entry. A class or function replaces itself, as when its module is executed again.

        Raises:
            ConfigError: Another entry has the name.
        """
        known = self._entries.get(name)
        if known is not None and _origin(known) != _origin(entry):
            raise ConfigError(f"{self.what} {name!r}", f"got a second one, {_spelled(entry)}, expected another name")
        self._entries[name] = entry

    def register(self, name: str | None = None) -> Callable[[Registered], Registered]:
        """Return a decorator that adds a class or a function.

        Args:
            name: Name; None for that of the class or function without underscores at its start.
        """

        def decorate(entry: Registered) -> Registered:
            self.add(name or str(getattr(entry, "__name__", "")).lstrip("_"), entry)  # type: ignore[arg-type]
            return entry

        return decorate

    def find(self, name: str, where: str | None = None, *, listed: Collection[str] = ()) -> Entry:
        """Return the entry of a name.

        Args:
            name: Name as it was received.
            where: Field or argument that has it; None for the noun of the registry.
            listed: Names for the error where they differ from the keys.

        Raises:
            ConfigError: An unknown name; the nearest known one is named.
        """
        if name not in self._entries:
            raise unknown_name(where or self.what, name, self._entries, listed=listed)
        return self._entries[name]


def unknown_name(where: str, got: str, known: Collection[str], *, listed: Collection[str] = ()) -> ConfigError:
    """Return the error about a name that is none of `known`.

    Args:
        where: Field or argument that has the name.
        got: Received name.
        known: Accepted names, the nearest of which is suggested.
        listed: Accepted names as they are listed; those of `known` where it is empty.
    """
    return ConfigError(
        where, f"got {quoted(got)}{did_you_mean(got, known)}, expected one of {', '.join(listed or known)}"
    )


def _origin(entry: object) -> object:
    """Return the identity of an entry: the place of its definition, or the entry itself."""
    # A module that is loaded again, such as a cell of a notebook, makes another class of the same name.
    place = getattr(entry, "__module__", None), getattr(entry, "__qualname__", None)
    return entry if None in place else place


def _spelled(entry: object) -> str:
    return str(getattr(entry, "__qualname__", None) or quoted(entry))


def imported(name: str) -> Callable[..., Any]:
    """Import the function or class that ``"package.module:name"`` names.

    Raises:
        ConfigError: There is none.
    """
    module, _, path = name.partition(":")
    try:
        value = functools.reduce(getattr, path.split("."), _import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"function {name!r}", f"cannot be imported ({error}), expected 'package.module:name'"
        ) from None
    if not callable(value):
        raise ConfigError(f"function {name!r}", "is no function")
    result: Callable[..., Any] = value
    return result


def _import_module(name: str) -> ModuleType:
    """Import a module that a workflow or a run names.

    Raises:
        ImportError: There is none, or it imports what is not there.
        UserCodeError: It raises another exception.
    """
    note_import(name)
    try:
        return importlib.import_module(name)
    except (ImportError, TerarecError, MemoryError):
        raise
    # An AttributeError of its own code must not read as one of the name that is looked up in it.
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"module {name!r}", f"cannot be imported: {describe(error)}") from error


def check_allowed(name: str, allow_import: Sequence[str], what: str) -> None:
    """Raise unless the code that `name` names is of a package that is allowed, and defined in one.

    Nothing is imported for code that is rejected by its name. A module that is not installed is no error here.

    Args:
        name: ``"package.module:name"``.
        allow_import: Packages and modules, such as "shop" or "shop.features"; what lies below them is allowed too.
        what: The thing that names it and where, for the error.

    Raises:
        ConfigError: Names the thing, and what would allow it.
    """
    # A text is a sequence, too: each of its letters would be taken for a package.
    if isinstance(allow_import, str):
        raise ConfigError("allow_import", f"got the text {allow_import!r}, expected a list of packages")
    module = name.partition(":")[0]
    top = module.partition(".")[0]
    if not _is_within(module, allow_import):
        raise ConfigError(
            what,
            f"not run, as its package is not allowed; allow_import=({top!r},) allows it",
        )
    # It is imported at its first use; until then a workflow can be read where its code is not installed.
    if not _is_there(module):
        return
    # A module has what it imports, too: ``shop:system`` of an allowed package could be that of os.
    home = getattr(imported(name), "__module__", None)
    if not isinstance(home, str) or not _is_within(home, allow_import):
        allowed = ", ".join(allow_import)
        raise ConfigError(what, f"defined in {home}, expected a function that is defined in what is allowed: {allowed}")


def _is_within(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _is_there(module: str) -> bool:
    try:
        _import_module(module)
    except ModuleNotFoundError as error:
        # The module itself or a package above it; otherwise it is there, and one of its own imports fails.
        if _is_within(module, [error.name or ""]):
            return False
        raise ConfigError(f"module {module!r}", f"{error}, expected one that can be imported") from None
    return True


class OperatorSpec:
    """Step of a workflow: a frozen dataclass whose fields are its JSON form.

    Attributes:
        kind: Name of the operator in JSON.
    """

    kind: ClassVar[str] = ""

    @classmethod
    def members(cls) -> Mapping[str, type[OperatorSpec]]:
        """Return kind -> class of all registered operators."""
        return _OPERATORS

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the step reads while a data set is prepared."""
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return ()

    @property
    def serving_reads(self) -> tuple[str, ...]:
        """Columns that the step reads when a record is served."""
        return self.reads

    @property
    def side_table(self) -> str | None:
        """Name of the side table that the step is fitted on; None for the training rows."""
        return None


_OPERATORS: Registry[type[OperatorSpec]] = Registry("operator")
OperatorT = TypeVar("OperatorT", bound=type[OperatorSpec])


def register(kind: str | None = None) -> Callable[[OperatorT], OperatorT]:
    """Register an operator class: a decorator above ``@dataclass(frozen=True, kw_only=True)``.

    Args:
        kind: Name in JSON; None names it ``"package.module:Class"``, by which a saved workflow imports it where the
            reader allows its package.

    Raises:
        ConfigError: Another class is registered under the name.
    """

    def decorate(operator: OperatorT) -> OperatorT:
        # The form of `imported`, so that a saved workflow finds the class of a user's package by it.
        name = kind or f"{operator.__module__}:{operator.__qualname__}"
        _OPERATORS.add(name, operator)
        operator.kind = name
        return operator

    return decorate
