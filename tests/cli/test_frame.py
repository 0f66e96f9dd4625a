# SPDX-License-Identifier: Apache-2.0

import subprocess
import sys

import pytest

from terarec import __version__
from terarec.cli.app import command_line
from tests.cli.conftest import rejected, terarec
from tests.params import in_every_run

ORDER = [*command_line().commands]
ENTRY = [sys.executable, "-c", "from terarec.cli import main; main()"]


def test_help_reads_like_a_table_of_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ended = terarec("--help")
    assert ended.code == 0
    lines = [line.strip("\u2502 ") for line in ended.out.splitlines()]
    named = [line.split()[0] for line in lines if line and line.split()[0] in ORDER]
    assert named == ORDER
    panels = [line.strip("\u256d\u256e\u2500 ") for line in ended.out.splitlines() if line.startswith("\u256d")]
    assert panels == ["Options", "Data", "Model", "Serving", "Diagnostics"]
    # One line a command: a panel is as high as the commands in it.
    first = lines.index(next(line for line in lines if line.startswith("train")))
    assert [line.split()[0] for line in lines[first : first + 5]] == [*ORDER[ORDER.index("train") :][:5]]


def test_no_command_shows_the_help() -> None:
    assert terarec().out == terarec("--help").out
    assert terarec().code == 0


def test_version() -> None:
    assert terarec("--version").out == f"terarec {__version__}\n"


def test_help_loads_nothing_heavy() -> None:
    code = "import sys; from terarec.cli.app import run; run(['train', '--help']); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "numpy", "pyarrow", "matplotlib", "uvicorn"} & set(out.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("arguments", "where", "line"),
    [
        (["trian"], "", "No such command 'trian'. Did you mean 'train'?; see terarec --help"),
        (["generate", "netflix"], "", "No such command 'netflix'; see terarec generate --help"),
        (["train"], "--out", "Missing option '--out'; see terarec train --help"),
        (["train", "--lr", "1"], "--lr", "(did you mean --dense-lr or --sparse-lr?); see terarec train --help"),
        (["train", "--epoch", "1"], "--epoch", "(did you mean --epochs?); see terarec train --help"),
        (["train", "--bogus", "1"], "--bogus", "No such option: --bogus; see terarec train --help"),
        (["generate", "criteo", "--rows", "many", "--out", "x"], "--rows", "see terarec generate criteo --help"),
        (["generate", "criteo", "--rows", "0", "--out", "x"], "--rows", "see terarec generate criteo --help"),
        (["evaluate"], "RUN", "see terarec evaluate --help"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(arguments: list[str], where: str, line: str) -> None:
    """The lines of usage errors are ours and Click's, and so they are compared as text."""
    assert rejected(*arguments, where=where)["error"].endswith(line)


def test_debug_shows_the_traceback_too(tmp_path) -> None:
    ended = terarec("--debug", "inspect", tmp_path / "none")
    assert ended.code == 1
    assert "Traceback (most recent call last)" in ended.err
    assert ended.err.splitlines()[-1].startswith(f"terarec: error: {tmp_path / 'none'}: no such file or directory")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["train", "-h"],
        pytest.param(["doctor"], marks=pytest.mark.slow),
        pytest.param(["doctor", "--json"], marks=pytest.mark.slow),
    ],
)
def test_a_closed_pipe_is_not_an_error(arguments: list[str]) -> None:
    """``terarec --help | head -1`` ends with 0, in a shell that looks at every command of a pipe."""
    process = subprocess.Popen([*ENTRY, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    reported = process.stderr.read()
    assert process.wait() == 0
    assert reported == b"" or "--json" in arguments  # what people read goes there


def all_commands() -> list[list[str]]:
    found, left = [], [([], command_line())]
    while left:
        words, command = left.pop()
        found.append(words)
        left += [([*words, word], inner) for word, inner in getattr(command, "commands", {}).items()]
    return found


@pytest.mark.parametrize("words", in_every_run([[], ["bench"], ["train"]], all_commands()), ids=" ".join)
def test_h_is_help_of_every_command_and_group(words: list[str]) -> None:
    """D16."""
    short, long = terarec(*words, "-h"), terarec(*words, "--help")
    assert (short.code, short.err) == (0, "")
    assert short.out == long.out
    assert "Usage: terarec" in short.out


def test_the_console_script_exits_with_the_code(tmp_path) -> None:
    ended = subprocess.run([*ENTRY, "inspect", str(tmp_path / "none")], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1
