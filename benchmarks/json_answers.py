"""The other end of `json_process`: reads commands, answers them. Standard library alone, as each side has its own."""

from __future__ import annotations

import json
import os
import sys
from typing import IO, Any


def open_answers() -> IO[str]:
    """Return the pipe for answers; what libraries print goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(worker: object, version: str, answers: IO[str]) -> None:
    """Tell the version, then answer each line by the method of `worker` that it names, until there are no more."""
    _answer(answers, version)
    for line in sys.stdin:
        command = json.loads(line)
        _answer(answers, getattr(worker, command.pop("do"))(**command))


def _answer(answers: IO[str], value: Any) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()
