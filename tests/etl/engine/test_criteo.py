"""The ready workflow for Criteo's logs gives what the pipeline made for them gives, bit for bit."""

from pathlib import Path

from terarec.etl.criteo import CriteoOptions
from terarec.etl.criteo import prepare as prepare_criteo
from terarec.etl.engine import PrepareOptions, prepare
from terarec.etl.ready import criteo
from terarec.etl.workflow import Workflow
from tests.etl.criteo_lines import random_lines, write
from tests.etl.engine.test_prepare import equal, read_split


def test_every_row_is_equal(tmp_path: Path) -> None:
    log = [write(tmp_path / f"day_{day}.tsv", random_lines(700, seed=day)) for day in range(2)]
    old = prepare_criteo(log, tmp_path / "old", CriteoOptions(min_count=3, valid_fraction=0.1))
    new = prepare(Workflow.of(criteo(min_count=3)), log, tmp_path / "new", PrepareOptions())
    assert new.splits == {"train": old.train_rows, "valid": old.valid_rows}
    for split in new.splits:
        equal(read_split(tmp_path / "old", split), read_split(tmp_path / "new", split))
    rows = {column.name: column.rows for column in new.columns if column.rows is not None}
    assert rows == {column.name: column.rows for column in old.columns}
