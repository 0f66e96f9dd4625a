"""Tables of bfloat16 and float16 rows behind the store protocol."""

import pytest
import torch

from terarec.errors import StorageError
from terarec.spec import TableSpec
from terarec.spec.table import RowType
from terarec.storage import Arena, Rows, StaticTable, static_tables

NARROW: list[RowType] = ["bfloat16", "float16"]


def tables(dtype: RowType, seed: int = 1) -> list[StaticTable]:
    return static_tables(
        Arena([TableSpec(name=name, rows=rows, width=6, dtype=dtype) for name, rows in (("a", 5), ("b", 9))], seed=seed)
    )


@pytest.mark.parametrize("dtype", NARROW)
def test_rows_leave_and_come_back_in_their_type(dtype: RowType) -> None:
    source, target = tables(dtype, seed=1)[1], tables(dtype, seed=2)[1]
    assert source.memory_bytes == 9 * 6 * 2
    for chunk in source.export_chunks(4):
        assert chunk.weights.dtype == getattr(torch, dtype)
        target.import_(chunk)
    assert torch.equal(target.weights, source.weights)
    keys = torch.tensor([7, 2])
    target.import_(Rows(keys=keys, weights=torch.ones(2, 6, dtype=target.weights.dtype)))
    assert torch.equal(target.export(keys).weights, torch.ones(2, 6, dtype=target.weights.dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_rows_of_another_type_are_refused(dtype: RowType) -> None:
    table = tables(dtype)[0]
    before = table.weights.clone()
    with pytest.raises(StorageError, match=rf"'a': got weights torch.float32\[1, 6\], expected torch.{dtype}\[1, 6\]"):
        table.import_(Rows(keys=torch.tensor([3]), weights=torch.ones(1, 6)))
    assert torch.equal(table.weights, before)
