"""Launches on the device where tensors are: Triton launches on the current one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
Result = TypeVar("Result")


def on_its_device(launcher: Callable[P, Result]) -> Callable[P, Result]:
    """`launcher` with the device of its first argument, a tensor, as the current one; as it is on the CPU."""

    @functools.wraps(launcher)
    def there(*args: P.args, **kwargs: P.kwargs) -> Result:
        with torch.cuda.device_of(args[0]):  # type: ignore[no-untyped-call]
            return launcher(*args, **kwargs)

    return there
