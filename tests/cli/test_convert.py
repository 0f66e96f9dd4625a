# SPDX-License-Identifier: Apache-2.0
"""``terarec convert`` there and back, and what it rejects."""

from pathlib import Path

from terarec.data import Reader
from terarec.errors import DataNotFoundError
from terarec.formats import read_dataset
from tests.cli.conftest import Workshop, figures, rejected, terarec
from tests.data.sources import assert_same_batches
from tests.formats.samples import METADATA, make_block, make_spec, write_split


def test_there_and_back(workshop: Workshop, tmp_path: Path) -> None:
    made = figures("convert", workshop.data, "--to", "norm", "--out", tmp_path / "norm", "--keysets", "--key-bytes", 8)
    assert (made["kind"], made["rows"], made["key_bytes"]) == ("norm", 2000, 8)
    assert len(made["slot_sizes"]) == 26
    assert (tmp_path / "norm" / "train" / "_hugectr.keyset").stat().st_size % 8 == 0
    back = figures("convert", tmp_path / "norm", "--to", "dataset", "--out", tmp_path / "again", "--format", "raw")
    assert (back["rows"], back["skipped_rows"]) == (2000, 0)
    for split in ("train", "valid"):
        found, expected = (list(Reader(path, split, batch_size=500)) for path in (tmp_path / "again", workshop.data))
        assert_same_batches(found, expected)


def test_columns_that_the_files_cannot_hold_are_left_out_and_named(tmp_path: Path) -> None:
    spec = make_spec(hotness=(1,), weight="w", metadata=METADATA)
    write_split(tmp_path / "data", spec, make_block(spec, 20))
    ended = terarec("convert", tmp_path / "data", "--to", "parquet", "--out", tmp_path / "files")
    assert ended.code == 0
    reported = [line for line in ended.out.splitlines() if "left out" in line]
    assert reported == ["left out, as HugeCTR's files hold neither weights nor metadata: w, row, price, note"]
    figures("convert", tmp_path / "files", "--to", "dataset", "--out", tmp_path / "again")
    again = read_dataset(tmp_path / "again")
    assert (again.weight, again.metadata) == (None, ())
    assert again.num_rows("train") == 20


def test_what_is_rejected(workshop: Workshop, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "x")
    rejected("convert", workshop.data, "--to", "csv", *out, where="--to", problem="got 'csv'")
    for flags in (
        ("--to", "raw", "--no-checksum"),
        ("--to", "dataset", "--keysets"),
        ("--to", "norm", "--format", "raw"),
    ):
        rejected("convert", workshop.data, *flags, *out, where=flags[2], problem=" ".join(flags[:2]))
    rejected("convert", workshop.data, "--to", "norm", "--key-bytes", 5, *out, where="--key-bytes", problem="got 5")
    rejected("convert", tmp_path, "--to", "norm", *out, error=DataNotFoundError, where=tmp_path, problem="dataset.json")
    rejected(
        "convert", workshop.data, "--to", "dataset", *out, error=DataNotFoundError, where=workshop.data / "records.json"
    )
    assert not (tmp_path / "x").exists()
