# SPDX-License-Identifier: Apache-2.0
"""Types of parameters and of values in JSON files: how each reads a value, and how errors and stubs name it."""

from __future__ import annotations

import ast
import math
import numbers
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NoReturn, TypeVar

from terarec.hugectr import enums
from terarec.hugectr.release import RELEASES
from terarec.spec.registry import Registry
from terarec.spec.serving import EXECUTOR_MODES

CLASSES: Registry[type] = Registry("class")
"""Classes that schemas name, such as `Solver`; each is registered where it is defined."""

Value = TypeVar("Value")
Other = TypeVar("Other")
Key = TypeVar("Key")
Member = TypeVar("Member", bound=Enum)


@dataclass(frozen=True, slots=True)
class Type(Generic[Value]):
    """A type of values.

    Attributes:
        expected: Accepted values, for errors.
        read: Function that converts a value; it raises ValueError or TypeError for one that is not accepted.
        argument: Annotation of accepted values.
        kept: Annotation of kept values.
        default_of: Function that converts a default in a TOML file.
    """

    expected: str
    read: Callable[[Any], Value]
    argument: str
    kept: str
    default_of: Callable[[Any], Any]


def _type(expected: str, read: Callable[[Any], Value], argument: str, kept: str | None = None) -> Type[Value]:
    return Type(expected, read, argument, argument if kept is None else kept, read)


def _reject(value: object) -> NoReturn:
    raise ValueError(value)  # the caller says what, where and what is accepted


def _read_bool(value: Any) -> bool:
    is_bool = isinstance(value, bool) or type(value).__name__ in {"bool_", "bool"}  # NumPy's, too
    return bool(value) if is_bool else _reject(value)


def _read_string(value: Any) -> str:
    return value if isinstance(value, str) else _reject(value)


BOOL = _type("True or False", _read_bool, "bool")
STRING = _type("a string", _read_string, "str")
PATH = _type("a path", lambda value: _read_string(os.fspath(value)), "str | os.PathLike[str]", "str")
# None as a default, for which the call's form derives the selected release.
RELEASE: Type[str | None] = Type(
    f"one of {', '.join(RELEASES)}",
    lambda value: value if value is None or value in RELEASES else _reject(value),
    "str | None",
    "str",
    lambda _: None,
)
OBJECT = _type("an object", lambda value: value if isinstance(value, Mapping) else _reject(value), "Mapping[str, Any]")


def _read_array(value: Any) -> Any:
    is_array = hasattr(value, "__array__") or (isinstance(value, Sequence) and not isinstance(value, str | bytes))
    return value if is_array else _reject(value)


def _read_dlpack(value: Any) -> Any:
    # A capsule has no type of its own in Python.
    return value if hasattr(value, "__dlpack__") or type(value).__name__ == "PyCapsule" else _reject(value)


ARRAY = _type("a list or an array", _read_array, "ArrayLike")
DLPACK = _type("a DLPack capsule or an object with __dlpack__", _read_dlpack, "object")
NONE: Type[None] = Type("None", lambda value: None if value is None else _reject(value), "None", "None", lambda _: None)


def integer(minimum: int | None = None) -> Type[int]:
    """Return the type of integers of at least `minimum`, NumPy's too."""

    def read(value: Any) -> int:
        # `operator.index` takes NumPy's integers and no floats; True would be 1.
        index = _reject(value) if isinstance(value, bool) else operator.index(value)
        return index if minimum is None or index >= minimum else _reject(value)

    return _type("an integer" + ("" if minimum is None else f" >= {minimum}"), read, "int")


def number(minimum: float | None = None, below: float | None = None) -> Type[float]:
    """Return the type of finite numbers of at least `minimum` and below `below`, which are kept as floats."""
    expected = "a finite number" + (f" >= {minimum:g}" if minimum is not None else "")
    expected += f" and < {below:g}" if below is not None else ""
    low, high = -math.inf if minimum is None else minimum, math.inf if below is None else below

    def read(value: Any) -> float:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
        return float(value) if is_number and low <= value < high else _reject(value)

    return _type(expected, read, "float")


def member(enum: type[Member]) -> Type[Member]:
    """Return the type of members of `enum`."""

    def read(value: Any) -> Member:
        return value if isinstance(value, enum) else _reject(value)

    return Type(f"a member of {enum.__name__}", read, enum.__name__, enum.__name__, enum.__members__.__getitem__)


def member_name(enum: type[Member]) -> Type[Member]:
    """Return the type of names of members of `enum` in JSON files, "None" for Non, which are kept as the members."""
    members = {("None" if name == "Non" else name): one for name, one in enum.__members__.items()}
    expected = "one of " + ", ".join(map(repr, members))
    return _type(expected, lambda value: members.get(_read_string(value)) or _reject(value), "str", enum.__name__)


def one_of(*accepted: Value) -> Type[Value]:
    """Return the type of the values `accepted`; True is not 1."""
    # With the type, since 1 == True == 1.0.
    choices = {(type(choice), choice) for choice in accepted}
    expected = " or ".join(map(repr, accepted))
    annotation = f"Literal[{', '.join(map(repr, accepted))}]"
    return _type(expected, lambda value: value if (type(value), value) in choices else _reject(value), annotation)


