# SPDX-License-Identifier: Apache-2.0
"""Validation of specs and arguments: each check raises `FieldError` with the field, the value and what is accepted.

Errors quote input bounded, on one line, without control characters, and with the nearest known name.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NoReturn, Union

from terarec.errors import ConfigError


class Required:
    """Marker of an option or parameter that has no default; None may be one."""

    def __repr__(self) -> str:
        return "required"


REQUIRED: Final = Required()


class FieldError(ConfigError):
    """Error of a field of a spec, or of an argument.

    Python users read ``Owner.field: problem``; whoever knows the field under another name, such as a JSON path or an
    option of the command line, puts that name before `problem`.

    Attributes:
        owner: Class of the spec; empty for an argument of a function.
        field: Name of the field; empty if the complete spec is invalid.
        problem: Received value and accepted ones.
    """

    def __init__(self, owner: str, field: str, problem: str) -> None:
        super().__init__(".".join(filter(None, (owner, field))), problem)
        self.owner = owner
        self.field = field


@dataclass(frozen=True, slots=True)
class Rule:
    """Values that a field, an option or an argument accepts.

    Attributes:
        accepted: Accepted values in words, for errors and documentation.
        read: Function that returns an accepted value in its own type, lists as tuples; it raises ValueError for others.
    """

    accepted: str
    read: Callable[[Any], Any]

    def accepts(self, value: object) -> bool:
        """Return whether `read` takes a value."""
        try:
            self.read(value)
        except (ValueError, OverflowError):  # an integer may be beyond float
            return False
        return True


# Cached: every new spec needs the rules of its fields, which are few.
@functools.cache
def integer(low: int = 1, high: int | None = None) -> Rule:
    """Return the rule of integers of at least `low` and at most `high`; below `MOST` the words name it."""

    def read(value: Any) -> int:
        is_good = isinstance(value, int) and not isinstance(value, bool) and value >= low
        # A member of an IntEnum, or of another subclass, becomes the integer that JSON has.
        return int(value) if is_good and (high is None or value <= high) else _reject(value)

    is_bounded = high is not None and high < MOST
    return Rule(f"an integer from {low} to {high}" if is_bounded else f"an integer >= {low}", read)


@functools.cache
def number(low: float = -math.inf, high: float = math.inf, *, open_low: bool = False, open_high: bool = False) -> Rule:
    """Return the rule of finite numbers from `low` to `high`, without these where they are open."""

    def read(value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        is_inside = is_number and low <= value <= high
        is_border = (open_low and value == low) or (open_high and value == high)
        return float(value) if is_inside and not is_border else _reject(value)

    return Rule(_interval(low, high, open_low=open_low, open_high=open_high), read)


def _interval(low: float, high: float, *, open_low: bool, open_high: bool) -> str:
    if open_high and high != math.inf:
        return f"a number {'>' if open_low else '>='} {_digits(low)} and < {_digits(high)}"
    if high != math.inf:
        return f"a number {'above' if open_low else 'from'} {_digits(low)} to {_digits(high)}"
    if low == -math.inf:
        return "a finite number"
    return f"a finite number {'>' if open_low else '>='} {_digits(low)}"


def _digits(value: float) -> str:
    return repr(int(value) if value == int(value) else value)


def _read_flag(value: Any) -> bool:
    return value if isinstance(value, bool) else _reject(value)


FLAG = Rule("true or false", _read_flag)


def choice(accepted: Collection[Any]) -> Rule:
    """Return the rule of a few values; True is not 1."""

    def read(value: Any) -> Any:
        # Not ``in``: 1 == True == 1.0, but a file or a C++ core distinguishes them.
        equal = [item for item in accepted if type(item) is type(value) and item == value]
        return equal[0] if equal else _reject(value)

    return Rule(f"one of {', '.join(map(str, accepted))}", read)


def list_of(item: Rule, length: int | None = None) -> Rule:
    """Return the rule of lists or tuples of values that `item` accepts, of `length` items if given."""

    def read(value: Any) -> tuple[Any, ...]:
        is_good = isinstance(value, list | tuple) and length in (None, len(value))
        return tuple(map(item.read, value)) if is_good else _reject(value)

    return Rule(f"{'a list' if length is None else f'a list of {length}'}, each {item.accepted}", read)


def _reject(value: object) -> NoReturn:
    raise ValueError(value)  # the caller says what, where and what is accepted


def argument(name: str, value: object, rule: Rule) -> Any:
    """Return the value of the argument `name` as `rule` reads it; raise `FieldError` if the rule rejects it."""
    try:
        return rule.read(value)
    except (ValueError, OverflowError):
        raise FieldError("", name, f"got {quoted(value)}, expected {rule.accepted}") from None


def follow(owner: object, field: str, rule: Rule) -> None:
    """Raise unless `rule` accepts ``owner.field``."""
    if not rule.accepts(getattr(owner, field)):
        fail(owner, field, rule.accepted)


MOST = 2**63 - 1
"""Largest integer of a field: more do not fit the 64 bits of files and kernels."""
MOST_THREADS = 1024
"""Most threads, processes or connections that a field asks for: more end a process rather than speed it up."""
MOST_LAYERS = 1024
MOST_WIDTH = 1 << 20
"""Largest width of a layer, a vector or a list, of which memory is a multiple."""
MOST_BATCH = 1 << 26
"""Most samples of a batch or a request."""
MOST_ROWS = 1 << 48
"""Most rows of a table: memory that no machine addresses."""


def positive_int(owner: object, field: str, minimum: int = 1, maximum: int = MOST) -> None:
    """Raise unless ``owner.field`` is an int of at least `minimum` and at most `maximum`."""
    if integer(minimum, maximum).accepts(getattr(owner, field)):
        return
    # The largest integer is worth a word only to whom it concerns.
    is_large = integer(minimum).accepts(getattr(owner, field))
    fail(owner, field, f"an integer from {minimum} to {maximum}" if is_large else integer(minimum).accepted)


def int64(owner: object, field: str, minimum: int = -(2**63)) -> None:
    """Raise unless ``owner.field`` is an integer from `minimum` on that 64 bits with a sign hold."""
    words = f"a 64-bit integer{f' >= {minimum}' if minimum > -(2**63) else ''}"
    follow(owner, field, Rule(words, integer(minimum, 2**63 - 1).read))


def finite_float(
    owner: object, field: str, *, low: float = -math.inf, high: float = math.inf, open_low: bool = False
) -> None:
    """Raise unless ``owner.field`` is a finite number in [low, high], or in (low, high] with `open_low`."""
    follow(owner, field, number(low, high, open_low=open_low))


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


_MOST_NAME_BYTES = 200  # of the 255 of a file's name, which has more than a column's
NAME = f"a non-empty name of at most {_MOST_NAME_BYTES} bytes, without slashes and control characters"
"""What `is_name` accepts."""


def name(owner: object, field: str = "name") -> None:
    """Raise unless ``owner.field`` is a `NAME` (it becomes part of file names)."""
    if not is_name(getattr(owner, field)):
        fail(owner, field, NAME)


def is_name(value: object) -> bool:
    """Return whether `name` accepts `value`."""
    # Names become parts of file names and lines of tables: no separators, no control characters.
    if not isinstance(value, str) or not value.isprintable() or len(value.encode()) > _MOST_NAME_BYTES:
        return False
    return bool(value) and not ("/" in value or "\\" in value or value in {".", ".."})


def monitor(owner: object, field: str) -> None:
    """Raise unless ``owner.field`` is a metric such as ``auc``, or that of a label such as ``auc/click``."""
    value = getattr(owner, field)
    parts = value.split("/", 1) if isinstance(value, str) else [value]
    if not all(map(is_name, parts)):
        fail(owner, field, "the name of a metric such as 'auc', or 'auc/LABEL' for one label")


def inner_path(owner: object, field: str) -> None:
    """Raise unless ``owner.field`` is a path with forward slashes that stays inside the directory it is relative to."""
    if not is_inner_path(getattr(owner, field)):
        fail(owner, field, "a relative path inside its directory")


def is_inner_path(value: object) -> bool:
    """Return whether `inner_path` accepts `value`."""
    good = isinstance(value, str) and bool(value) and value.isprintable()
    # A data set may come from another party, and must not name files elsewhere.
    return good and not value.startswith("/") and ".." not in value.split("/")  # type: ignore[attr-defined]


def distinct(owner: object, field: str, values: Sequence[str]) -> None:
    """Raise if `values`, the names that ``owner.field`` holds, repeat."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            reject(owner, field, f"the name {quoted(value)} occurs twice, expected distinct names")
        seen.add(value)


