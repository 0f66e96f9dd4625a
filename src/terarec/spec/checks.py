"""Validation of specs and arguments: each check raises `FieldError` with the field, the value and what is accepted."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from types import UnionType
from typing import NoReturn

from terarec.errors import ConfigError
from terarec.spec.quoting import did_you_mean, quoted


class FieldError(ConfigError):
    """A field of a spec, or an argument, is wrong.

    Python users read ``Owner.field: problem``; whoever knows the field under another name, such as a JSON path or an
    option of the command line, puts that name before `problem`.

    Attributes:
        owner: class of the spec; empty for an argument of a function.
        field: name of the field; empty if the spec is wrong as a whole.
        problem: what was received and what is accepted.
    """

    def __init__(self, owner: str, field: str, problem: str) -> None:
        super().__init__(": ".join(filter(None, (".".join(filter(None, (owner, field))), problem))))
        self.owner = owner
        self.field = field
        self.problem = problem


def positive_int(owner: object, field: str, minimum: int = 1) -> None:
    """Raise unless ``owner.field`` is an int of at least `minimum`."""
    value = getattr(owner, field)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        fail(owner, field, f"an integer >= {minimum}")


def int64(owner: object, field: str, minimum: int = -(2**63)) -> None:
    """Raise unless ``owner.field`` is an integer from `minimum` on that 64 bits with a sign hold."""
    value = getattr(owner, field)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 2**63:
        low = f" >= {minimum}" if minimum > -(2**63) else ""
        fail(owner, field, f"a 64-bit integer{low}")


def finite_float(
    owner: object, field: str, *, low: float = -math.inf, high: float = math.inf, open_low: bool = False
) -> None:
    """Raise unless ``owner.field`` is a finite number in [low, high], or in (low, high] with `open_low`."""
    value = getattr(owner, field)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < low or value > high or (open_low and value == low):
        fail(owner, field, _interval(low, high, open_low=open_low))


def _interval(low: float, high: float, *, open_low: bool) -> str:
    """Names the finite numbers from `low` to `high`."""
    if high != math.inf:
        return f"a number {'above' if open_low else 'from'} {_number(low)} to {_number(high)}"
    if low == -math.inf:
        return "a finite number"
    return f"a finite number {'>' if open_low else '>='} {_number(low)}"


def _number(value: float) -> str:
    return repr(int(value) if value == int(value) else value)


def one_of(owner: object, field: str, accepted: Collection[object]) -> None:
    """Raise unless ``owner.field`` is among `accepted`."""
    value = getattr(owner, field)
    if value not in accepted:
        choices = ", ".join(repr(choice) for choice in accepted)
        names = [choice for choice in accepted if isinstance(choice, str)]
        hint = did_you_mean(value, names) if isinstance(value, str) else ""
        reject(owner, field, f"got {value!r}{hint}, expected one of {choices}")


def instance(owner: object, field: str, kinds: type | UnionType, expected: str) -> None:
    """Raise unless ``owner.field`` is one of `kinds`; `expected` names them."""
    if not isinstance(getattr(owner, field), kinds):
        fail(owner, field, expected)


def name(owner: object, field: str = "name") -> None:
    """Raise unless ``owner.field`` is a non-empty printable string without slashes (it becomes part of file names)."""
    if not is_name(getattr(owner, field)):
        fail(owner, field, "a non-empty name without slashes")


def is_name(value: object) -> bool:
    """Whether `value` is what `name` accepts."""
    good = isinstance(value, str) and bool(value) and value.isprintable()
    return good and not ("/" in value or "\\" in value or value in {".", ".."})  # type: ignore[operator]


def inner_path(owner: object, field: str) -> None:
    """Raise unless ``owner.field`` is a path with forward slashes that stays inside the directory it is relative to."""
    value = getattr(owner, field)
    good = isinstance(value, str) and bool(value) and value.isprintable()
    if not good or value.startswith("/") or ".." in value.split("/"):
        fail(owner, field, "a relative path inside its directory")


def distinct(owner: object, field: str, values: Sequence[str]) -> None:
    """Raise if `values`, the names that ``owner.field`` holds, repeat."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            reject(owner, field, f"the name {quoted(value)} occurs twice, expected distinct names")
        seen.add(value)


def widths(owner: object, field: str, *, allow_empty: bool = False) -> None:
    """Raise unless ``owner.field`` is a tuple of positive ints (the widths of a stack of layers)."""
    value = getattr(owner, field)
    if not isinstance(value, tuple):
        fail(owner, field, "a tuple of layer widths")
    wrong = any(isinstance(width, bool) or not isinstance(width, int) or width < 1 for width in value)
    if wrong or not (value or allow_empty):
        fail(owner, field, "layer widths such as [512, 256, 64]")


def fail(owner: object, field: str, expected: str) -> NoReturn:
    """Raise `FieldError`: ``owner.field`` is not what is `expected`."""
    value = getattr(owner, field)
    # A tuple is shown as the list that it is in a file.
    reject(owner, field, f"got {quoted(list(value) if isinstance(value, tuple) else value)}, expected {expected}")


def reject(owner: object, field: str, problem: str) -> NoReturn:
    """Raise `FieldError`: ``owner.field``, or for an empty `field` the whole owner, has this `problem`."""
    raise FieldError(type(owner).__name__, field, problem)
