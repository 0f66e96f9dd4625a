# SPDX-License-Identifier: Apache-2.0
"""Criteo's logs become the data set that the ready workflow and docs/workflows.md foresee."""

import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from terarec import etl
from terarec.errors import FormatError
from terarec.etl.engine.report import PrepareReport
from terarec.etl.ops.base import MISSING
from terarec.etl.ready import criteo
from terarec.etl.source import source as source_module
from terarec.etl.source.delimited import DelimitedReader
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.datasets import IdValues
from terarec.formats import read_dataset
from terarec.formats.block import ColumnBlock, merge
from terarec.spec import PrepareOptions, Split, SplitByFiles, SplitByFraction
from tests.errors import at
from tests.etl.criteo_lines import columns, line, random_lines, write
from tests.etl.engine.test_prepare import equal, read_split

LAST_FILE = SplitByFiles(valid=1)

GOLDEN = {
    "train": "0a09a8c3b9174f010a30b6bb8c15d8b4667ad7f6c9cf082f72b99cbbebd76428",
    "valid": "02884fb9ff8ad58e67860dcc2ea9362ea502ba00734d0a956268cf0118e185bc",
}
"""SHA-256 of labels, numbers and ids of two files of 700 rows, as another implementation gave them as well."""


def prepare(
    sources: list[Path], out: Path, *, min_count: int = 15, split: Split | None = None, **options: object
) -> PrepareReport:
    workflow = Workflow.of(criteo(min_count=min_count, split=split))
    return etl.prepare(workflow, sources, out, options=PrepareOptions(**options))


