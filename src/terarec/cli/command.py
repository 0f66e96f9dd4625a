"""A command is a frozen dataclass of options and a function that takes them.

A train command has a dozen options; a dataclass holds them under their names and types, where a function of a dozen
parameters would repeat them. `add` gives every command its ``--json``.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from terarec.cli.show import Show
from terarec.errors import ConfigError
from terarec.spec import FieldError

Options = TypeVar("Options")

_JSON = Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object in the last line of stdout.")]


class Command(TyperCommand):
    """A command that refuses an option which is given twice, unless it takes several values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Typer's, which would take the last value silently."""
        refuse_repeated(self, ctx, args)
        return super().parse_args(ctx, args)


class Group(TyperGroup):
    """A group of commands that refuses a repeated option as `Command` does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Typer's, which would take the last value silently."""
        refuse_repeated(self, ctx, args)
        return super().parse_args(ctx, args)


def refuse_repeated(command: Any, ctx: Any, args: Sequence[str]) -> None:
    """Raise if an option of one value is given several times.

    Raises:
        ConfigError: names the option.
    """
    if not args or ctx.resilient_parsing:  # shells complete lines that are not whole yet
        return
    _, _, given = command.make_parser(ctx).parse_args(args=list(args))
    for parameter, times in Counter(given).items():
        if times > 1 and parameter.param_type_name == "option" and not parameter.multiple and not parameter.count:
            raise ConfigError(f"{parameter.opts[0]}: got it {times} times, expected it once")


def comma_separated(texts: Sequence[str] | None) -> tuple[str, ...]:
    """The words of an option ``A,B,...`` that may be repeated."""
    return tuple(word.strip() for text in texts or () if text for word in text.split(","))


def add(
    group: typer.Typer,
    name: str,
    body: Callable[[Options, Show], None],
    *,
    panel: str | None = None,
    describes: Sequence[str] = (),
) -> None:
    """Make `body` the command `name` of `group`; its first parameter's dataclass declares the options.

    The first paragraph of the body's docstring is the command's line in the table of contents.

    Args:
        group: the application or a group of commands.
        name: of the command.
        body: see above.
        panel: under which the table of contents lists it.
        describes: names of the specs that the options describe; an error in a field of theirs names the option.
    """
    options_type: Any = next(iter(typing.get_type_hints(body).values()))

    names = {field.name: _name(field.name, hint) for field, hint in _fields(options_type)}

    def run(**values: Any) -> None:
        show = Show(as_json=values.pop("json"))
        try:
            body(options_type(**values), show)
        except FieldError as error:
            if error.owner and error.owner not in describes:
                raise
            place = names.get(error.field, error.field)
            raise ConfigError(f"{place}: {error.problem}" if place else error.problem) from error

    parameters = [_parameter(field, hint) for field, hint in _fields(options_type)]
    json_flag = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_JSON)
    run.__signature__ = inspect.Signature([*parameters, json_flag])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*parameters, json_flag]}
    run.__doc__ = body.__doc__
    group.command(name, cls=Command, rich_help_panel=panel)(run)


def _fields(options_type: Any) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(options_type, include_extras=True)
    return [(field, hints[field.name]) for field in dataclasses.fields(options_type)]


def _parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _name(field: str, hint: Any) -> str:
    """What the user types for the option `field`."""
    told = typing.get_args(hint)[1]
    # Inside Annotated, Typer keeps the first of the declared names where a default would be.
    words = (told.default, *(told.param_decls or ()))
    declared = [word for word in words if isinstance(word, str) and word.startswith("--")]
    if declared:
        return str(declared[0])
    return str(told.metavar) if isinstance(told, typer.models.ArgumentInfo) else f"--{field.replace('_', '-')}"
