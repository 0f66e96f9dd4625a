# SPDX-License-Identifier: Apache-2.0
"""`CurrentWeights`: the weights that a session scores with, which batches pin while they use them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from terarec.formats.delta import StateId
from terarec.nn.objectives import Objective, build_objective
from terarec.serve.record_inputs import RecordInputs
from terarec.spec import RunSpec

if TYPE_CHECKING:
    from terarec.serve.executors import Programs


@dataclass(kw_only=True, slots=True, eq=False)
class SessionWeights:
    """Layers, lookups of rows, ids and scores of one state of a model.

    All but `programs` stay as they are; those may come later, and compute the same.

    Attributes:
        model: The model in the numbers of the session.
        inputs: Encodes raw records with the ids that the model was trained on.
        trained: The model in the numbers of the training, of which later weights make others; `model` where both agree.
        run: Description of the run; its calibration of the scores is one for these weights.
        step: Training steps of the weights.
        state: Id of the checkpoint; None where none is known.
        programs: The dense part in executors; None for eager torch.
        objective: The objective of `run`, which makes scores of logits.
    """

    model: nn.Module
    trained: nn.Module
    inputs: RecordInputs
    run: RunSpec
    step: int
    state: StateId | None = None
    programs: Programs | None = None
    objective: Objective = field(init=False)

    def __post_init__(self) -> None:
        self.objective = build_objective(self.run.objective)


class CurrentWeights:
    """The weights that new batches use. Replacing them waits for the batches that use the former ones.

    So a batch has layers and rows of one state, and what only the former state needs can be changed afterwards.

    Attributes:
        current: The weights of the next batch.
    """

    def __init__(self, weights: SessionWeights) -> None:
        self.current = weights
        # Guards `_pins`, and `current` together with it: weights that were replaced get no more pins.
        self._changed = threading.Condition()
        # Batches under way for each of the weights that has any; two or more while they are replaced.
        self._pins: dict[SessionWeights, int] = {}

    @contextmanager
    def pinned(self) -> Iterator[SessionWeights]:
        """Use the current weights: until the end, what they need stays as it is. The calling thread replaces none."""
        with self._changed:
            weights = self.current
            self._pins[weights] = self._pins.get(weights, 0) + 1
        try:
            yield weights
        finally:
            with self._changed:
                self._pins[weights] -= 1
                if not self._pins[weights]:
                    del self._pins[weights]
                    if weights is not self.current:
                        self._changed.notify_all()

    def replace(self, weights: SessionWeights) -> None:
        """Let new batches use other weights, and wait until no batch uses the former ones."""
        with self._changed:
            former, self.current = self.current, weights
            self._changed.wait_for(lambda: former not in self._pins)
