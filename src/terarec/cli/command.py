"""A command is a frozen dataclass of options and a function that takes them.

A train command has a dozen options; a dataclass holds them under their names and types, where a function of a dozen
parameters would repeat them. `add` gives every command its ``--json``.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from terarec.cli.show import Show

Options = TypeVar("Options")

_JSON = Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object in the last line of stdout.")]


def add(group: typer.Typer, name: str, body: Callable[[Options, Show], None], *, panel: str | None = None) -> None:
    """Make `body` the command `name` of `group`; its first parameter's dataclass declares the options.

    The first paragraph of the body's docstring is the command's line in the table of contents.
    """
    options_type: Any = next(iter(typing.get_type_hints(body).values()))

    def run(**values: Any) -> None:
        show = Show(as_json=values.pop("json"))
        body(options_type(**values), show)

    parameters = [_parameter(field, hint) for field, hint in _fields(options_type)]
    json_flag = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_JSON)
    run.__signature__ = inspect.Signature([*parameters, json_flag])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*parameters, json_flag]}
    run.__doc__ = body.__doc__
    group.command(name, rich_help_panel=panel)(run)


def _fields(options_type: Any) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(options_type, include_extras=True)
    return [(field, hints[field.name]) for field in dataclasses.fields(options_type)]


def _parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
