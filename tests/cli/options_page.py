# SPDX-License-Identifier: Apache-2.0
"""The option tables of docs/cli.md, from the commands; ``python -m tests.cli.options_page`` writes them."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.marked_page import with_marked

from terarec.cli.app import command_line
from terarec.cli.train import SETTINGS
from terarec.spec import RunSpec
from terarec.spec.codec import present, words_of
from tests.cli.conftest import commands

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
BEGIN = "<!-- options of {}: written by python -m tests.cli.options_page -->"
END = "<!-- end of the options of {} -->"
SHARING = ("terarec", "terarec generate", "terarec prepare")
"""Groups whose commands have options in common, which get a table of their own."""
_PLACEHOLDERS = {int: "N", float: "X", Path: "PATH"}


def page_with_tables(text: str) -> str:
    """Return the page with the tables of all commands between their marks."""
    for name, table in tables().items():
        text = with_marked(text, BEGIN.format(name), END.format(name), table)
    return text


def tables() -> dict[str, str]:
    """Return the Markdown of each table: by the command, or by ``every GROUP`` for what its commands have in common."""
    root = command_line()
    found = {"terarec": _table(root, root.params)}
    found |= _group_tables(root, "terarec", frozenset())
    return {name: table for name, table in found.items() if table}


def _group_tables(group: Any, name: str, shared: frozenset[tuple[str, ...]]) -> dict[str, str]:
    found = {}
    if name in SHARING:
        first, *_ = members = list(leaves(commands(group)))
        common = set.intersection(*({row(leaf, option) for option in leaf.params} for leaf in members)) - shared
        found[f"every {name}"] = _table(first, (option for option in first.params if row(first, option) in common))
        shared |= common
    for word, command in commands(group).items():
        full_name = f"{name} {word}"
        if hasattr(command, "commands"):
            found |= _group_tables(command, full_name, shared)
        else:
            own = [option for option in command.params if row(command, option) not in shared]
            fields = fields_of_runs() if full_name == "terarec train" else None
            found[full_name] = _table(command, own, fields)
    return found


def leaves(found: Mapping[str, Any]) -> Iterator[Any]:
    """Yield commands, and in place of a group its commands."""
    for command in found.values():
        yield from leaves(commands(command)) if hasattr(command, "commands") else (command,)


def fields_of_runs() -> dict[str, str]:
    """Return the option of ``terarec train`` -> the path of the field of a run that it sets."""
    return {field.name: field.name for field in dataclasses.fields(RunSpec)} | {
        name: setting.path for name, setting in SETTINGS.items()
    }


def _table(command: Any, options: Iterable[Any], fields: Mapping[str, str] | None = None) -> str:
    """Return the table of the options, without columns that are empty."""
    rows = [row(command, option, fields) for option in options]
    if not rows:
        return ""
    chosen = [column for column in range(len(COLUMNS)) if any(row[column] for row in rows)]
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(line[column] for column in chosen)} |" for line in lines)


COLUMNS = ("option", "field of the run", "default", "meaning")


def row(command: Any, option: Any, fields: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the cells of an option or an argument, one for each of `COLUMNS`."""
    field = f"`{fields[option.name]}`" if fields is not None and option.name in fields else ""
    return _name(command, option), field, _default(option), _meaning(option)


def _name(command: Any, option: Any) -> str:
    if option.param_type_name == "argument":
        return _code(option.metavar)
    words = [*option.opts, *option.secondary_opts]
    if not option.is_flag:
        words[-1] += f" {option.metavar or _placeholder(command, option)}"
    return ", ".join(map(_code, words))


def _placeholder(command: Any, option: Any) -> str:
    # Of the function, since versions of Typer differ in what their options know of a type.
    hint = present(typing.get_args(inspect.signature(command.callback).parameters[option.name].annotation)[0])
    hint = typing.get_args(hint)[0] if typing.get_origin(hint) is list else hint
    return "|".join(map(str, words_of(hint))) or _PLACEHOLDERS.get(hint) or option.name.rpartition("_")[2].upper()


def _default(option: Any) -> str:
    if option.required:
        return "required"
    shown = option.show_default if isinstance(option.show_default, str) else option.default
    is_flag = getattr(option, "is_flag", False)  # an argument has no such attribute
    return "" if is_flag or shown in (None, "") else _code(shown)


def _meaning(option: Any) -> str:
    # The help has no marks of code. A cell is no sentence, but a list may go on: "day_0.tsv, ...".
    text = re.sub(r"(?<![\w/-])--[a-z][a-z-]*", r"`\g<0>`", option.help).replace("|", "\\|")
    return text if text.endswith("...") else text.removesuffix(".")


def _code(text: object) -> str:
    return "`" + str(text).replace("|", "\\|") + "`"


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text()))
