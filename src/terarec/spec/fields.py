"""The fields of spec classes: types, kinds, accepted words and documentation.

The codec, the comments of a starting run, dotted overrides and the options of commands all read it here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
import typing
from typing import Any, Literal, Union


def members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type that `hint` is."""
    is_union = typing.get_origin(hint) in (Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def present(hint: Any) -> Any:
    """Return the type of a field where it is not None; the first one of several."""
    return next(member for member in members(hint) if member is not type(None))


def specs_of(hint: Any) -> list[type]:
    """Return the spec classes among the types of a field."""
    return [member for member in members(hint) if dataclasses.is_dataclass(member) and isinstance(member, type)]


def kinds_of(hint: Any) -> dict[str, type]:
    """Return the specs of a union by their kind; empty for a field that is no such union."""
    found = specs_of(hint)
    return {str(getattr(member, "kind", "")): member for member in found} if len(found) > 1 else {}


def words_of(hint: Any) -> list[object]:
    """Return the values that a field of literals takes; empty for other fields."""
    literals = (member for member in members(hint) if typing.get_origin(member) is Literal)
    return [word for member in literals for word in typing.get_args(member)]


@functools.cache
def hints_of(spec_type: type) -> dict[str, Any]:
    """Return the type of each field, with names resolved."""
    return typing.get_type_hints(spec_type)


def summary_of(spec_type: type) -> str:
    """Return the first paragraph of the class's docstring on one line."""
    return " ".join(inspect.cleandoc(spec_type.__doc__ or "").split("\n\n")[0].split())


@functools.cache
def documentation_of(spec_type: type) -> dict[str, str]:
    """Return for each field its entry in an ``Attributes:`` section of the class or of one that it inherits from."""
    found: dict[str, str] = {}
    for owner in reversed(spec_type.__mro__):
        _, _, section = inspect.cleandoc(owner.__doc__ or "").partition("\nAttributes:\n")
        section = re.split(r"\n(?=\S)", section)[0]
        for entry in re.split(r"\n(?= {4}\S)", "\n" + section):
            name, colon, text = entry.strip().partition(": ")
            if colon:
                text = " ".join(text.split())
                found[name] = text[:1].upper() + text[1:]
    return found
