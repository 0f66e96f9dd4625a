"""Objects made from tables: every argument readable under its HugeCTR name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from terarec.hugectr.errors import IllegalCallError
from terarec.hugectr.tables.table import Table


class Record:
    """An object that a call of HugeCTR makes, frozen unless `is_writable`.

    A subclass names its tables: the newest form of the call first, which reads what no older form claims. Older forms
    give the values of the newest one besides their own. Lists and dicts are handed out as copies, as HugeCTR does.
    """

    FORMS: ClassVar[tuple[Table, ...]] = ()
    is_writable: ClassVar[bool] = False
    _values: dict[str, Any]

    def __init_subclass__(cls, *, forms: tuple[Table, ...] = ()) -> None:
        """Takes the tables of the class."""
        if forms:
            cls.FORMS = forms
            cls.__signature__ = forms[0].signature()  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        form = self.form_of(args, kwargs)
        values = form.read(args, kwargs)
        object.__setattr__(self, "_values", {**values, **form.derive(values)})

    @classmethod
    def form_of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Table:
        """The table that reads a call with `args` and `kwargs`."""
        return next((form for form in cls.FORMS[1:] if form.fits(args, kwargs)), cls.FORMS[0])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_values" not in self.__dict__:
            raise AttributeError(name)
        if name not in self._values:
            raise AttributeError(f"{type(self).__name__} has no {name!r}; it has {', '.join(self._values)}")
        return _copied(self._values[name])

    def __setattr__(self, name: str, value: object) -> None:
        if not self.is_writable:
            raise IllegalCallError(f"{type(self).__name__} is frozen: make a new one instead of setting {name}")
        rows = {row.name: row for row in self.FORMS[0].rows}
        if name not in rows:
            raise AttributeError(f"{type(self).__name__} has no {name!r} to set; it has {', '.join(rows)}")
        self._values[name] = rows[name].accept(type(self).__name__, value)

    def with_values(self, **changes: Any) -> Self:
        """A copy with other values.

        Raises:
            WrongInputError: a value that its parameter does not take.
        """
        rows = {row.name: row for form in reversed(self.FORMS) for row in form.rows}
        owner = type(self).__name__
        found = {name: rows[name].accept(owner, value) if name in rows else value for name, value in changes.items()}
        copy = object.__new__(type(self))
        object.__setattr__(copy, "_values", {**self._values, **found})
        return copy

    def values(self) -> Mapping[str, Any]:
        """Every value by its name."""
        return {name: _copied(value) for name, value in self._values.items()}

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._values == getattr(other, "_values", None)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._values.items())
        return f"{type(self).__name__}({shown})"


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return dict(value) if isinstance(value, dict) else value
