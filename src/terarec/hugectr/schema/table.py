# SPDX-License-Identifier: Apache-2.0
"""Schemas of HugeCTR's calls: loading them from the TOML files, and validating arguments by them.

A TOML file has an array of tables for each call, one table for each form of it, the newest first. Keys of a form:

* ``meaning``: one line for the compatibility page.
* ``parameters``: name, or names with commas between, -> parameter, in the order of HugeCTR.
* ``common``: keys that all its parameters have unless they say otherwise.
* ``like``, ``without``, ``renames``: take the parameters of another call's newest form, but some, or by new names.
* ``rules``, ``fits``, ``derive``: functions of `terarec.hugectr.schema.rules`; see `Form`.
* ``keywords``: a call with one of them has this older form, whatever ``fits`` says.
* ``values``, ``copies``: further values of an object, and those under another name.
* ``positions = "release"``: by position, a call has the parameters of its release alone.

Keys of a parameter: those of `Parameter`, with ``min`` and ``below`` for the numbers of its type, ``ignored`` or
``rejected`` with the reason (or its name in the file's ``reasons``), ``keyword_only``, ``expected`` for errors,
``earlier``: release -> the default up to it, and ``like``: a call whose parameter of that name has the missing keys.
"""

from __future__ import annotations

import inspect
import keyword
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, wraps
from importlib import resources
from threading import RLock
from typing import Any, ParamSpec, TypeVar, cast

from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.release import NEWEST, OLDEST, release_number, release_of
from terarec.hugectr.schema.rules import DERIVED, OLDER_FORMS, RULES
from terarec.hugectr.schema.types import Type, parse_type
from terarec.spec.checks import REQUIRED, nearest_or_all, quoted

FILES = ("solver", "optimizer", "reader", "embedding", "layer", "training_cache", "model", "inference", "server_file")
"""The TOML files with calls, in the order of the compatibility page."""

_FORMS: dict[str, tuple[Form, ...]] = {}
_loaded: list[bool] = []
# Re-entrant: a default may be an object, whose own call needs the forms while they are loaded.
_LOCK = RLock()

P = ParamSpec("P")
Result = TypeVar("Result")


