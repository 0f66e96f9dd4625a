# SPDX-License-Identifier: Apache-2.0
"""The command line is frozen: an option comes, goes or changes its name only together with options.txt."""

from pathlib import Path
from typing import Any

from terarec.cli.app import command_line
from tests.cli.conftest import commands

FROZEN = Path(__file__).with_name("options.txt")


def listed(command: Any, name: str) -> list[str]:
    if hasattr(command, "commands"):
        own = [f"{name} {'/'.join(option.opts)}" for option in command.params]
        return own + [line for word, inner in commands(command).items() for line in listed(inner, f"{name} {word}")]
    lines = [name]
    for parameter in command.params:
        is_argument = parameter.param_type_name == "argument"
        word = parameter.metavar if is_argument else "/".join(parameter.opts)
        lines.append(f"{name} {word}{' (required)' if parameter.required else ''}")
    return lines


def test_the_options_are_those_on_the_list() -> None:
    assert sorted(listed(command_line(), "terarec")) == FROZEN.read_text().splitlines()
