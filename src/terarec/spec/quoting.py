"""Quotes of input in errors: bounded, on one line, without control characters, with the nearest known name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Iterator

QUOTED_CHARACTERS = 60
"""Longest quotation of one value."""

MESSAGE_CHARACTERS = 2000
"""Longest error that a program prints or a server answers with: long enough for the names of some dozen columns."""

_SPELLED_BITS = 14_000
"""Python spells integers of up to 4,300 digits."""


def shortened(text: str, most: int = QUOTED_CHARACTERS) -> str:
    """Cut a text to a number of characters; a cut text ends in dots."""
    return text if len(text) <= most else text[: most - 3] + "..."


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
