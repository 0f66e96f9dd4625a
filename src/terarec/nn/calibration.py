# SPDX-License-Identifier: Apache-2.0
"""Calibrated probabilities of logits, of operations that every export has."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from terarec.spec.calibration import CalibrationSpec, IsotonicSpec, TemperatureSpec

_LEAST = 1e-6
"""Least distance of an isotonic probability from 0 and 1 where its logit is read."""


class ScoreCalibration(Protocol):
    """Corrects the probabilities of a model with L labels."""

    def logits(self, logits: Tensor) -> Tensor:
        """Return the logits of the calibrated probabilities of logits float32[B, L]."""

    def scores(self, logits: Tensor) -> Tensor:
        """Return the calibrated probabilities float32[B, L] of logits float32[B, L]."""


def build_calibration(spec: CalibrationSpec) -> ScoreCalibration:
    """Return the calibration that `spec` describes."""
    return _Isotonic(spec) if isinstance(spec, IsotonicSpec) else _Temperature(spec)


class _Temperature:
    def __init__(self, spec: TemperatureSpec) -> None:
        self._factors = 1.0 / torch.tensor(spec.temperatures)

    def logits(self, logits: Tensor) -> Tensor:
        return logits * self._factors.to(logits.device)

    def scores(self, logits: Tensor) -> Tensor:
        return self.logits(logits).sigmoid()


class _Isotonic:
    """Straight lines between points: the first value, and the steps up to each probability added up."""

    def __init__(self, spec: IsotonicSpec) -> None:
        most = max(map(len, spec.scores))
        # Lists as long as the longest one: its last point again adds nothing.
        scores, values = (
            torch.tensor([[*numbers, *numbers[-1:] * (most - len(numbers))] for numbers in lists], dtype=torch.float64)
            for lists in (spec.scores, spec.values)
        )
        widths = scores.diff()
        slopes = torch.where(widths > 0.0, values.diff() / widths, 0.0)
        self._lines = [part.float() for part in (values[:, 0], scores[:, :-1], widths, slopes)]

    def logits(self, logits: Tensor) -> Tensor:
        return torch.logit(self.scores(logits), eps=_LEAST)

    def scores(self, logits: Tensor) -> Tensor:
        first, starts, widths, slopes = (part.to(logits.device) for part in self._lines)
        passed = (logits.sigmoid().unsqueeze(2) - starts).clamp_min(0.0).minimum(widths)
        return first + (passed * slopes).sum(2)