class Status(Enum):
    """Effect of a parameter in terarec."""

    SUPPORTED = "supported"
    IGNORED = "ignored"
    REJECTED = "rejected"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of a call.

    Attributes:
        name: Its name in HugeCTR.
        type: Its type.
        meaning: One line, for the page.
        default: Its default in HugeCTR; `REQUIRED` for none.
        status: IGNORED takes any value of the type and does nothing; REJECTED takes the default alone.
        why: Reason why it is ignored or rejected.
        since: First release that has it.
        until: Last release that has it.
        is_positional: Whether a call may pass it by position.
        aliases: Its names in some releases, or in their documentation.
        earlier_defaults: Releases with the defaults that it had up to them, in their order.
    """

    name: str
    type: Type[Any]
    meaning: str
    default: Any = REQUIRED
    status: Status = Status.SUPPORTED
    why: str = ""
    since: str = OLDEST
    until: str = NEWEST
    is_positional: bool = True
    aliases: tuple[str, ...] = ()
    earlier_defaults: tuple[tuple[str, Any], ...] = ()

    def default_in(self, release: tuple[int, int]) -> Any:
        """Return the default in a release, given by its number."""
        earlier = (value for until, value in self.earlier_defaults if release <= release_number(until))
        return next(earlier, self.default)

    def is_in(self, release: tuple[int, int]) -> bool:
        """Return whether a release, given by its number, has the parameter."""
        return release_number(self.since) <= release <= release_number(self.until)

    def accept(self, owner: str, value: object) -> Any:
        """Return `value` in the form that is stored."""
        try:
            read = self.type.read(value)
        # Types convert by `operator.index`, `float`, unpacking and iteration, which raise any of these.
        except (ValueError, TypeError, IndexError, OverflowError):
            raise _wrong(owner, self.name, value, self.type.expected) from None
        if self.status is Status.REJECTED and read != self.default:
            raise _wrong(owner, self.name, value, f"{self.default!r}: {self.why}")
        return read


def _wrong(owner: str, field: str, value: object, expected: str) -> WrongInputError:
    problem = f"got {quoted(value)}, expected {expected}"
    return WrongInputError(f"{owner}: {field}", problem, field=field, received=value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """The parameters of a call in some releases, in their order.

    Attributes:
        name: The call, as scripts spell it.
        meaning: One line, for the page.
        parameters: Its parameters.
        rules: Each gets the values of a call and returns what is wrong with them together, or None.
        fits: Whether a call's positional and keyword arguments have this older form.
        derive: Further values of an object of this form.
        has_release_positions: Whether a call has, by position, the parameters of its release alone.
        since: First release of the call.
        until: Last release of the call.
    """

    name: str
    meaning: str
    parameters: tuple[Parameter, ...]
    rules: tuple[Callable[[Mapping[str, Any]], str | None], ...]
    fits: Callable[[Sequence[Any], Mapping[str, Any]], bool]
    derive: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    has_release_positions: bool
    since: str
    until: str

    def release(self) -> tuple[int, int]:
        """Return the number of the release that a call follows, as `release_of` does."""
        return release_of(self.since, self.until)

    def positional(self, release: tuple[int, int]) -> list[Parameter]:
        """Return the parameters that a call in a release, given by its number, may pass by position."""
        takes_all = not self.has_release_positions
        return [one for one in self.parameters if one.is_positional and (takes_all or one.is_in(release))]

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the value of every parameter in a call.

        Raises:
            WrongInputError: An unknown, missing or repeated parameter, or a value that is not accepted.
        """
        provided = self._by_name(args, kwargs)
        missing = [one.name for one in self.parameters if one.default is REQUIRED and one.name not in provided]
        if missing:
            names = ", ".join(missing)
            raise WrongInputError(self.name, f"no value for {names}, which has no default", field=missing[0])
        release = self.release()
        values = {
            one.name: one.accept(self.name, provided.get(one.name, one.default_in(release))) for one in self.parameters
        }
        self.check(values)
        return values

    def check(self, values: Mapping[str, Any]) -> None:
        """Check the values of all parameters together."""
        for rule in self.rules:
            problem = rule(values)
            if problem:
                # A rule about one parameter begins with its name, one about several does not.
                field, _, rest = problem.partition(": ")
                if field in values:
                    raise WrongInputError(self.name, field, rest, field=field)
                raise WrongInputError(self.name, problem)

    def defaults(self) -> dict[str, Any]:
        """Return the defaults of the parameters that have one."""
        return {one.name: one.default for one in self.parameters if one.default is not REQUIRED}

    def _by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        positions = [one.name for one in self.positional(self.release())]
        if len(args) > len(positions):
            most = len(positions)
            raise WrongInputError(self.name, f"got {len(args)} positional values, expected at most {most}")
        provided = dict(zip(positions, args, strict=False))
        known = {name: one.name for one in self.parameters for name in (one.name, *one.aliases)}
        for name, value in kwargs.items():
            if name not in known:
                hint = nearest_or_all(name, sorted(known))
                raise WrongInputError(self.name, f"got an unknown parameter {name!r}, {hint}", field=name)
            # Aliases are names of other releases: a call that mixes them would have two values.
            if known[name] in provided:
                repeated = f"got {known[name]} twice, by place and by name, or by two names"
                raise WrongInputError(self.name, repeated, field=known[name])
            provided[known[name]] = value
        return provided

    def signature(self) -> inspect.Signature:
        """Return the signature for `help`; parameters named like a keyword of Python are in ``**keywords``."""
        positional = self.positional(release_number(self.until))
        rest = [one for one in self.parameters if one not in positional]
        shown = [one for one in (*positional, *rest) if not keyword.iskeyword(one.name)]
        has_default = False
        parameters: list[inspect.Parameter] = []
        for one in shown:
            has_default = has_default or one.default is not REQUIRED
            is_positional = one in positional
            place = inspect.Parameter.POSITIONAL_OR_KEYWORD if is_positional else inspect.Parameter.KEYWORD_ONLY
            # Python allows no required parameter behind an optional one: there, the default is the word "required".
            default = one.default if has_default else inspect.Parameter.empty
            parameters.append(inspect.Parameter(one.name, place, default=default))
        if len(shown) < len(self.parameters):
            parameters.append(inspect.Parameter("keywords", inspect.Parameter.VAR_KEYWORD))
        return inspect.Signature(parameters)


@dataclass(frozen=True, kw_only=True, slots=True)
class Name:
    """A name of HugeCTR without a form of its own: a method, a class, a module or a command.

    Attributes:
        name: Spelling in scripts; methods with their class.
        meaning: One line, for the page.
        since: First release that has it.
        until: Last release that has it.
        status: Whether terarec has it.
        why: Reason why it is ignored or rejected.
    """

    name: str
    meaning: str
    since: str = OLDEST
    until: str = NEWEST
    status: Status = Status.SUPPORTED
    why: str = ""


def bind_arguments(call: str) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Return a decorator of a method that is called with the validated value of every parameter, by name."""

    def decorate(method: Callable[P, Result]) -> Callable[P, Result]:
        @wraps(method)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> Result:
            # `self`, or the class of a class method.
            owner, *rest = args
            return cast("Callable[..., Result]", method)(owner, **form_of(call, rest, kwargs).read(rest, kwargs))

        return wrapper

    return decorate


def form_of(call: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form:
    """Return the form of a call's arguments: an older one that they fit, or the newest."""
    # The newest form is the fallback, so that errors name what today's documentation has.
    newest, *older = forms()[call]
    return next((form for form in older if form.fits(args, kwargs)), newest)