def column_name(owner: object, field: str) -> None:
    """Raise unless ``owner.field`` is the name of a column."""
    value = getattr(owner, field)
    if not isinstance(value, str) or not value:
        fail(owner, field, "the name of a column")


def column_names(owner: object, field: str, *, allow_empty: bool = False) -> None:
    """Raise unless ``owner.field`` is a tuple of at least one column name, all distinct; or () with `allow_empty`."""
    value = getattr(owner, field)
    is_tuple = isinstance(value, tuple) and bool(value or allow_empty)
    if not is_tuple or not all(isinstance(one, str) and one for one in value):
        fail(owner, field, "a tuple of at least one column name")
    distinct(owner, field, value)


def widths(owner: object, field: str, *, allow_empty: bool = False) -> None:
    """Raise unless ``owner.field`` is a tuple of positive ints (the widths of a stack of layers)."""
    value = getattr(owner, field)
    if not isinstance(value, tuple):
        fail(owner, field, "a tuple of layer widths")
    if not all(map(integer(1, MOST_WIDTH).accepts, value)) or not (value or allow_empty):
        fail(owner, field, f"layer widths such as [512, 256, 64], each at most {MOST_WIDTH}")
    if len(value) > MOST_LAYERS:
        reject(owner, field, f"got {len(value)} layers, expected at most {MOST_LAYERS}")


