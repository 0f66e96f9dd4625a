# SPDX-License-Identifier: Apache-2.0
"""An option that is given twice accumulates, or is rejected in one line; the last value is never taken silently."""

from pathlib import Path
from typing import Any

import pytest

from terarec.cli.app import command_line
from terarec.errors import ConfigError
from terarec.spec.checks import FieldError
from tests.cli.conftest import commands, rejected, terarec
from tests.params import in_every_run


def options() -> list[tuple[tuple[str, ...], Any]]:
    """All options of all commands, with the words that lead to them."""
    found: list[tuple[tuple[str, ...], Any]] = []

    def walk(command: Any, words: tuple[str, ...]) -> None:
        found.extend((words, option) for option in command.params if option.param_type_name == "option")
        for word, inner in (commands(command) if hasattr(command, "commands") else {}).items():
            walk(inner, (*words, word))

    walk(command_line(), ())
    return found


SINGLE = [(words, option) for words, option in options() if not option.multiple and not option.is_eager]
FIRST = dict(reversed(SINGLE))
"""An option of each command: the rule is one for all of them."""


@pytest.mark.parametrize(
    ("words", "option"),
    in_every_run(list(FIRST.items()), SINGLE),
    ids=[f"{' '.join(words)} {option.opts[0]}" for words, option in SINGLE],
)
def test_an_option_of_one_value_is_rejected_twice(words: tuple[str, ...], option: Any) -> None:
    assert not option.count
    word = option.opts[0]
    value = [] if option.is_flag else ["1"]
    ended = terarec(*words, word, *value, word, *value)
    assert ended.code == 2
    assert ended.err == f"terarec: error: {word}: got it 2 times, expected it once\n"


def test_every_list_that_commas_separate_may_be_repeated() -> None:
    lists = {option.opts[0] for words, option in options() if words == ("prepare", "csv") and option.multiple}
    separated = {
        "--dense",
        "--log",
        "--categorical",
        "--ids",
        "--buckets",
        "--keys",
        "--metadata",
        "--positive",
        "--names",
        "--missing",
    }
    assert lists == separated | {"--valid", "--test", "--conf"}


def test_repeated_columns_accumulate(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("y,a,b,c,d,e\n" + "no,1,2,x,NULL,1\nyes,2,4,z,?,2\nwell,3,5,x,q,3\n")
    columns = ["--dense", "a", "--dense", "b", "--categorical", "c", "--categorical", "d", "--buckets", "e=2"]
    columns += ["--metadata", "a", "--metadata", "c,e"]
    marks = ["--missing", "NULL", "--missing", "?", "--positive", "yes", "--positive", "well"]
    ended = terarec("prepare", "csv", table, "--out", tmp_path / "d", "--label", "y", *columns, *marks, "--json")
    assert ended.code == 0, ended.err
    assert [column["name"] for column in ended.figures["columns"]] == [
        *("y", "a", "b", "c", "d", "e_bucket"),
        *("a", "c", "e"),  # metadata
    ]
    assert next(column["missing"] for column in ended.figures["inputs"] if column["name"] == "d") == 2


@pytest.mark.parametrize(
    ("arguments", "error", "where", "problem"),
    [
        (["--buckets", "a=2", "--buckets", "a=3"], ConfigError, "--buckets", "got 'a' twice"),
        (["--dense", "a", "--conf", "x=1", "--conf", "x=2"], ConfigError, "--conf", "got 'x' twice"),
        (["--dense", "a", "--dense", "a"], FieldError, "Normalize.columns", "'a'"),
    ],
)
def test_a_name_that_is_given_twice_is_rejected(
    tmp_path: Path, arguments: list[str], error: type, where: str, problem: str
) -> None:
    table = tmp_path / "t.csv"
    table.write_text("y,a\n1,2\n")
    prepare = ["prepare", "csv", table, "--out", tmp_path / "d", "--label", "y"]
    rejected(*prepare, *arguments, error=error, where=where, problem=problem)


def test_a_line_that_a_shell_completes_may_repeat_an_option() -> None:
    with command_line().make_context("terarec", ["train", "--epochs", "1"], resilient_parsing=True) as context:
        train = commands(context.command)["train"]
        train.make_context("train", ["--epochs", "1", "--epochs"], parent=context, resilient_parsing=True)
