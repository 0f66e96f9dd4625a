# SPDX-License-Identifier: Apache-2.0
"""Rows in a file that processes map."""

from pathlib import Path

import pytest
import torch

from terarec.memory.mapped_rows import mapped_rows


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