def fail(owner: object, field: str, expected: str) -> NoReturn:
    """Raise `FieldError`: ``owner.field`` is not what is `expected`."""
    value = getattr(owner, field)
    # A tuple is shown as the list that it is in a file.
    reject(owner, field, f"got {quoted(list(value) if isinstance(value, tuple) else value)}, expected {expected}")


def reject(owner: object, field: str, problem: str) -> NoReturn:
    """Raise `FieldError`: ``owner.field``, or for an empty `field` the complete owner, has this `problem`."""
    raise FieldError(type(owner).__name__, field, problem)


Check = Callable[[Any, str], None]
"""Raises unless the field of that name of an object has a valid value."""


def whole(minimum: int = 1, maximum: int = MOST) -> Check:
    """Return the check of `positive_int` for an annotation."""
    return partial(positive_int, minimum=minimum, maximum=maximum)


def choices(accepted: Collection[object]) -> Check:
    """Return the check of `one_of` for an annotation."""
    return partial(one_of, accepted=accepted)


Name = Annotated[str, name]
ColumnName = Annotated[str, column_name]
ColumnNames = Annotated[tuple[str, ...], column_names]
AnyColumnNames = Annotated[tuple[str, ...], partial(column_names, allow_empty=True)]
MetricName = Annotated[str, monitor]
InnerPath = Annotated[str, inner_path]
PositiveInt = Annotated[int, whole()]
NonNegativeInt = Annotated[int, whole(0)]
Int64 = Annotated[int, int64]
PositiveInt64 = Annotated[int, partial(int64, minimum=1)]
NonNegativeInt64 = Annotated[int, partial(int64, minimum=0)]
Width = Annotated[int, whole(1, MOST_WIDTH)]
Widths = Annotated[tuple[int, ...], widths]
AnyWidths = Annotated[tuple[int, ...], partial(widths, allow_empty=True)]
Layers = Annotated[int, whole(1, MOST_LAYERS)]
Threads = Annotated[int, whole(1, MOST_THREADS)]
BatchSize = Annotated[int, whole(1, MOST_BATCH)]
Rows = Annotated[int, whole(1, MOST_ROWS)]
Finite = Annotated[float, number()]
NonNegative = Annotated[float, number(0.0)]
Positive = Annotated[float, number(0.0, open_low=True)]
Share = Annotated[float, number(0.0, 1.0)]
PositiveShare = Annotated[float, number(0.0, 1.0, open_low=True)]
Dropout = Annotated[float, number(0.0, 0.95)]
"""Types of fields with what these accept; others are written as ``Annotated[float, checks.number(1.0)]``."""


def check_fields(owner: object) -> None:
    """Raise unless each field of a dataclass has a value that its annotation accepts.

    A field of literals accepts these words, one of bool True and False; further rules are in ``Annotated``. A field
    that may be None accepts None, too, and one of several types anything: its class says what.
    """
    owner_type: type = type(owner)
    for field, check, may_be_none in _field_checks(owner_type):
        if not may_be_none or getattr(owner, field) is not None:
            check(owner, field)


