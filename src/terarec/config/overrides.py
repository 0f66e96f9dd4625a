"""Dotted overrides: ``training.batch_size=4096`` on top of a spec, each text read as the type of its field."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from terarec.errors import ConfigError
from terarec.spec import from_data, to_data
from terarec.spec.codec import parse_json, unknown_choice, unknown_field
from terarec.spec.fields import hints_of, kinds_of, members, present
from terarec.spec.quoting import quoted, shortened

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

    A text is read as the type of its field: integers, numbers, true/false, words, lists as ``512-256-64`` or
    ``512,256,64``, values by name as ``a:0.5,b:0``, lists of objects and objects of any values in JSON, and ``none``
    where a field may be left out. Setting the ``kind`` of a part that has several (``model.kind=wide_deep``) starts
    from the defaults of that kind; the other changes apply after it in any order.

    Raises:
        ConfigError: An unknown path, a text that is not of the field's type, or a value that the spec rejects.
    """
    data = to_data(spec)
    # A change of kind replaces the complete part, so it must come before the fields inside that part.
    for path in sorted(changes, key=lambda path: (path.rpartition(".")[2] != "kind", path.count("."))):
        _assign(type(spec), data, path, changes[path])
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
            raise ConfigError(path, f"{'.'.join(groups[: depth + 1])} has no fields, expected it to be set itself")
        if data.get(group) is None:
            data[group] = _default(spec_type, group)
        data = data[group]
        spec_type = kinds.get(data.get("kind", "")) if kinds else part
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
        data.clear()
        data["kind"] = text


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
    hint = present(hint)
    if hint is Any or _holds_specs(hint) or (typing.get_origin(hint) is Mapping and text.startswith("{")):
        return _read_json(hint, text, path)
    if typing.get_origin(hint) is Mapping:
        item = typing.get_args(hint)[1]
        pairs = [word.rpartition(":") for word in text.split(",")] if text else []
        if not all(colon for _, colon, _ in pairs):
            raise ConfigError(path, f"got {quoted(text)}, expected name:value, as in a:0.5,b:0")
        return {name.strip(): _read(item, value.strip(), path) for name, _, value in pairs}
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


def _read_json(hint: Any, text: str, path: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        if hint is Any:
            return text
        raise ConfigError(path, f"got {quoted(text)}, expected it in JSON") from None


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
