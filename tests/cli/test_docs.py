# SPDX-License-Identifier: Apache-2.0
"""docs/cli.md has the options of the commands, and names every figure."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli import options_page
from tests.cli.conftest import Workshop, commands, figures

PAGE = options_page.PAGE.read_text()


def test_the_options_on_the_page_are_those_of_the_commands() -> None:
    # Marks for every command, and none of a command that is gone.
    assert sorted(re.findall("<!-- options of (.*): written by", PAGE)) == sorted(options_page.tables())
    assert options_page.page_with_tables(PAGE) == PAGE, "run: python -m tests.cli.options_page"


def test_a_table_has_the_placeholder_the_default_and_the_meaning_of_an_option() -> None:
    tables = options_page.tables()
    assert "| `--days N` | `1` | Number of files: day_0.tsv, day_1.tsv, ... |" in tables["terarec generate criteo"]
    assert "| `FILES...` | required | Files, directories, patterns" in tables["terarec prepare csv"]
    assert "| `--batch-norm`, `--no-batch-norm` | `model.batch_norm` |  | Whether" in tables["terarec train"]
    assert "| `--to`, `--stream URL\\|FILE` | required |" in tables["terarec publish"]
    # Once for all commands.
    assert [name for name, table in tables.items() if "`--json`" in table] == ["every terarec"]


def test_the_help_says_which_options_are_repeatable() -> None:
    found = [option for command in options_page.leaves(commands()) for option in command.params]
    options = [option for option in found if option.param_type_name == "option"]
    assert [option.name for option in options if option.multiple != ("repeatable" in option.help)] == []


def unnamed(reported: dict[str, Any], command: str) -> set[str]:
    """The figures that a command reported and its section does not name."""
    section = PAGE.split(f"## terarec {command}")[1].split("\n## ")[0]
    return {name for name in reported if f"`{name}`" not in section}


@pytest.mark.parametrize(
    "command", ["generate", "prepare", "convert", "train", "evaluate", "predict", "inspect", "doctor"]
)
def test_every_figure_is_on_the_page(workshop: Workshop, tmp_path: Path, command: str) -> None:
    reported = {
        "generate": lambda: workshop.generated,
        "prepare": lambda: workshop.prepared,
        "convert": lambda: {
            **figures("convert", workshop.data, "--to", "norm", "--out", tmp_path / "norm"),
            **figures("convert", tmp_path / "norm", "--to", "dataset", "--out", tmp_path / "again"),
        },
        "train": lambda: workshop.trained,
        "evaluate": lambda: figures("evaluate", workshop.run, "--data", workshop.data),
        "predict": lambda: figures("predict", workshop.run, "--data", workshop.data, "--out", tmp_path / "s.parquet"),
        "inspect": lambda: {
            **figures("inspect", workshop.data),
            **figures("inspect", workshop.data, "--column", "C1"),
            **figures("inspect", workshop.data, "--column", "I1"),
            **figures("inspect", workshop.run),
            **figures("inspect", workshop.run, "--table", "C1"),
        },
        "doctor": lambda: figures("doctor"),
    }[command]()
    assert unnamed(reported, command) == set()
