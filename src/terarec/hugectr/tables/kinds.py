"""What a parameter takes: how each kind reads a value, and how it is named in errors and on the page."""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of values.

    Attributes:
        expected: what is accepted, for errors and the page.
        read: the value as it is kept; raises ValueError or TypeError for one that is not accepted.
    """

    expected: str
    read: Callable[[Any], Any]


def _reject(value: object) -> Any:
    raise ValueError(value)  # `Parameter.accept` says what, where and what is accepted


def _truth(value: Any) -> bool:
    is_truth = isinstance(value, bool) or type(value).__name__ in {"bool_", "bool"}
    return bool(value) if is_truth else _reject(value)


def _whole(value: Any) -> int:
    return _reject(value) if isinstance(value, bool) else operator.index(value)


def _finite(value: Any) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else float(_reject(value))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _reject(value)


def _path(value: Any) -> str:
    return _text(os.fspath(value))


TRUTH = Kind("True or False", _truth)
TEXT = Kind("a string", _text)
PATH = Kind("a path", _path)
NOTHING = Kind("None", lambda value: None if value is None else _reject(value))


def whole(minimum: int | None = None) -> Kind:
    """Integers of at least `minimum`, NumPy's too."""
    if minimum is None:
        return Kind("an integer", _whole)
    return Kind(f"an integer >= {minimum}", lambda value: _above(_whole(value), minimum))


def number(minimum: float | None = None, below: float | None = None) -> Kind:
    """Finite numbers of at least `minimum` and below `below`; they are kept as floats."""
    expected = "a finite number" + (f" >= {minimum:g}" if minimum is not None else "")
    expected += f" and < {below:g}" if below is not None else ""

    def read(value: Any) -> float:
        found = _finite(value) if minimum is None else _above(_finite(value), minimum)
        return found if below is None or found < below else _reject(value)

    return Kind(expected, read)


def _above(value: Any, minimum: float) -> Any:
    return value if value >= minimum else _reject(value)


def member(enum: type[Enum]) -> Kind:
    """Members of `enum`."""
    return Kind(f"a member of {enum.__name__}", lambda value: value if isinstance(value, enum) else _reject(value))


def named_member(enum: type[Enum]) -> Kind:
    """Names of members of `enum`, as JSON files have them, "None" for Non; kept as the member."""
    members = {("None" if name == "Non" else name): found for name, found in enum.__members__.items()}
    expected = "one of " + ", ".join(map(repr, members))
    return Kind(expected, lambda value: members.get(_text(value)) or _reject(value))


def one_of(*accepted: object) -> Kind:
    """The values `accepted`; True is not 1."""
    choices = {(type(choice), choice) for choice in accepted}
    expected = " or ".join(repr(choice) for choice in accepted)
    return Kind(expected, lambda value: value if (type(value), value) in choices else _reject(value))


def instance(*classes: type) -> Kind:
    """Objects of `classes`."""
    expected = " or ".join(f"a {known.__name__}" for known in classes)
    return Kind(expected, lambda value: value if isinstance(value, classes) else _reject(value))


def either(first: Kind, second: Kind) -> Kind:
    """What `first` or, failing that, `second` accepts."""

    def read(value: Any) -> Any:
        try:
            return first.read(value)
        except (ValueError, TypeError):
            return second.read(value)

    return Kind(f"{first.expected} or {second.expected}", read)


def optional(kind: Kind) -> Kind:
    """What `kind` accepts, or None."""
    return either(NOTHING, kind)


def listed(kind: Kind) -> Kind:
    """Lists of what `kind` accepts; tuples and NumPy arrays become lists, too."""

    def read(value: Any) -> list[Any]:
        if isinstance(value, str | bytes | Mapping):
            _reject(value)
        return [kind.read(item) for item in value]

    return Kind(f"a list of ({kind.expected})", read)


def one_or_list(kind: Kind) -> Kind:
    """One value that `kind` accepts, or a list of them; kept as a list."""

    def read(value: Any) -> list[Any]:
        try:
            return [kind.read(value)]
        except (ValueError, TypeError):
            return list(listed(kind).read(value))

    return Kind(f"{kind.expected}, or a list of them", read)


def mapped(key: Kind, value: Kind) -> Kind:
    """Dictionaries from what `key` accepts to what `value` accepts."""

    def read(found: Any) -> dict[Any, Any]:
        if not isinstance(found, Mapping):
            _reject(found)
        return {key.read(name): value.read(item) for name, item in found.items()}

    return Kind(f"a dict from {key.expected} to {value.expected}", read)


def pair(first: Kind, second: Kind) -> Kind:
    """Tuples or lists of two; kept as tuples."""

    def read(value: Any) -> tuple[Any, Any]:
        left, right = value
        return first.read(left), second.read(right)

    return Kind(f"a pair ({first.expected}, {second.expected})", read)
