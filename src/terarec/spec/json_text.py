"""JSON text -> plain data, with one class for all that can be wrong with the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


class TooDeepError(ValueError):
    """JSON text that is nested more deeply than Python reads it."""


def parse_json(
    text: str | bytes | bytearray,
    *,
    parse_constant: Callable[[str], Any] | None = None,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """``json.loads(text, ...)``, where text that is nested too deeply is a ValueError, too.

    The caller says in its own error what was expected where.

    Args:
        text: JSON; bytes in UTF-8, UTF-16 or UTF-32.
        parse_constant: called with NaN, Infinity and -Infinity.
        object_pairs_hook: called with the fields of each object.

    Raises:
        ValueError: no JSON (json.JSONDecodeError), bytes of no such encoding (UnicodeDecodeError), a number of too many
            digits, or too many levels (`TooDeepError`).
    """
    try:
        return json.loads(text, parse_constant=parse_constant, object_pairs_hook=object_pairs_hook)
    except RecursionError as error:
        raise TooDeepError(str(error)) from None
