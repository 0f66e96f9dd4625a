# SPDX-License-Identifier: Apache-2.0
"""Rows in a file that processes map."""

import shutil
from pathlib import Path

import pytest
import torch

from terarec.errors import NoSpaceError
from terarec.memory.shared import mapped_rows
from tests.errors import at


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_those_that_were_written(dtype: torch.dtype, tmp_path: Path) -> None:
    rows = torch.randn(7, 3).to(dtype)
    first = mapped_rows(rows, tmp_path / "rows")
    second = mapped_rows(torch.zeros(7, 3, dtype=dtype), tmp_path / "rows")  # which is read and not written
    assert torch.equal(first, rows)
    assert torch.equal(second, rows)
    first.zero_()
    assert torch.equal(second, rows)
    (tmp_path / "rows").unlink()
    assert torch.equal(second, rows)


def test_a_file_system_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: used._replace(free=83))
    with pytest.raises(NoSpaceError, check=at(tmp_path, "84 bytes requested, 83 available")):
        mapped_rows(torch.zeros(7, 3), tmp_path / "rows")
    assert list(tmp_path.iterdir()) == []
