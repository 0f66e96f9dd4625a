# SPDX-License-Identifier: Apache-2.0
"""Fixtures that the tests of several ops share."""

from collections.abc import Callable, Iterator

import pytest
import torch

from terarec.kernels.cpu import host
from terarec.ops.onednn import choice_and_range


@pytest.fixture
def select() -> Iterator[Callable[[str], None]]:
    """Takes an instruction set for the rest of a test."""
    yield host.select
    host.select("auto")


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Takes oneDNN whatever the processor."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setenv("TERAREC_LINEAR", "onednn")
    choice_and_range.cache_clear()
    yield
    choice_and_range.cache_clear()