def small_blocks(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    readers = {"delimited": lambda spec: DelimitedReader(spec, num_bytes)}
    monkeypatch.setattr(source_module, "_READERS", readers)


def digest(block: ColumnBlock) -> str:
    found = hashlib.sha256()
    for array in (block.label, block.dense, *block.keys):
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def test_a_small_log_by_hand(tmp_path: Path) -> None:
    def row(label: int, integer: int | str, category: str) -> str:
        return line(label, [integer] + [""] * 12, [category] + ["", "000000ff"] + [""] * 23)

    train = [row(1, -3, "b"), row(0, 1, "0000000b"), row(0, "", "a"), row(1, 96, "A"), row(1, 0, "c"), row(0, 0, "")]
    valid = [row(1, -9, "a"), row(0, 7, "dead"), row(0, "", "c"), row(0, 2, "")]
    sources = [write(tmp_path / "day_0", train), write(tmp_path / "day_1", valid)]
    report = prepare(sources, tmp_path / "out", min_count=2, split=LAST_FILE)

    assert report.splits == {"train": 6, "valid": 4}
    assert [column.rows for column in read_dataset(tmp_path / "out").categorical[:3]] == [4, 2, 3]
    rows = read_split(tmp_path / "out", "train")
    assert rows.label[:, 0].tolist() == [1, 0, 0, 1, 1, 0]
    np.testing.assert_array_equal(rows.dense[:, 0], np.log(np.array([1, 5, 4, 100, 4, 4.0])).astype(np.float32))
    assert not rows.dense[:, 1:].any()
    assert [column.tolist() for column in rows.keys[:3]] == [[3, 3, 2, 2, 1, 0], [0] * 6, [2] * 6]
    rows = read_split(tmp_path / "out", "valid")
    np.testing.assert_array_equal(rows.dense[:, 0], np.log(np.array([1, 11, 4, 6.0])).astype(np.float32))
    assert rows.keys[0].tolist() == [2, 1, 1, 0]


def test_the_bits_of_a_larger_log(tmp_path: Path) -> None:
    log = [write(tmp_path / f"day_{day}.tsv", random_lines(700, seed=day)) for day in range(2)]
    report = prepare(log, tmp_path / "out", min_count=3, split=SplitByFraction(valid=0.1))
    assert report.splits == {"train": 1260, "valid": 140}
    assert {split: digest(read_split(tmp_path / "out", split)) for split in report.splits} == GOLDEN


@pytest.mark.parametrize("storage", ["parquet", "raw"])
def test_serving_encodes_as_preparation_did_bit_for_bit(tmp_path: Path, storage: str) -> None:
    lines = random_lines(1000)
    log = write(tmp_path / "log.tsv", lines)
    split = SplitByFraction(valid=0.25)
    prepare([log], tmp_path / "out", min_count=3, split=split, storage=storage, rows_per_shard=300)
    encoded = Workflow.load(tmp_path / "out" / "workflow").encode(columns(lines))
    prepared = merge([read_split(tmp_path / "out", split) for split in ("train", "valid")])
    np.testing.assert_array_equal(prepared.label[:, 0], [int(text[0]) for text in lines])
    np.testing.assert_array_equal(prepared.dense.view(np.int32), encoded.dense.view(np.int32))
    for column, expected in zip(prepared.keys, encoded.keys, strict=True):
        np.testing.assert_array_equal(column, expected)


def test_only_the_training_part_teaches(tmp_path: Path) -> None:
    lines = random_lines(400)
    odd = [line(1, [-1000] * 13, ["deadbeef"] * 26)] * 40
    one = prepare(
        [write(tmp_path / "a", lines + odd)], tmp_path / "one", min_count=1, split=SplitByFraction(valid=40 / 440)
    )
    other = prepare([write(tmp_path / "b", lines)], tmp_path / "other", min_count=1)
    assert one.columns == other.columns
    assert one.splits["train"] == other.rows == 400
    assert sorted(read_dataset(tmp_path / "other").splits) == ["train"]
    equal(read_split(tmp_path / "one", "train"), read_split(tmp_path / "other", "train"))
    odd_rows = read_split(tmp_path / "one", "valid")
    assert not odd_rows.dense.any()
    assert {int(key) for column in odd_rows.keys for key in column} == {1}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_gzip_line_ends_and_a_missing_last_one_change_nothing(tmp_path: Path, end: str) -> None:
    lines = random_lines(300)
    text = end.join(lines).encode()
    packed = tmp_path / "log.tsv.gz"
    packed.write_bytes(gzip.compress(text[:20_000]) + gzip.compress(text[20_000:]))
    prepare([packed], tmp_path / "packed")
    prepare([write(tmp_path / "log.tsv", lines)], tmp_path / "plain")
    equal(read_split(tmp_path / "packed", "train"), read_split(tmp_path / "plain", "train"))


def test_what_hugectr_reads_names_the_place_of_the_data_set(tmp_path: Path) -> None:
    prepare([write(tmp_path / "log", random_lines(30))], tmp_path / "out")
    listed = (tmp_path / "out" / "train" / "_file_list.txt").read_text().split()
    assert listed == ["1", str((tmp_path / "out").resolve() / "train" / "part-00000.parquet")]
    metadata = json.loads((tmp_path / "out" / "train" / "_metadata.json").read_text())
    assert metadata["cats"][0] == {"col_name": "C1", "index": 14}


@pytest.mark.parametrize(
    ("damage", "place"),
    [
        (lambda text: text + "\t", ("/day_1: line 31", "found 41 fields")),
        (lambda text: text.rsplit("\t", 3)[0], ("/day_1: line 31", "found 37 fields")),
        (lambda text: "3" + text[1:], ("/day_1: line 31, column 'label'", "got 3")),
        (lambda text: text[1:], ("/day_1: line 31, column 'label'", "got a missing value")),
        (lambda text: text[:2] + "x" + text[2:], ("/day_1: line 31, column 'I1'",)),
        (lambda text: text + "ghi", ("/day_1: line 31, column 'C26'",)),
    ],
)
def test_a_bad_line_is_reported_with_file_and_line_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage, place: tuple[str, ...]
) -> None:
    small_blocks(monkeypatch, 2_000)
    lines = random_lines(60)
    lines[30] = damage(lines[30])
    sources = [write(tmp_path / "day_0", random_lines(40)), write(tmp_path / "day_1", lines)]
    for split in (SplitByFraction(valid=0.1), LAST_FILE):
        with pytest.raises(FormatError, check=at(f"{tmp_path}{place[0]}", *place[1:])):
            prepare(sources, tmp_path / "out", split=split)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["day_0", "day_1"]


def test_of_several_bad_lines_the_first_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 1_000)
    lines = random_lines(200)
    lines[150] = lines[77] = lines[78] = "bad"
    source = write(tmp_path / "log", lines)
    with pytest.raises(FormatError, check=at(f"{source}: line 78")):
        prepare([source], tmp_path / "out", threads=4)


def test_the_vocabularies_lead_back_to_the_raw_values(tmp_path: Path) -> None:
    lines = random_lines(300)
    prepare([write(tmp_path / "log", lines)], tmp_path / "out", min_count=1)
    keys = read_split(tmp_path / "out", "train").keys[25]
    fitted = Workflow.load(tmp_path / "out" / "workflow")
    values = IdValues(fitted, "C26").values(keys)
    assert values == [text.split("\t")[39] or MISSING for text in lines]