class Checked:
    """Base of dataclasses that check each field; those that compare fields, too, call `check_fields` before it.

    A derived class calls ``Base.__post_init__(self)``: a dataclass with slots is a second class, and ``super()`` would
    look for the first one.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self)


@functools.cache
def _field_checks(owner_type: type) -> tuple[tuple[str, Check, bool], ...]:
    """Return name, check and whether None needs none, of each field with a rule."""
    checked: dict[str, tuple[str, Check, bool]] = {}
    # A class that only has another default for a field of its base has no rule of its own for it.
    for base in filter(dataclasses.is_dataclass, owner_type.__mro__):
        for name, hint in typing.get_type_hints(base, include_extras=True).items():
            members = typing.get_args(hint) if typing.get_origin(hint) in (Union, UnionType) else (hint,)
            check = _check_of([member for member in members if member is not NoneType])
            if check is not None:
                checked.setdefault(name, (name, check, NoneType in members))
    return tuple(checked[field.name] for field in dataclasses.fields(owner_type) if field.name in checked)


def _check_of(kinds: Sequence[Any]) -> Check | None:
    if all(typing.get_origin(kind) is Literal for kind in kinds):
        return choices([word for kind in kinds for word in typing.get_args(kind)])
    if len(kinds) > 1:
        return None
    if kinds[0] is bool:
        return choices((False, True))
    rule = next(iter(getattr(kinds[0], "__metadata__", ())), None)
    return partial(follow, rule=rule) if isinstance(rule, Rule) else rule


QUOTED_CHARACTERS = 60
"""Longest quotation of one value."""

MESSAGE_CHARACTERS = 2000
"""Longest error that a program prints or a server answers with: long enough for the names of some dozen columns."""

_SPELLED_BITS = 14_000
"""Python spells integers of up to 4,300 digits."""


def shortened(text: str, most: int = QUOTED_CHARACTERS) -> str:
    """Cut a text to a number of characters; a cut text ends in dots."""
    return text if len(text) <= most else text[: most - 3] + "..."


def is_count(text: str) -> bool:
    """Return whether a text is an integer >= 0 in up to 20 ASCII digits, as 64 bits have; `int` rejects thousands."""
    return text.isascii() and text.isdecimal() and len(text) <= 20


def is_unicode(text: str) -> bool:
    """Return whether `text` has no lone surrogates, which JSON can spell and UTF-8 cannot."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def quoted(value: object, *, is_json: bool = False, most: int = QUOTED_CHARACTERS) -> str:
    """Spell a value for an error, at most `most` characters long.

    It looks at no more of the value than it shows, so that long lists cost no time and deep ones no recursion.

    Args:
        value: Received value.
        is_json: Whether to spell None, True and False as JSON does.
        most: Longest text.
    """
    text = ""
    for piece in _pieces(value, is_json, most):
        text += piece
        if len(text) > most:
            break
    return shortened(text, most)


def one_line(message: str) -> str:
    """Escape the control characters of an error's message and cut it to `MESSAGE_CHARACTERS`."""
    # Cut before, so that a huge message is not escaped in full, and after, as escapes are longer.
    return shortened(printable(shortened(message, MESSAGE_CHARACTERS)), MESSAGE_CHARACTERS)


def printable(text: str) -> str:
    """Escape what would steer a terminal, break the line, hide or turn the direction of a text."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _pieces(value: object, is_json: bool, most: int) -> Iterator[str]:
    """Yield the text of `value`; each level begins with a piece of its own, so that `most` bounds the depth."""
    if is_json and (value is None or isinstance(value, bool)):
        yield json.dumps(value)
    elif isinstance(value, str | bytes):
        # Cut before it is spelled, by two characters for the quotes; one byte too many lets the caller see the cut.
        yield repr(shortened(value, most - 2)) if isinstance(value, str) else repr(value[: most + 1])
    # Of a subclass, such as an enumeration or a named tuple, the own spelling says more.
    elif type(value) is int:
        yield repr(value) if value.bit_length() <= _SPELLED_BITS else f"an integer of {value.bit_length()} bits"
    elif type(value) in (list, tuple, dict):
        yield from _container(value, is_json, most)
    else:
        yield repr(value)


def _container(value: object, is_json: bool, most: int) -> Iterator[str]:
    if isinstance(value, dict):
        yield "{"
        for index, (key, item) in enumerate(value.items()):
            yield ", " if index else ""
            yield from _pieces(key, is_json, most)
            yield ": "
            yield from _pieces(item, is_json, most)
        yield "}"
        return
    assert isinstance(value, list | tuple)
    is_list = is_json or isinstance(value, list)
    yield "[" if is_list else "("
    for index, item in enumerate(value):
        yield ", " if index else ""
        yield from _pieces(item, is_json, most)
    yield ("," if len(value) == 1 and not is_list else "") + ("]" if is_list else ")")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the entry of `known` that is most like `name`, or None if none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for an error about the unknown `name`; empty if no known name is like it."""
    close = nearest(name, known)
    return "" if close is None else f" (did you mean {close!r}?)"


def nearest_or_all(name: str, known: Collection[str]) -> str:
    """Return ``did you mean 'x'`` for the unknown `name`, or ``expected one of ...`` if no known name is like it."""
    close = nearest(name, known)
    return f"expected one of {', '.join(known)}" if close is None else f"did you mean {close!r}"
