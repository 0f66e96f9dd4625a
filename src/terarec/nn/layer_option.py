"""Options of layers: names, meanings and defaults; `terarec.spec.checks` has the rules for their values."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from terarec.errors import ConfigError
from terarec.spec import checks
from terarec.spec.checks import Rule


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED: Final = _Required()


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOption:
    """One option of a kind of layer.

    Attributes:
        name: Key.
        meaning: One line for the documentation.
        rule: Accepted values.
        default: Value where none is given; `REQUIRED` if one must be given.
    """

    name: str
    meaning: str
    rule: Rule
    default: Any

    @property
    def accepted(self) -> str:
        """The accepted values in words."""
        return self.rule.accepted

    def value(self, kind: str, given: Any) -> Any:
        """Return the value of `given` in its own type.

        Raises:
            ConfigError: It is not accepted; the message names `kind`, the option and what is accepted.
        """
        try:
            return self.rule.read(given)
        except (ValueError, OverflowError):
            raise ConfigError(f"layer {kind}", f"{self.name} is {given!r}, expected {self.accepted}") from None


def integer(name: str, meaning: str, *, default: Any = REQUIRED, low: int = 1) -> LayerOption:
    """Return an integer of at least `low`."""
    return LayerOption(name=name, meaning=meaning, rule=checks.integer(low), default=default)


def number(
    name: str, meaning: str, *, default: Any = REQUIRED, low: float = -math.inf, below: float = math.inf
) -> LayerOption:
    """Return a finite number, at least `low` and less than `below`."""
    rule = checks.number(low, below, open_high=below < math.inf)
    return LayerOption(name=name, meaning=meaning, rule=rule, default=default)


def flag(name: str, meaning: str, *, default: Any = REQUIRED) -> LayerOption:
    """True or False."""
    return LayerOption(name=name, meaning=meaning, rule=checks.FLAG, default=default)


def choice(name: str, meaning: str, accepted: Collection[Any], *, default: Any = REQUIRED) -> LayerOption:
    """Return one of a few values."""
    return LayerOption(name=name, meaning=meaning, rule=checks.choice(accepted), default=default)


def list_of(item: LayerOption, *, default: Any = REQUIRED, length: int | None = None) -> LayerOption:
    """Return a list (or tuple) of what `item` accepts, of `length` items if that is given."""
    rule = checks.list_of(item.rule, length)
    return LayerOption(name=item.name, meaning=item.meaning, rule=rule, default=default)
