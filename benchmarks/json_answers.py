# SPDX-License-Identifier: Apache-2.0
"""Read and answer the commands of `json_process`. It imports only the standard library, as sides differ in packages."""

from __future__ import annotations

import json
import os
import sys
from typing import IO, Any


def open_answers() -> IO[str]:
    """Return the pipe for answers, and redirect what libraries print to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(worker: object, version: str, answers: IO[str]) -> None:
    """Send the version, then answer each line by the method of `worker` that it names, until the input ends."""
    _answer(answers, version)
    for line in sys.stdin:
        command = json.loads(line)
        _answer(answers, getattr(worker, command.pop("do"))(**command))


def _answer(answers: IO[str], value: Any) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()
