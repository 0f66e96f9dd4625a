"""Options of layers: names, defaults, and checks that say what is accepted."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Final

from terarec.errors import ConfigError


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED: Final = _Required()


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOption:
    """One option of a kind of layer.

    Attributes:
        name: its key.
        meaning: one line for the documentation.
        accepted: the values that it takes, in words.
        default: its value where it is not given; `REQUIRED` if it must be given.
        read: gives the value in its own type (lists as tuples), or `REQUIRED` for one that is not accepted.
    """

    name: str
    meaning: str
    accepted: str
    default: Any
    read: Callable[[Any], Any]

    def value(self, kind: str, given: Any) -> Any:
        """The value of `given`.

        Raises:
            ConfigError: naming `kind`, the option, what was given and what is accepted.
        """
        value = self.read(given)
        if value is REQUIRED:
            raise ConfigError(f"layer {kind}: {self.name} is {given!r}, expected {self.accepted}")
        return value


def integer(name: str, meaning: str, *, default: Any = REQUIRED, low: int = 1) -> LayerOption:
    """An integer of at least `low`."""

    def read(value: Any) -> Any:
        good = isinstance(value, int) and not isinstance(value, bool) and value >= low
        return value if good else REQUIRED

    return LayerOption(name=name, meaning=meaning, accepted=f"an integer >= {low}", default=default, read=read)


def number(
    name: str, meaning: str, *, default: Any = REQUIRED, low: float = -math.inf, below: float = math.inf
) -> LayerOption:
    """A finite number, at least `low` and less than `below`."""
    bounds = "" if low == -math.inf else f" >= {low:g}"
    bounds += "" if below == math.inf else f" and < {below:g}"

    def read(value: Any) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return float(value) if is_number and low <= value < below else REQUIRED

    return LayerOption(name=name, meaning=meaning, accepted=f"a number{bounds}", default=default, read=read)


def flag(name: str, meaning: str, *, default: Any = REQUIRED) -> LayerOption:
    """True or False."""

    def read(value: Any) -> Any:
        return value if isinstance(value, bool) else REQUIRED

    return LayerOption(name=name, meaning=meaning, accepted="true or false", default=default, read=read)


def choice(name: str, meaning: str, accepted: Collection[Any], *, default: Any = REQUIRED) -> LayerOption:
    """One of a few values."""

    def read(value: Any) -> Any:
        return next((item for item in accepted if item == value and type(item) is type(value)), REQUIRED)

    words = ", ".join(str(item) for item in accepted)
    return LayerOption(name=name, meaning=meaning, accepted=f"one of {words}", default=default, read=read)


def list_of(item: LayerOption, *, default: Any = REQUIRED, length: int | None = None) -> LayerOption:
    """A list (or tuple) of what `item` accepts, of `length` items if that is given."""

    def read(value: Any) -> Any:
        if not isinstance(value, list | tuple) or (length is not None and len(value) != length):
            return REQUIRED
        items = tuple(item.read(element) for element in value)
        return REQUIRED if REQUIRED in items else items

    count = "a list" if length is None else f"a list of {length}"
    return replace(item, accepted=f"{count}, each {item.accepted}", default=default, read=read)
