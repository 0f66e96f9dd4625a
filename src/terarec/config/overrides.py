# SPDX-License-Identifier: Apache-2.0
"""Fields of a description from words of the command line."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from terarec.errors import ConfigError
from terarec.spec import from_data, to_data
from terarec.spec.checks import quoted, shortened
from terarec.spec.codec import hints_of, kinds_of, members, parse_json, present, unknown_choice, unknown_field

Spec = TypeVar("Spec")

_NONE_WORDS = ("none", "null")
_BOOL_WORDS = {"true": True, "false": False}


def parse_assignments(assignments: Sequence[str]) -> dict[str, str]:
    """Split ``["path=text", ...]`` at the first equals sign.

    Raises:
        ConfigError: An item without a path or an equals sign, or a path twice.
    """
    changes: dict[str, str] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise ConfigError(
                "assignment", f"got {quoted(assignment)}, expected path=value such as training.batch_size=4096"
            )
        if path.strip() in changes:
            raise ConfigError(shortened(path.strip()), "got it twice, expected it once")
        changes[path.strip()] = text.strip()
    return changes


def override(spec: Spec, changes: Mapping[str, str]) -> Spec:
    """Return a copy of `spec` with the fields that `changes` names replaced.

    A text is read as the type of its field: integers, numbers, true/false, words, and ``none`` where a field may be
    left out. Lists and values by name are read in JSON, such as ``[512, 256]``, ``["a", "b"]`` and ``{"a": 0.5}``;
    without brackets as ``512,256``, ``512-256`` (whole numbers), ``a,b`` and ``a:0.5,b:0``, but not where their items
    are objects. Setting the ``kind`` of a part that has several (``model.kind=wide_deep``) starts
    from the defaults of that kind; the other changes apply after it in any order.

    Raises:
        ConfigError: An unknown path, a text that is not of the field's type, a value that the spec rejects, or a kind
            without a field that it needs, with the assignment to add.
    """
    data = to_data(spec)
    # A change of kind replaces the complete part, so it must come before the fields inside that part.
    for path in sorted(changes, key=lambda path: (path.rpartition(".")[2] != "kind", path.count("."))):
        _assign(type(spec), data, path, changes[path])
    for path in changes:
        if path.rpartition(".")[2] == "kind":
            _check_complete(type(spec), data, path.split(".")[:-1])
    return from_data(type(spec), data, where="")


def _assign(root: type, data: dict[str, Any], path: str, text: str) -> None:
    """Set the field at the dotted `path` below a spec of class `root`, whose JSON form is `data`."""
    *groups, leaf = path.split(".")
    spec_type: Any = root
    kinds: dict[str, Any] = {}
    for depth, group in enumerate(groups):
        hint = _field_hint(spec_type, group, ".".join(groups[:depth]))
        kinds = kinds_of(hint)
        part = present(hint)
        if not kinds and not dataclasses.is_dataclass(part):
            raise ConfigError(path, f"{'.'.join(groups[: depth + 1])} has no fields, expected a value of its own")
        # A part that is None gets its defaults, so that one of its fields can be set.
        if data.get(group) is None:
            data[group] = _default(spec_type, group)
        data = data[group]
        spec_type = kinds.get(data.get("kind", "")) if kinds else part
        # The change to the kind itself comes first, see `override`; here no kind was chosen at all.
        if spec_type is None and path != f"{'.'.join(groups)}.kind":
            inside = ".".join(groups[: depth + 1])
            raise ConfigError(path, f"{inside} is none, expected {inside}.kind=... too, one of {', '.join(kinds)}")
    if leaf == "kind" and kinds:
        _choose_kind(kinds, data, path, text)
        return
    data[leaf] = _read(_field_hint(spec_type, leaf, ".".join(groups)), text, path)


def _choose_kind(kinds: Mapping[str, Any], data: dict[str, Any], path: str, text: str) -> None:
    if text not in kinds:
        raise unknown_choice(path, text, kinds)
    if text != data.get("kind"):
        # Fields of the former kind would be unknown to this one.
        data.clear()
        data["kind"] = text


def _check_complete(root: type, data: Any, groups: Sequence[str]) -> None:
    """Raise unless the part at `groups`, whose kind was set, has all fields that its kind needs."""
    spec_type: Any = root
    for group in groups:
        hint, data = hints_of(spec_type)[group], data[group]
        if data is None:  # another change took it away
            return
        spec_type = kinds_of(hint).get(data.get("kind", ""), present(hint))
    for field in dataclasses.fields(spec_type):
        if field.name not in data and field.default is field.default_factory is dataclasses.MISSING:
            path = ".".join([*groups, field.name])
            example = _example(hints_of(spec_type)[field.name])
            raise ConfigError(
                path, f"missing for the kind {data.get('kind')!r}, expected the assignment {path}={example}"
            )


def _example(hint: Any) -> str:
    """Return a placeholder of the value of a field, in the syntax of an assignment."""
    hint = present(hint)
    if typing.get_origin(hint) is Literal:
        return "|".join(map(str, typing.get_args(hint)))
    if _holds_specs(hint):
        fields = dataclasses.fields(typing.get_args(hint)[0])
        return f"[{{{', '.join(f'{chr(34)}{field.name}{chr(34)}: ...' for field in fields)}}}]"
    if typing.get_origin(hint) is tuple:
        item = _example(typing.get_args(hint)[0])
        return f"{item},{item},..."
    return {int: "N", float: "X", str: "NAME", bool: "true|false"}.get(hint, "VALUE")


def _default(spec_type: type, field: str) -> Any:
    """Return the JSON form of the default of `field`; empty for an optional part."""
    item = next(item for item in dataclasses.fields(spec_type) if item.name == field)
    if item.default_factory is not dataclasses.MISSING:
        return to_data(item.default_factory())
    return {} if item.default in (None, dataclasses.MISSING) else to_data(item.default)


def _field_hint(spec_type: type, field: str, parent: str) -> Any:
    hints = hints_of(spec_type)
    names = [item.name for item in dataclasses.fields(spec_type)]
    if field not in names:
        raise unknown_field(parent, field, names)
    return hints[field]


def _read(hint: Any, text: str, path: str) -> Any:
    """Parse `text` as the value of a field annotated `hint`."""
    types = members(hint)
    if type(None) in types and text.lower() in _NONE_WORDS:
        return None
    if any(dataclasses.is_dataclass(member) for member in types):
        raise ConfigError(path, f"got {quoted(text)}, expected one of its fields to be set, as in {path}.kind=...")
    # None is dealt with, so that the first other type decides how the text is read.
    hint = present(hint)
    origin = typing.get_origin(hint)
    is_json = (origin is Mapping and text.startswith("{")) or (origin is tuple and _is_list(hint, text))
    if hint is Any or _holds_specs(hint) or is_json:
        return _read_json(hint, text, path)
    if typing.get_origin(hint) is Mapping:
        item = typing.get_args(hint)[1]
        # At the last colon, as a name may hold others.
        pairs = [word.rpartition(":") for word in text.split(",")] if text else []
        if not all(colon for _, colon, _ in pairs):
            raise ConfigError(path, f"got {quoted(text)}, expected name:value, as in a:0.5,b:0")
        names = [name.strip() for name, _, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(path, f"got {quoted(name)} twice, expected it once")
        return {name: _read(item, value.strip(), path) for name, (_, _, value) in zip(names, pairs, strict=True)}
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        # A minus sign cannot be distinguished from a dash, so only integers (all positive in our specs) take dashes.
        words = text.replace("-", ",").split(",") if item is int else text.split(",")
        return [_read(item, word.strip(), path) for word in words] if text else []
    if hint is str or typing.get_origin(hint) is Literal:
        return text
    try:
        return _read_number(hint, text, path)
    except ConfigError:
        if str in types:  # a number or a word, which the spec checks
            return text
        raise


def _holds_specs(hint: Any) -> bool:
    """Return whether `hint` is a list of specs."""
    return typing.get_origin(hint) is tuple and dataclasses.is_dataclass(typing.get_args(hint)[0])


def _is_list(hint: Any, text: str) -> bool:
    """Return whether `text` is a list in JSON, or is meant as one; a pattern of names such as ``[ab]*`` is not."""
    if not text.startswith("[") or typing.get_args(hint)[0] is not str:
        return text.startswith("[")
    try:
        return isinstance(parse_json(text), list)
    except ValueError:
        return '"' in text


def _read_json(hint: Any, text: str, path: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        if hint is Any:
            return text
        example = f" as in {path}={_example(hint)}" if _holds_specs(hint) else ""
        raise ConfigError(path, f"got {quoted(text)}, expected it in JSON{example}") from None


def _read_number(hint: Any, text: str, path: str) -> bool | int | float:
    expected = {bool: "true or false", int: "an integer", float: "a number"}[hint]
    if hint is bool:
        if text.lower() in _BOOL_WORDS:
            return _BOOL_WORDS[text.lower()]
    else:
        try:
            number: int | float = hint(text)
        except ValueError:
            pass
        else:
            return number
    raise ConfigError(path, f"got {quoted(text)}, expected {expected}")
