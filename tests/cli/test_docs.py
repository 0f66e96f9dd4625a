"""docs/cli.md names every option and every figure."""

import re
from pathlib import Path
from typing import Any

import pytest

from terarec.cli.app import command_line
from tests.cli.conftest import Workshop, figures
from tests.cli.test_options import listed

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


def test_every_option_is_on_the_page() -> None:
    words = {word for line in listed(command_line(), "terarec") for word in line.split() if word.startswith("--")}
    assert {word for word in words if not re.search(rf"`[^`]*{word}\b", PAGE)} == set()


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
