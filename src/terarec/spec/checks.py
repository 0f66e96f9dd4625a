"""Checks shared by the specs: each raises `ConfigError` naming the field, the value and what is accepted."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NoReturn

from terarec.errors import ConfigError


def _owner(owner: object) -> str:
    return type(owner).__name__


def positive_int(owner: object, field: str, minimum: int = 1) -> None:
    """Raise unless ``owner.field`` is an int of at least `minimum`."""
    value = getattr(owner, field)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{_owner(owner)}.{field}: got {value!r}, expected an integer >= {minimum}")


def finite_float(
    owner: object, field: str, *, low: float = -math.inf, high: float = math.inf, open_low: bool = False
) -> None:
    """Raise unless ``owner.field`` is a finite number in [low, high], or in (low, high] with `open_low`."""
    value = getattr(owner, field)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < low or value > high or (open_low and value == low):
        raise ConfigError(
            f"{_owner(owner)}.{field}: got {value!r}, expected a number in {'(' if open_low else '['}{low}, {high}]"
        )


def one_of(owner: object, field: str, accepted: Collection[object]) -> None:
    """Raise unless ``owner.field`` is among `accepted`."""
    value = getattr(owner, field)
    if value not in accepted:
        choices = ", ".join(repr(choice) for choice in accepted)
        raise ConfigError(f"{_owner(owner)}.{field}: got {value!r}, expected one of {choices}")


def name(owner: object, field: str = "name") -> None:
    """Raise unless ``owner.field`` is a non-empty printable string without slashes (it becomes part of file names)."""
    value = getattr(owner, field)
    good = isinstance(value, str) and bool(value) and value.isprintable()
    if not good or "/" in value or "\\" in value or value in {".", ".."}:
        raise ConfigError(f"{_owner(owner)}.{field}: got {value!r}, expected a non-empty name without slashes")


def inner_path(owner: object, field: str) -> None:
    """Raise unless ``owner.field`` is a path with forward slashes that stays inside the data set's directory."""
    value = getattr(owner, field)
    good = isinstance(value, str) and bool(value) and value.isprintable()
    if not good or value.startswith("/") or ".." in value.split("/"):
        fail(owner, field, "a relative path inside the data set")


def distinct(owner: object, field: str, values: Sequence[str]) -> None:
    """Raise if `values`, the names that ``owner.field`` holds, repeat."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ConfigError(f"{_owner(owner)}.{field}: the name {value!r} occurs twice, expected distinct names")
        seen.add(value)


def widths(owner: object, field: str, *, allow_empty: bool = False) -> None:
    """Raise unless ``owner.field`` is a tuple of positive ints (the widths of a stack of layers)."""
    value = getattr(owner, field)
    good = isinstance(value, tuple) and (allow_empty or bool(value))
    if not good or any(isinstance(width, bool) or not isinstance(width, int) or width < 1 for width in value):
        raise ConfigError(f"{_owner(owner)}.{field}: got {value!r}, expected layer widths such as (512, 256, 64)")


def fail(owner: object, field: str, expected: str) -> NoReturn:
    """Raise `ConfigError`: ``owner.field`` is not what is `expected`."""
    raise ConfigError(f"{_owner(owner)}.{field}: got {getattr(owner, field)!r}, expected {expected}")
