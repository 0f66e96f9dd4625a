# SPDX-License-Identifier: Apache-2.0
"""The command line is frozen: an option comes, goes or changes its name only together with options.txt."""

from pathlib import Path
from typing import Any

import pytest

from terarec.cli.app import command_line
from tests.cli.conftest import commands, rejected

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


RECOMMEND = ("recommend", "RUN", "users.csv", "--items", "items.csv", "--key", "item", "--out", "out.csv")


@pytest.mark.parametrize(
    ("command", "option", "problem"),
    [
        (("inspect", "RUN", "--to", "csv"), "--to", "without --export-table"),
        (("inspect", "RUN", "--force"), "--force", "without --export-table"),
        (("inspect", "RUN", "--top", "3"), "--top", "without --table"),
        (("inspect", "RUN", "--export-table", "C1", "--top", "3"), "--top", "with --export-table"),
        (("inspect", "DATA", "--to", "csv"), "--to", "for a data set"),
        (("inspect", "DATA", "--top", "3"), "--top", "without --column"),
        (("inspect", "GRAPH", "--force"), "--force", "for a graph"),
        (("export", "RUN", "--out", "out", "--to", "onnx", "--split", "test"), "--split", "without --data"),
        (("serve", "RUN", "--record-share", "0.5"), "--record-share", "without --record-directory or --drift"),
        (("serve", "RUN", "--drift", "--record-file-bytes", "9"), "--record-file-bytes", "without --record-directory"),
        (("serve", "RUN", "--trace-share", "0.5"), "--trace-share", "without --otlp-endpoint"),
        (("serve", "RUN", "--access-log-share", "0.5"), "--access-log-share", "without --access-log"),
        (("serve", "RUN", "--admin-host", "::1"), "--admin-host", "without --admin-port"),
        (("serve", "RUN", "--grpc-library", "grpcio"), "--grpc-library", "without --grpc-port"),
        ((*RECOMMEND, "--candidates", "9"), "--candidates", "without --ranker"),
        ((*RECOMMEND, "--method", "exact", "--lists", "9"), "--lists", "with --method exact"),
        ((*RECOMMEND, "--method", "exact", "--probes", "9"), "--probes", "with --method exact"),
        ((*RECOMMEND, "--method", "lists", "--exact-items", "9"), "--exact-items", "with --method lists"),
        (("plan", "RUN", "--force"), "--force", "without --out"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_options_without_effect_are_rejected(
    tmp_path: Path, command: tuple[str, ...], option: str, problem: str
) -> None:
    for name, file in (("RUN", "run.json"), ("DATA", "dataset.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    (tmp_path / "GRAPH").write_text("{}")
    rejected(*(tmp_path / word if word.isupper() else word for word in command), where=option, problem=problem)
