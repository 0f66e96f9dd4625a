# SPDX-License-Identifier: Apache-2.0
"""Two data sets, byte by byte."""

from __future__ import annotations

from pathlib import Path

from terarec.formats import read_dataset
from tests.etl.engine.contents import contents


def assert_same(spark: Path, local: Path) -> None:
    """The same shards, workflow and states."""
    found, expected = contents(spark), contents(local)
    assert found.keys() == expected.keys()
    differing = [name for name in expected if found[name] != expected[name]]
    assert not differing, differing
    dataset = read_dataset(local)
    assert any(dataset.num_rows(split) for split in dataset.splits)
