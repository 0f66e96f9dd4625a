# SPDX-License-Identifier: Apache-2.0
"""A model that scores when it is let, so that requests are in flight while a test looks."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from terarec.serve import InferenceSession
from terarec.serve.models import ServedModels
from terarec.serve.served_model import ServedModel
from terarec.spec.serving_options import ServedModelOptions
from tests.waiting import PATIENCE


class Gate:
    """Holds batches back until it is opened.

    Attributes:
        num_batches: Batches that have arrived.
    """

    def __init__(self) -> None:
        self.num_batches = 0
        self._is_open = threading.Event()

    def pass_through(self) -> None:
        self.num_batches += 1
        assert self._is_open.wait(PATIENCE)

    def open(self) -> None:
        """Let all batches through from now on."""
        self._is_open.set()


@contextmanager
def held_models(
    run: Path, options: ServedModelOptions, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ServedModels, Gate]]:
    """Give a model whose batches are held back until the gate is opened, at the latest at the end."""
    gate, score = Gate(), InferenceSession.scored_records

    def held(session: InferenceSession, encode: Any) -> Any:
        gate.pass_through()
        return score(session, encode)

    monkeypatch.setattr(InferenceSession, "scored_records", held)
    with ServedModels() as models:
        models.install(ServedModel(InferenceSession.open(run), options, name="dlrm"))
        try:
            yield models, gate
        finally:
            gate.open()