def forms() -> Mapping[str, tuple[Form, ...]]:
    """Return the forms of every call, the newest first.

    The files are read when a script makes its first call: `import terarec.hugectr` does not wait for them.
    """
    if not _loaded:
        # Threads of a script may make their first objects at once.
        with _LOCK:
            if not _FORMS:  # else this is a default, made by an earlier call of the files
                _load_forms()
                _loaded.append(True)
    return _FORMS


def _load_forms() -> None:
    raw: dict[str, list[dict[str, dict[str, Any]]]] = {}
    for file in FILES:
        tables = load_toml(file)
        reasons = tables.pop("reasons", {})
        for call, versions in tables.items():
            raw[call] = []
            for version in versions:
                # Raw tables are kept, since `like` takes keys of calls above, before they become parameters.
                raw[call].append(_parameters(version, raw))
                parameters = tuple(_parameter(name, keys, reasons) for name, keys in raw[call][-1].items())
                form = Form(
                    name=call,
                    meaning=version["meaning"],
                    parameters=parameters,
                    rules=tuple(RULES[rule] for rule in version.get("rules", ())),
                    fits=_fits(version),
                    derive=_derive(version),
                    has_release_positions=version.get("positions") == "release",
                    since=min((one.since for one in parameters), key=release_number, default=OLDEST),
                    until=max((one.until for one in parameters), key=release_number, default=NEWEST),
                )
                _FORMS[call] = (*_FORMS.get(call, ()), form)


@cache
def names() -> Mapping[str, tuple[Name, ...]]:
    """Return the names without forms, by section of the compatibility page."""
    return {
        section: tuple(Name(name=name, **_status(keys, {})) for name, keys in rows.items())
        for section, rows in load_toml("names").items()
    }


def load_toml(file: str) -> dict[str, Any]:
    """Return the content of one of the TOML files."""
    return tomllib.loads(resources.files("terarec.hugectr.schema").joinpath(f"{file}.toml").read_text("utf-8"))


def _fits(version: Mapping[str, Any]) -> Callable[[Sequence[Any], Mapping[str, Any]], bool]:
    keywords, fits = set(version.get("keywords", ())), OLDER_FORMS.get(version.get("fits", ""))
    return lambda args, kwargs: bool(keywords & kwargs.keys()) or (fits is not None and fits(args, kwargs))


def _derive(version: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    constants, copies = version.get("values", {}), version.get("copies", {})
    derive = DERIVED[version["derive"]] if "derive" in version else lambda values: {}
    return lambda values: {**constants, **{new: values[old] for new, old in copies.items()}, **derive(values)}


def _parameters(
    version: Mapping[str, Any], raw: Mapping[str, list[dict[str, dict[str, Any]]]]
) -> dict[str, dict[str, Any]]:
    """Return the keys of each parameter of a form by name, including inherited ones."""
    renames, common = version.get("renames", {}), version.get("common", {})
    keys_by_name: dict[str, dict[str, Any]] = {}
    if "like" in version:
        without = set(version.get("without", ()))
        keys_by_name = {
            renames.get(name, name): keys for name, keys in raw[version["like"]][0].items() if name not in without
        }
    for names_, keys in version.get("parameters", {}).items():
        for name in names_.split(", "):
            # The newest form that has the parameter: an older one may describe it for its releases alone.
            liked = next((form[name] for form in raw.get(keys.get("like", ""), ()) if name in form), {})
            own = {key: value for key, value in keys.items() if key != "like"}
            keys_by_name[name] = {**keys_by_name.get(name, {}), **liked, **common, **own}
    return keys_by_name


def _parameter(name: str, keys: Mapping[str, Any], reasons: Mapping[str, str]) -> Parameter:
    rest = _status(keys, reasons)
    is_positional = not rest.pop("keyword_only", False)
    type_ = parse_type(rest.pop("type"), rest.pop("min", None), rest.pop("below", None))
    if "expected" in rest:
        type_ = replace(type_, expected=rest.pop("expected"))
    if "default" in rest:
        # TOML has neither None nor members nor objects: the type knows how its default is spelled.
        rest["default"] = type_.default_of(rest["default"])
    earlier = sorted(rest.pop("earlier", {}).items(), key=lambda item: release_number(item[0]))
    return Parameter(
        name=name,
        type=type_,
        is_positional=is_positional,
        aliases=tuple(rest.pop("aliases", ())),
        earlier_defaults=tuple((until, type_.default_of(value)) for until, value in earlier),
        **rest,
    )


def _status(keys: Mapping[str, Any], reasons: Mapping[str, str]) -> dict[str, Any]:
    """Return `keys` with ``status`` and ``why`` for ``ignored`` or ``rejected``."""
    rest = dict(keys)
    for status in (Status.IGNORED, Status.REJECTED):
        why = rest.pop(status.value, None)
        if why is not None:
            rest |= {"status": status, "why": reasons.get(why, why)}
    return rest