def instance(cls: type[Value]) -> Type[Value]:
    """Return the type of objects of `cls`; the default in a TOML file is a table of arguments."""

    def read(value: Any) -> Value:
        return value if isinstance(value, cls) else _reject(value)

    def default(arguments: Mapping[str, Any]) -> Value:
        return cls(**{name: cls.parameter(name).type.default_of(value) for name, value in arguments.items()})  # type: ignore[attr-defined]

    return Type(f"a {cls.__name__}", read, cls.__name__, cls.__name__, default)


def either(first: Type[Value], second: Type[Other]) -> Type[Value | Other]:
    """Return the type of values that `first` or, failing that, `second` accepts."""

    def read(value: Any) -> Value | Other:
        try:
            return first.read(value)
        except (ValueError, TypeError):
            return second.read(value)

    def default_of(value: Any) -> Any:
        return None if value == "None" else second.default_of(value)

    expected = f"{first.expected} or {second.expected}"
    names = [(first.argument, second.argument), (first.kept, second.kept)]
    # None stands last in annotations and first in errors.
    argument, kept = (f"{b} | {a}" if a == "None" else f"{a} | {b}" for a, b in names)
    return Type(expected, read, argument, kept, default_of)


def list_of(item: Type[Value]) -> Type[list[Value]]:
    """Return the type of lists of `item`; tuples and NumPy arrays become lists, too."""

    def read(value: Any) -> list[Value]:
        # Iterable as well, letter by letter or key by key: never what a script means.
        if isinstance(value, str | bytes | Mapping):
            _reject(value)
        return [item.read(one) for one in value]

    return _type(f"a list of ({item.expected})", read, f"Sequence[{item.argument}]", f"list[{item.kept}]")


def scalar_or_list(item: Type[Value]) -> Type[list[Value]]:
    """Return the type of one `item`, or a list of them, which is kept as a list."""
    items = list_of(item)

    def read(value: Any) -> list[Value]:
        try:
            return [item.read(value)]
        except (ValueError, TypeError):
            return items.read(value)

    return _type(f"{item.expected}, or a list of them", read, f"{item.argument} | {items.argument}", items.kept)


def dict_of(key: Type[Key], value: Type[Value]) -> Type[dict[Key, Value]]:
    """Return the type of dictionaries from `key` to `value`."""

    def read(mapping: Any) -> dict[Key, Value]:
        if not isinstance(mapping, Mapping):
            _reject(mapping)
        return {key.read(name): value.read(item) for name, item in mapping.items()}

    def default_of(mapping: Mapping[str, Any]) -> dict[Key, Value]:
        return {key.default_of(name): value.read(item) for name, item in mapping.items()}

    expected = f"a dict from {key.expected} to {value.expected}"
    argument = f"Mapping[{key.argument}, {value.argument}]"
    return Type(expected, read, argument, f"dict[{key.kept}, {value.kept}]", default_of)


def pair_of(first: Type[Value], second: Type[Other]) -> Type[tuple[Value, Other]]:
    """Return the type of tuples or lists of two, which are kept as tuples."""

    def read(value: Any) -> tuple[Value, Other]:
        left, right = value
        return first.read(left), second.read(right)

    expected = f"a pair ({first.expected}, {second.expected})"
    argument, kept = f"tuple[{first.argument}, {second.argument}]", f"tuple[{first.kept}, {second.kept}]"
    return _type(expected, read, argument, kept)


def parse_type(text: str, minimum: float | None = None, below: float | None = None) -> Type[Any]:
    """Return the type that a TOML file spells like a Python annotation, such as ``list[tuple[int, int]]``.

    Args:
        text: The annotation, of bool, int, float, str, path, object, array, dlpack, executor, release, None,
            Literal, list, dict, tuple, ScalarOrList, enumerations, `CLASSES` and ``|``.
        minimum: Least value of its numbers.
        below: Bound of its floats.
    """
    scalars: dict[str, Type[Any]] = {
        "bool": BOOL,
        "str": STRING,
        "path": PATH,
        "int": integer(None if minimum is None else int(minimum)),
        "float": number(minimum, below),
        "executor": _type(f"one of {', '.join(EXECUTOR_MODES)}", one_of(*EXECUTOR_MODES).read, "str"),
        "release": RELEASE,
        "object": OBJECT,
        "array": ARRAY,
        "dlpack": DLPACK,
    }
    generics: dict[str, Callable[..., Type[Any]]] = {
        "list": list_of,
        "dict": dict_of,
        "tuple": pair_of,
        "ScalarOrList": scalar_or_list,
    }

    def parse(node: ast.expr) -> Type[Any]:
        if isinstance(node, ast.BinOp):
            left, right = parse(node.left), parse(node.right)
            return either(right, left) if right is NONE else either(left, right)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if node.value.id == "Literal":
                return one_of(*map(ast.literal_eval, items))
            return generics[node.value.id](*map(parse, items))
        # The only constant outside Literal.
        if isinstance(node, ast.Constant):
            return NONE
        assert isinstance(node, ast.Name), text
        if node.id in scalars:
            return scalars[node.id]
        return instance(CLASSES[node.id]) if node.id in CLASSES else member(getattr(enums, node.id))

    return parse(ast.parse(text, mode="eval").body)
