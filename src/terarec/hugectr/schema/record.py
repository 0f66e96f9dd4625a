# SPDX-License-Identifier: Apache-2.0
"""Objects that HugeCTR's calls create, with an attribute for every argument."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from terarec.hugectr.errors import IllegalCallError
from terarec.hugectr.schema.table import Form, Parameter, form_of, forms
from terarec.hugectr.schema.types import CLASSES


class _RecordType(type):
    @property
    def __signature__(cls) -> inspect.Signature:  # of `help`; not an attribute, so that schemas are loaded late
        return forms()[cls.CALL][0].signature() if cls.CALL else inspect.Signature()  # type: ignore[attr-defined]


class Record(metaclass=_RecordType):
    """An object that a call of HugeCTR creates, frozen unless `is_writable`.

    Objects of an older form of the call have the values of the newest form besides their own. Lists and dicts are
    passed out as copies, as HugeCTR does. The attributes and signatures of the subclasses are in ``objects.pyi``.
    """

    CALL: ClassVar[str] = ""
    is_writable: ClassVar[bool] = False
    _values: dict[str, Any]

    def __init_subclass__(cls, *, call: str = "") -> None:
        """Set the call that creates objects of the class, and register the class for schemas."""
        cls.CALL = call or cls.CALL
        CLASSES.add(cls.__name__, cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        form = form_of(self.CALL, args, kwargs)
        values = form.read(args, kwargs)
        # Base classes first, so that a class's own defaults win. Later code reads the names of the newest release
        # alone.
        newest = {name: value for one in reversed(self._newest_forms()) for name, value in one.defaults().items()}
        # Past the class's own `__setattr__`, which sets parameters.
        object.__setattr__(self, "_values", {**newest, **values, **form.derive(values), **self.first_values()})

    @classmethod
    def first_values(cls) -> dict[str, Any]:
        """Return the values of a new object besides those of its call."""
        return {}

    @classmethod
    def _newest_forms(cls) -> list[Form]:
        calls = dict.fromkeys(base.CALL for base in cls.__mro__ if issubclass(base, Record) and base.CALL)
        return [forms()[call][0] for call in calls]

    @classmethod
    def names(cls) -> set[str]:
        """Return the names of the newest form's parameters."""
        return {one.name for one in forms()[cls.CALL][0].parameters}

    @classmethod
    def parameter(cls, name: str) -> Parameter:
        """Return the parameter `name` of the newest form that has it."""
        return next(one for form in forms()[cls.CALL] for one in form.parameters if one.name == name)

    if not TYPE_CHECKING:  # type checkers know the attributes from the stubs

        def __getattr__(self, name: str) -> Any:
            # `copy` and `pickle` look for methods before there are values; a lookup of these would call this again.
            if name.startswith("__") or "_values" not in self.__dict__:
                raise AttributeError(name)
            if name not in self._values:
                raise AttributeError(f"{type(self).__name__} has no {name!r}; it has {', '.join(self._values)}")
            return _copied(self._values[name])

    def __setattr__(self, name: str, value: object) -> None:
        if not self.is_writable:
            raise IllegalCallError(
                f"{type(self).__name__}.{name}",
                "got another value, but the object is frozen; expected a new object",
            )
        form = forms()[self.CALL][0]
        parameters = {one.name: one for one in form.parameters}
        if name not in parameters:
            raise AttributeError(f"{type(self).__name__} has no {name!r} to set; it has {', '.join(parameters)}")
        values = {**self._values, name: parameters[name].accept(type(self).__name__, value)}
        form.check(values)
        before, derived = form.derive(self._values), form.derive(values)
        # Only what follows from this one: others may have been set by their own names since. 0 stands for a default.
        changed = {
            one: new for one, new in derived.items() if (not values[name] if one == name else new != before.get(one))
        }
        self._values.update({**values, **changed})

    def with_values(self, **changes: object) -> Self:
        """Return a copy with other values."""
        owner = type(self).__name__
        known = {one.name: one for form in reversed(forms()[self.CALL]) for one in form.parameters}
        accepted = {
            name: known[name].accept(owner, value) if name in known else value for name, value in changes.items()
        }
        copy = object.__new__(type(self))
        object.__setattr__(copy, "_values", {**self._values, **accepted})
        return copy

    def values(self) -> Mapping[str, Any]:
        """Return every value by its name."""
        return {name: _copied(value) for name, value in self._values.items()}

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._values == getattr(other, "_values", None)

    def __hash__(self) -> int:
        # Values are lists and dicts, too, which have no hash.
        return hash(repr(self))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._values.items())
        return f"{type(self).__name__}({shown})"


CLASSES.add("Record", Record)


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return dict(value) if isinstance(value, dict) else value
