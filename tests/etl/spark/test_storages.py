# SPDX-License-Identifier: Apache-2.0
"""Storages other than Parquet, which `test_engine` has."""

from __future__ import annotations

from pathlib import Path

import pytest

from terarec.etl import prepare
from terarec.spec import PrepareOptions
from terarec.spec.preparation import STORAGES
from tests.etl.engine.logs import shop_files
from tests.etl.spark.conftest import on_spark
from tests.etl.spark.fixed_width import data_files, fixed_width

pytestmark = [pytest.mark.usefixtures("spark"), pytest.mark.slow]


@pytest.mark.parametrize("storage", [storage for storage in STORAGES if storage != "parquet"])
def test_files_of_a_storage_are_the_same(tmp_path: Path, storage: str) -> None:
    log = shop_files(tmp_path / "raw")
    workflow = fixed_width("user", "item", *(() if storage in ("hugectr_raw", "hugectr_raw_async") else ("seen",)))
    options = PrepareOptions(storage=storage, rows_per_shard=100, shuffle=True)  # type: ignore[arg-type]
    prepare(workflow, log, tmp_path / "local", options)
    prepare(workflow, log, tmp_path / "spark", on_spark(options))
    assert data_files(tmp_path / "spark") == data_files(tmp_path / "local")
