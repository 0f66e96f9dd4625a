# SPDX-License-Identifier: Apache-2.0
"""Specs from and to JSON, and the fields of spec classes. One codec for every spec; each error names the exact path.

A union of specs is written with a ``"kind"`` field that names the spec. A ``None`` is left out where it is the field's
default. The comments of a starting run, dotted overrides and the options of commands read types, accepted words and
documentation of fields here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, TypeVar, Union

from terarec.errors import ConfigError
from terarec.spec.checks import FieldError, did_you_mean, is_unicode, quoted, shortened


def members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type that `hint` is."""
    # ``X | None`` and ``Optional[X]`` have different origins.
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
    specs = specs_of(hint)
    # A field of one class needs no kind, so that there is nothing to choose.
    return {str(getattr(member, "kind", "")): member for member in specs} if len(specs) > 1 else {}


def words_of(hint: Any) -> list[object]:
    """Return the values that a field of literals takes; empty for other fields."""
    literals = (member for member in members(hint) if typing.get_origin(member) is Literal)
    return [word for member in literals for word in typing.get_args(member)]


@functools.cache
def hints_of(spec_type: type) -> dict[str, Any]:
    """Return the type of each field, with names resolved."""
    # Cached above, as this evaluates the text of every annotation again.
    return typing.get_type_hints(spec_type)


def summary_of(spec_type: type) -> str:
    """Return the first paragraph of the class's docstring on one line."""
    return " ".join(inspect.cleandoc(spec_type.__doc__ or "").split("\n\n")[0].split())


@functools.cache
def documentation_of(spec_type: type) -> dict[str, str]:
    """Return for each field its entry in an ``Attributes:`` section of the class or of one that it inherits from."""
    texts: dict[str, str] = {}
    # The class itself comes last, so that its entry replaces an inherited one.
    for owner in reversed(spec_type.__mro__):
        _, _, section = inspect.cleandoc(owner.__doc__ or "").partition("\nAttributes:\n")
        # A line at the margin begins the next section; an entry has four spaces before it, its further lines more.
        section = re.split(r"\n(?=\S)", section)[0]
        for entry in re.split(r"\n(?= {4}\S)", "\n" + section):
            name, colon, text = entry.strip().partition(": ")
            if colon:
                text = " ".join(text.split())
                texts[name] = text[:1].upper() + text[1:]
    return texts


class TooDeepError(ValueError):
    """JSON text that is nested more deeply than Python reads it."""


class RepeatedFieldError(ValueError):
    """JSON object that has a field twice, of which readers of JSON take the one or the other."""


