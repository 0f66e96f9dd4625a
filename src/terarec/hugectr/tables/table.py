"""A table of parameters, and how a call is read by it."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from typing import Any, TypeVar

from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.tables.kinds import Kind
from terarec.spec.quoting import nearest, quoted

OLDEST, NEWEST = "2.3", "25.03"

Result = TypeVar("Result")


class Required:
    """Stands where a parameter has no default."""

    def __repr__(self) -> str:
        return "required"


REQUIRED = Required()


class Status(Enum):
    """What becomes of a parameter."""

    SUPPORTED = "supported"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter of a callable of HugeCTR.

    Attributes:
        name: its name there.
        kind: what it takes.
        meaning: one line, for the page.
        default: its default there; `REQUIRED` for none.
        status: IGNORED takes any value of the kind and does nothing, for the reason `why`; REFUSED takes the default
            alone.
        why: why it is ignored or refused.
        since: first release that has it.
        until: last release that has it.
        is_positional: whether a call may give it by its place.
        aliases: names that some releases, or their documentation, have for it.
    """

    name: str
    kind: Kind
    meaning: str
    default: Any = REQUIRED
    status: Status = Status.SUPPORTED
    why: str = ""
    since: str = OLDEST
    until: str = NEWEST
    is_positional: bool = True
    aliases: tuple[str, ...] = ()

    def accept(self, owner: str, value: object) -> Any:
        """`value` as it is kept.

        Raises:
            WrongInputError: for a value of another kind, or one that terarec does not do.
        """
        try:
            found = self.kind.read(value)
        except (ValueError, TypeError, IndexError, OverflowError):
            expected = self.kind.expected
            raise WrongInputError(f"{owner}: {self.name}: got {quoted(value)}, expected {expected}") from None
        if self.status is Status.REFUSED and found != self.default:
            raise WrongInputError(f"{owner}: {self.name}: got {quoted(value)}, expected {self.default!r}: {self.why}")
        return found


Fits = Callable[[Sequence[Any], Mapping[str, Any]], bool]
"""Whether a call with these arguments is of a form."""

Rule = Callable[[Mapping[str, Any]], str | None]
"""Looks at all values of a call; returns what is wrong with them together, or None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The parameters of one callable, in the order in which HugeCTR takes them.

    Attributes:
        name: the callable, as scripts spell it.
        meaning: one line, for the page.
        rows: one a parameter.
        rules: what must hold between parameters.
        fits: whether a call (args, kwargs) is of this older form, where a name has had several.
        derive: what an object of this form has besides: the values of the newest form.
    """

    name: str
    meaning: str
    rows: tuple[Parameter, ...]
    rules: tuple[Rule, ...] = ()
    fits: Fits = lambda args, kwargs: False
    derive: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: {}

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The value of every row in a call with `args` and `kwargs`.

        Raises:
            WrongInputError: an unknown, missing or repeated parameter, or a value that a row or a rule refuses.
        """
        given = self._given(args, kwargs)
        missing = [row.name for row in self.rows if row.default is REQUIRED and row.name not in given]
        if missing:
            raise WrongInputError(f"{self.name}: no value for {', '.join(missing)}, which has no default")
        values = {row.name: row.accept(self.name, given.get(row.name, row.default)) for row in self.rows}
        for rule in self.rules:
            problem = rule(values)
            if problem:
                raise WrongInputError(f"{self.name}: {problem}")
        return values

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        places = [row.name for row in self.rows if row.is_positional]
        if len(args) > len(places):
            raise WrongInputError(f"{self.name}: got {len(args)} positional values, expected at most {len(places)}")
        given = dict(zip(places, args, strict=False))
        known = {name: row.name for row in self.rows for name in (row.name, *row.aliases)}
        for name, value in kwargs.items():
            if name not in known:
                close = nearest(name, known)
                hint = f"did you mean {close!r}" if close is not None else f"expected one of {', '.join(sorted(known))}"
                raise WrongInputError(f"{self.name}: got an unknown parameter {name!r}, {hint}")
            if known[name] in given:
                raise WrongInputError(f"{self.name}: got {known[name]} twice, by place and by name, or by two names")
            given[known[name]] = value
        return given

    def signature(self) -> inspect.Signature:
        """How the callable looks to `help`; a parameter named as a keyword of Python is left to kwargs."""
        shown = [row for row in self.rows if not keyword.iskeyword(row.name)]
        has_default = False
        parameters: list[inspect.Parameter] = []
        for row in shown:
            has_default = has_default or row.default is not REQUIRED
            place = inspect.Parameter.POSITIONAL_OR_KEYWORD if row.is_positional else inspect.Parameter.KEYWORD_ONLY
            # Python allows no parameter without a default behind one with: there, the default is the word "required".
            default = row.default if has_default else inspect.Parameter.empty
            parameters.append(inspect.Parameter(row.name, place, default=default))
        if len(shown) < len(self.rows):
            parameters.append(inspect.Parameter("keywords", inspect.Parameter.VAR_KEYWORD))
        return inspect.Signature(parameters)


def taking(table: Table) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """A method that takes what `table` says, by place or by name, and gets the value of every row by its name."""

    def walk(method: Callable[..., Result]) -> Callable[..., Result]:
        @wraps(method)
        def walked(self: Any, /, *args: Any, **kwargs: Any) -> Result:
            return method(self, **table.read(args, kwargs))

        owner = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [owner, *table.signature().parameters.values()]
        walked.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return walked

    return walk
