"""Ordered rows become the files of the local engine, byte for byte. `test_resume` has them from Spark."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from terarec.etl.engine import prepare
from terarec.formats import read_dataset
from terarec.spec import STORAGES, PrepareOptions
from tests.etl.engine.logs import shop_files
from tests.etl.spark.fixed_width import data_files, fixed_width

pytestmark = pytest.mark.usefixtures("spark")


@pytest.mark.parametrize("storage", [storage for storage in STORAGES if storage != "parquet"])
def test_rows_in_order_become_the_files_of_a_storage(tmp_path: Path, storage: str) -> None:
    from terarec.etl.spark.shards import OrderedRows
    from terarec.etl.spark.storing import store

    log = shop_files(tmp_path / "raw")
    workflow = fixed_width("user", "item", *(() if storage in ("hugectr_raw", "hugectr_raw_async") else ("seen",)))
    options = PrepareOptions(storage=storage, rows_per_shard=100, shuffle=True)  # type: ignore[arg-type]
    prepare(workflow, log, tmp_path / "local", options)
    prepare(workflow, log, tmp_path / "rows", dataclasses.replace(options, storage="parquet"))
    rows = read_dataset(tmp_path / "rows")
    files = {split: tuple(tmp_path / "rows" / shard.file for shard in rows.shards(split)) for split in rows.splits}
    ordered = OrderedRows({split: rows.num_rows(split) for split in rows.splits}, files)
    spec = dataclasses.replace(rows, splits={}, storage="raw" if storage == "raw" else "parquet")
    (tmp_path / "made").mkdir()
    store(ordered, spec, tmp_path / "made", tmp_path / "made", options)
    assert data_files(tmp_path / "made") == data_files(tmp_path / "local")