def parse_json(
    text: str | bytes | bytearray,
    *,
    parse_constant: Callable[[str], Any] | None = None,
    parse_int: Callable[[str], Any] | None = None,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Call ``json.loads(text, ...)``; text that is nested too deeply is a ValueError, too.

    The caller says in its own error what was expected where.

    Args:
        text: JSON; bytes in UTF-8, with or without a byte order mark.
        parse_constant: Callback for NaN, Infinity and -Infinity.
        parse_int: Callback for integers.
        object_pairs_hook: Callback with the fields of each object; by default a field must not occur twice.

    Raises:
        ValueError: No JSON (json.JSONDecodeError), bytes of another encoding (UnicodeDecodeError), a number of too many
            digits, too many levels (`TooDeepError`), or a field that occurs twice (`RepeatedFieldError`).
    """
    # JSON that systems exchange is UTF-8 (RFC 8259); `json.loads` would guess others.
    decoded = text if isinstance(text, str) else text.decode("utf-8-sig")
    try:
        return json.loads(
            decoded,
            parse_constant=parse_constant,
            parse_int=parse_int,
            object_pairs_hook=object_pairs_hook or _distinct,
        )
    except RecursionError as error:
        raise TooDeepError(str(error)) from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise RepeatedFieldError(f"the field {quoted(name)} occurs twice, expected it once")
    return fields


Spec = TypeVar("Spec")


def to_data(spec: object) -> Any:
    """Convert a spec to dicts, lists, strings and numbers that ``json.dumps`` takes."""
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        kind = getattr(type(spec), "kind", None)
        data: dict[str, Any] = {} if kind is None else {"kind": kind}
        for field in dataclasses.fields(spec):
            value = getattr(spec, field.name)
            # None is left out only where reading gives it again.
            if value is not None or field.default is not None:
                data[field.name] = to_data(value)
        return data
    if isinstance(spec, Mapping):
        return {key: to_data(value) for key, value in spec.items()}
    if isinstance(spec, tuple | list):
        return [to_data(item) for item in spec]
    return spec


def from_data(spec_type: type[Spec], data: object, where: str = "$") -> Spec:
    """Build a `spec_type` from parsed JSON.

    Args:
        spec_type: A spec class.
        data: Result of ``json.load``.
        where: Name of the root in errors, for example ``"run.json: $"``; empty for bare paths.

    Raises:
        ConfigError: An unknown, missing or mistyped field, with its JSON path and what is accepted.
    """
    result: Spec = _decode(spec_type, data, where)
    return result


def _decode(hint: Any, data: Any, where: str) -> Any:
    if hint is Any:
        return data
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return _decode_union(typing.get_args(hint), data, where)
    if origin is Literal:
        choices = typing.get_args(hint)
        if data not in choices:
            raise unknown_choice(where, data, choices)
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise _mistyped(where, data, "a list")
        # Specs have tuples of one type and of any length alone.
        item = typing.get_args(hint)[0]
        return tuple(_decode(item, value, f"{where}[{index}]") for index, value in enumerate(data))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(data, dict):
            raise _mistyped(where, data, "an object")
        item = typing.get_args(hint)[1]
        return {
            _decode_scalar(str, key, where): _decode(item, value, _inside(where, key)) for key, value in data.items()
        }
    if dataclasses.is_dataclass(hint):
        return _decode_spec(hint, data, where)
    if hasattr(hint, "members"):  # an open union, whose members register themselves
        return _decode_member(hint.members(), data, where)
    return _decode_scalar(hint, data, where)


def _decode_scalar(hint: Any, data: Any, where: str) -> Any:
    # True is an int in Python, and float() of an integer past the largest number overflows.
    is_number = isinstance(data, int | float) and abs(data) <= sys.float_info.max
    if hint is float and is_number and not isinstance(data, bool):
        # An integer that float64 does not hold, such as the value of an id, would become another.
        return float(data) if float(data) == data else data
    if hint is int and isinstance(data, int) and not isinstance(data, bool):
        return data
    if hint is str and isinstance(data, str) and not is_unicode(data):
        raise _mistyped(where, data, "a string of Unicode")
    if hint in (str, bool) and isinstance(data, hint):
        return data
    names = {float: "a number", int: "an integer", str: "a string", bool: "true or false"}
    raise _mistyped(where, data, names.get(hint, str(hint)))


def _decode_union(members: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in members:
        return None
    specs = {getattr(member, "kind", ""): member for member in members if dataclasses.is_dataclass(member)}
    if not specs or set(specs) == {""}:  # one type, or None; or a number or a text or a list of them
        plain = [member for member in members if member is not type(None)]
        fitting = [member for member in plain if _fits(member, data)]
        # Where none fits, the first type says in its error what is accepted.
        return _decode((fitting or plain)[0], data, where)
    return _decode_member(specs, data, where)


def _decode_member(specs: Mapping[str, Any], data: Any, where: str) -> Any:
    """Decode one of `specs` by its kind."""
    if not isinstance(data, dict):
        raise _mistyped(where, data, "an object")
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in specs:
        if "kind" in data:
            raise unknown_choice(_inside(where, "kind"), kind, specs)
        raise ConfigError(_inside(where, "kind"), f"missing, expected one of {', '.join(map(repr, specs))}")
    return _decode_spec(specs[kind], data, where)


def _fits(member: Any, data: Any) -> bool:
    """Return whether `data` is a list where `member` is one of lists, or a text where `member` is text."""
    return isinstance(data, list) if typing.get_origin(member) is tuple else member is str and isinstance(data, str)


def _decode_spec(spec_type: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise _mistyped(where, data, "an object")
    kind = getattr(spec_type, "kind", None)
    # `to_data` writes the kind also where the field takes one class, which needs none.
    if kind is not None and data.get("kind") == kind:
        data = {key: value for key, value in data.items() if key != "kind"}
    hints = hints_of(spec_type)
    fields = {field.name: field for field in dataclasses.fields(spec_type)}
    # Before missing fields: a misspelled name often is the missing one, and this error has the hint.
    for key in data:
        if key not in fields:
            raise unknown_field(where, str(key), fields)
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise ConfigError(where, f"field {name!r} is missing, expected {', '.join(map(repr, fields))}")
    values = {name: _decode(hints[name], value, _inside(where, name)) for name, value in data.items()}
    try:
        return spec_type(**values)
    except FieldError as error:
        # Who writes JSON knows the field by its path and not by a class.
        place = _inside(where, error.field) if error.field else where
        raise ConfigError(place, error.problem) from None


def unknown_field(where: str, key: str, fields: Collection[str]) -> ConfigError:
    """Return the error that a spec with these `fields` has no field `key`; `where` is the path of the spec."""
    hint = did_you_mean(key, fields)
    return ConfigError(
        _inside(where, shortened(key)), f"unknown field{hint}, expected one of {', '.join(map(repr, fields))}"
    )


def unknown_choice(where: str, got: object, choices: Collection[object]) -> ConfigError:
    """Return the error that the field at the path `where` takes one of `choices` and not `got`."""
    hint = did_you_mean(got, (choice for choice in choices if isinstance(choice, str))) if isinstance(got, str) else ""
    return ConfigError(where, f"got {quoted(got, is_json=True)}{hint}, expected one of {', '.join(map(repr, choices))}")


def _mistyped(where: str, data: object, expected: str) -> ConfigError:
    return ConfigError(where, f"got {quoted(data, is_json=True)}, expected {expected}")


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def finite_data(value: Any) -> Any:
    """Return JSON data with None in the place of NaN and infinity, for which JSON has no words."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): finite_data(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_data(item) for item in value]
    return value


def differences(old: Mapping[str, Any], new: Mapping[str, Any], parent: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield JSON path, old value and new value wherever two objects differ; a field that is left out is None."""
    for name in {**old, **new}:  # in the order of the fields, "kind" first
        one, other = old.get(name), new.get(name)
        # A part that only one of them has is reported whole, as its fields have no counterparts.
        if isinstance(one, dict) and isinstance(other, dict):
            yield from differences(one, other, f"{parent}{name}.")
        elif one != other:
            yield f"{parent}{name}", one, other
