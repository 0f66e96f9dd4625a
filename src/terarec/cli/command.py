"""A command is a frozen dataclass of options and a function that takes them.

A train command has a dozen options; a dataclass holds them under their names and types, where a function of a dozen
parameters would repeat them. `Lazy` lists a command without loading it, so that ``terarec --help`` loads none.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from terarec.errors import ConfigError

if TYPE_CHECKING:
    from terarec.cli.options import OptionGroup

_JSON = Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object in the last line of stdout.")]


class Command(TyperCommand):
    """A command that rejects an option given twice, unless it takes several values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Typer's, which would take the last value silently."""
        reject_repeated(self, ctx, args)
        return super().parse_args(ctx, args)


class Group(TyperGroup):
    """A group of commands that rejects a repeated option as `Command` does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Typer's, which would take the last value silently."""
        reject_repeated(self, ctx, args)
        return super().parse_args(ctx, args)


def reject_repeated(command: Any, ctx: Any, args: Sequence[str]) -> None:
    """Raise if an option of one value is given several times.

    Raises:
        ConfigError: Names the option.
    """
    if not args or ctx.resilient_parsing:  # a shell completes a line that is not complete
        return
    _, _, given = command.make_parser(ctx).parse_args(args=list(args))
    for parameter, times in Counter(given).items():
        if times > 1 and parameter.param_type_name == "option" and not parameter.multiple and not parameter.count:
            raise ConfigError(parameter.opts[0], f"got it {times} times, expected it once")


class Lazy(Command):
    """A command in a list of commands; the module of its function is imported when it is called.

    Args:
        name: Name of the command.
        target: Its function below `terarec.cli`, as "module:function".
        summary: Its line in the list, and the head of its own help.
        panel: Heading in the list.
        describes: Names of further specs whose fields the options describe; an error in such a field names the option.
    """

    def __init__(
        self, name: str, target: str, summary: str, *, panel: str | None = None, describes: Sequence[str] = ()
    ) -> None:
        super().__init__(name, help=summary, rich_help_panel=panel)
        self._target = target
        self._describes = describes

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse `args` as those of the loaded command."""
        return self.load().make_context(info_name, args, parent=parent, **extra)

    def load(self) -> Any:
        """Import the function and make it a command; the dataclass of its first parameter declares the options."""
        module, _, function = self._target.partition(":")
        body = getattr(importlib.import_module(f"terarec.cli.{module}"), function)
        return _built(self.name or "", body, self.help or "", self._describes)


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The options of a command, from the dataclass that declares them.

    Attributes:
        type: The dataclass.
        parameters: Options by the field that they belong to: one, or those of an `OptionGroup`.
        groups: The fields of several options, and their types.
    """

    type: Any
    parameters: Mapping[str, Sequence[inspect.Parameter]]
    groups: Mapping[str, tuple[OptionGroup, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, options_type: Any) -> _Options:
        parameters: dict[str, list[inspect.Parameter]] = {}
        groups: dict[str, tuple[OptionGroup, Any]] = {}
        hints = typing.get_type_hints(options_type, include_extras=True)
        for item in dataclasses.fields(options_type):
            inner, *marks = typing.get_args(hints[item.name])
            group = next((mark for mark in marks if hasattr(mark, "parameters")), None)
            if group is not None:
                groups[item.name] = (group, inner)
                parameters[item.name] = group.parameters(inner)
                continue
            default = inspect.Parameter.empty if item.default is dataclasses.MISSING else item.default
            parameters[item.name] = [
                inspect.Parameter(
                    item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[item.name]
                )
            ]
        return cls(type=options_type, parameters=parameters, groups=groups)

    def value(self, values: Mapping[str, Any]) -> Any:
        """Build the dataclass from the values of all options."""
        held = {name: values[name] for name in self.parameters if name not in self.groups}
        for name, (group, hint) in self.groups.items():
            held[name] = group.value(hint, {option.name: values[option.name] for option in self.parameters[name]})
        return self.type(**held)

    @property
    def described(self) -> set[str]:
        """Names of the specs that groups of options build."""
        return {hint.__name__ for _, hint in self.groups.values() if isinstance(hint, type)}


def _built(name: str, body: Callable[..., None], summary: str, describes: Sequence[str]) -> Any:
    from terarec.cli.show import Show
    from terarec.spec import FieldError

    options = _Options.of(next(iter(typing.get_type_hints(body).values())))
    parameters = [parameter for group in options.parameters.values() for parameter in group]
    names = {parameter.name: _typed(parameter) for parameter in parameters}
    defaults = {parameter.name: parameter.default for parameter in parameters}
    known = {"", *describes, *options.described}

    def run(**values: Any) -> None:
        show = Show(as_json=values.pop("json"))
        try:
            body(options.value(values), show)
        except FieldError as error:
            if error.owner not in known:
                raise
            place = names.get(error.field, error.field)
            raise ConfigError(place, error.problem) from error
        except ConfigError as error:
            # An argument of this name may come from another option where this one was not given.
            if type(error) is not ConfigError or values.get(error.where) == defaults.get(error.where):
                raise
            raise ConfigError(names[error.where], error.problem) from error

    json_flag = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_JSON)
    # Typer learns the options from the signature, which stands in for one parameter a field.
    run.__signature__ = inspect.Signature([*parameters, json_flag])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*parameters, json_flag]}
    app = typer.Typer(add_completion=False)
    app.command(name, cls=Command, help=summary)(run)
    return typer.main.get_command(app)


def _typed(parameter: inspect.Parameter) -> str:
    """Return the option as the user types it."""
    declared = typing.get_args(parameter.annotation)[1]
    # Inside Annotated, Typer keeps the first of the declared names where a default would be.
    words = (declared.default, *(declared.param_decls or ()))
    flags = [word for word in words if isinstance(word, str) and word.startswith("--")]
    if flags:
        return flags[0].partition("/")[0]
    is_argument = isinstance(declared, typer.models.ArgumentInfo)
    return str(declared.metavar) if is_argument else f"--{parameter.name.replace('_', '-')}"
