"""The known name that a misspelt one was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the entry of `known` that is most like `name`, or None if none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for an error about the unknown `name`; empty if no known name is like it."""
    close = nearest(name, known)
    return "" if close is None else f" (did you mean {close!r}?)"
