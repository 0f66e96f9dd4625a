# SPDX-License-Identifier: Apache-2.0
"""What the cases that compare a device with the CPU share; `tests.device_cases` has all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

CPU = torch.device("cpu")
Case = Callable[[torch.device], None]
"""Raises unless what it tries gives on a device what it gives on the CPU."""


def keep_in(cases: dict[str, Case]) -> Callable[[Case], Case]:
    """Return a decorator that puts a function into `cases` by its name, in words."""

    def kept(function: Case) -> Case:
        cases[function.__name__.replace("_", " ")] = function
        return function

    return kept


def assert_on(device: torch.device, *tensors: torch.Tensor) -> None:
    """Raise unless all `tensors` are on `device`."""
    assert {tensor.device.type for tensor in tensors} == {device.type}


def assert_near(found: Any, expected: Any, *, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Raise unless tensors, numbers, or mappings of them are equal but for rounding, wherever they are."""
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_near(found[name], value, rtol=rtol, atol=atol)
        return
    found, expected = (value.cpu() if isinstance(value, torch.Tensor) else value for value in (found, expected))
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Raise unless tensors by name are equal to the bit, wherever they are."""
    assert found.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(found[name].cpu(), tensor.cpu())]
    assert different == []
