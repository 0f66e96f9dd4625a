"""Criteo's logs become the data set that the rules of docs/encoders.md foresee."""

import gzip
import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from terarec.errors import ConfigError, DataNotFoundError, FormatError, StorageError
from terarec.etl import Encoders, Vocabulary, text_blocks
from terarec.etl.criteo import CriteoOptions, prepare
from terarec.formats import merge, new_directory, open_shard, read_dataset
from terarec.spec import LogShiftEncoder, VocabularyEncoder
from tests.etl.criteo_lines import columns, line, random_lines, write


def split_of(directory, split):
    """All rows of a split."""
    spec = read_dataset(directory)
    shards = [open_shard(spec, directory / shard.file, shard.rows) for shard in spec.shards(split)]
    return merge([shard.read_group(group) for shard in shards for group in range(len(shard.group_rows))])


def assert_same_rows(one, other):
    np.testing.assert_array_equal(one.label, other.label)
    np.testing.assert_array_equal(one.dense.view(np.int32), other.dense.view(np.int32))
    for column, expected in zip(one.keys, other.keys, strict=True):
        np.testing.assert_array_equal(column, expected)


def test_a_small_log_by_hand(tmp_path):
    def row(label, integer, category):
        return line(label, [integer] + [""] * 12, [category] + ["", "000000ff"] + [""] * 23)

    train = [row(1, -3, "b"), row(0, 1, "0000000b"), row(0, "", "a"), row(1, 96, "A"), row(1, 0, "c"), row(0, 0, "")]
    valid = [row(1, -9, "a"), row(0, 7, "dead"), row(0, "", "c"), row(0, 2, "")]
    sources = [write(tmp_path / "day_0", train), write(tmp_path / "day_1", valid)]
    report = prepare(sources, tmp_path / "out", CriteoOptions(min_count=2))

    assert (report.rows, report.train_rows, report.valid_rows) == (10, 6, 4)
    assert report.input_bytes == sum(path.stat().st_size for path in sources)
    assert (report.columns[0].name, report.columns[0].rows, report.columns[0].distinct) == ("C1", 4, 3)
    spec = read_dataset(tmp_path / "out")
    assert spec.dense[0].encoder == LogShiftEncoder(shift=4.0)
    assert spec.dense[1].encoder == LogShiftEncoder(shift=1.0)
    assert spec.categorical[0].encoder == VocabularyEncoder(
        file="vocabularies/C1.parquet", value_type="hex32", min_count=2
    )
    assert [column.rows for column in spec.categorical[:3]] == [4, 2, 3]
    vocabulary = pq.read_table(tmp_path / "out" / "vocabularies" / "C1.parquet").to_pydict()
    assert vocabulary == {"value": [0xA, 0xB], "count": [2, 2]}

    rows = split_of(tmp_path / "out", "train")
    assert rows.label[:, 0].tolist() == [1, 0, 0, 1, 1, 0]
    np.testing.assert_array_equal(rows.dense[:, 0], np.log(np.array([1, 5, 4, 100, 4, 4.0])).astype(np.float32))
    assert not rows.dense[:, 1:].any()
    assert [column.tolist() for column in rows.keys[:3]] == [[3, 3, 2, 2, 1, 0], [0] * 6, [2] * 6]
    rows = split_of(tmp_path / "out", "valid")
    np.testing.assert_array_equal(rows.dense[:, 0], np.log(np.array([1, 11, 4, 6.0])).astype(np.float32))
    assert rows.keys[0].tolist() == [2, 1, 1, 0]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    directory = tmp_path_factory.mktemp("log")
    lines = random_lines(3000)
    return write(directory / "log.tsv", lines), lines


@pytest.mark.parametrize("storage", ["parquet", "raw"])
@pytest.mark.parametrize("threads", [1, 3])
def test_serving_encodes_as_preparation_did_bit_for_bit(log, tmp_path, storage, threads, monkeypatch):
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 20_000)
    path, lines = log
    options = CriteoOptions(storage=storage, threads=threads, valid_fraction=0.25, rows_per_shard=700, min_count=3)
    prepare([path], tmp_path / "out", options)
    spec = read_dataset(tmp_path / "out")
    assert [shard.rows for shard in spec.shards("train")] == [700, 700, 700, 150]
    assert [shard.rows for shard in spec.shards("valid")] == [700, 50]
    encoded = Encoders.load(tmp_path / "out").encode(columns(lines))
    prepared = merge([split_of(tmp_path / "out", "train"), split_of(tmp_path / "out", "valid")])
    np.testing.assert_array_equal(prepared.label[:, 0], [int(text[0]) for text in lines])
    np.testing.assert_array_equal(prepared.dense.view(np.int32), encoded.dense.view(np.int32))
    for column, expected in zip(prepared.keys, encoded.keys, strict=True):
        np.testing.assert_array_equal(column, expected)


def test_files_do_not_depend_on_threads_or_blocks(log, tmp_path, monkeypatch):
    path, _ = log
    digests = []
    for threads, block_bytes in ((1, 1 << 20), (2, 7_000), (4, 50_000)):
        monkeypatch.setattr(text_blocks, "BLOCK_BYTES", block_bytes)
        out = tmp_path / str(threads)
        prepare([path], out, CriteoOptions(threads=threads, min_count=2))
        files = sorted(file for file in out.rglob("*") if file.is_file() and file.name != "_file_list.txt")
        digests.append({file.relative_to(out): file.read_bytes() for file in files})
    assert digests[0] == digests[1] == digests[2]


def test_only_the_training_part_teaches(tmp_path):
    lines = random_lines(400)
    odd = [line(1, [-1000] * 13, ["deadbeef"] * 26)] * 40
    one = prepare(
        [write(tmp_path / "a", lines + odd)], tmp_path / "one", CriteoOptions(min_count=1, valid_fraction=40 / 440)
    )
    other = prepare([write(tmp_path / "b", lines)], tmp_path / "other", CriteoOptions(min_count=1, valid_fraction=0))
    assert one.columns == other.columns
    assert one.train_rows == other.rows == 400
    specs = [read_dataset(tmp_path / name) for name in ("one", "other")]
    assert specs[0].dense == specs[1].dense
    assert sorted(specs[1].splits) == ["train"]
    odd_rows = split_of(tmp_path / "one", "valid")
    assert not odd_rows.dense.any()
    assert {int(key) for column in odd_rows.keys for key in column} == {1}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_gzip_line_ends_and_a_missing_last_one_change_nothing(log, tmp_path, end):
    path, lines = log
    text = end.join(lines).encode()
    packed = tmp_path / "log.tsv.gz"
    packed.write_bytes(gzip.compress(text[:200_000]) + gzip.compress(text[200_000:]))
    prepare([packed], tmp_path / "packed", CriteoOptions())
    prepare([path], tmp_path / "plain", CriteoOptions())
    for split in ("train", "valid"):
        assert_same_rows(split_of(tmp_path / "packed", split), split_of(tmp_path / "plain", split))


def test_the_validation_split_is_the_last_file_or_the_last_rows(tmp_path):
    sources = [write(tmp_path / f"day_{day}", random_lines(50 + day, seed=day)) for day in range(3)]
    reports = {
        name: prepare(sources, tmp_path / name, options)
        for name, options in {
            "default": CriteoOptions(),
            "day": CriteoOptions(valid_last_day=True),
            "fraction": CriteoOptions(valid_fraction=0.5),
        }.items()
    }
    assert [(report.train_rows, report.valid_rows) for report in reports.values()] == [(101, 52), (101, 52), (77, 76)]
    assert prepare(sources[:1], tmp_path / "one", CriteoOptions()).valid_rows == 5
    with pytest.raises(ConfigError, match="valid_last_day: got one source"):
        prepare(sources[:1], tmp_path / "alone", CriteoOptions(valid_last_day=True))


def test_what_hugectr_reads_names_the_place_of_the_data_set(tmp_path):
    prepare([write(tmp_path / "log", random_lines(30))], tmp_path / "out", CriteoOptions())
    listed = (tmp_path / "out" / "train" / "_file_list.txt").read_text().split()
    assert listed == ["1", str((tmp_path / "out").resolve() / "train" / "part-00000.parquet")]
    metadata = json.loads((tmp_path / "out" / "train" / "_metadata.json").read_text())
    assert metadata["cats"][0] == {"col_name": "C1", "index": 14}


def test_the_best_auc_of_generated_logs_travels(tmp_path):
    source = write(tmp_path / "day_0.tsv", random_lines(30))
    sidecar = tmp_path / "generated.json"
    sidecar.write_text('{"best_auc": 0.8125, "rows": 30}')
    assert prepare([source], tmp_path / "out", CriteoOptions()).best_auc == 0.8125
    assert read_dataset(tmp_path / "out").best_auc == 0.8125
    sidecar.write_text('{"best_auc": "high"}')
    with pytest.raises(FormatError, match=r"generated.json: \$.best_auc: got 'high', expected a number from 0 to 1"):
        prepare([source], tmp_path / "other", CriteoOptions())


def test_progress_rises_to_the_bytes_of_all_passes(tmp_path, monkeypatch):
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 10_000)
    source = write(tmp_path / "log", random_lines(400))
    told = []
    prepare([source], tmp_path / "out", CriteoOptions(), progress=lambda done, total: told.append((done, total)))
    total = 3 * source.stat().st_size
    assert told == sorted(told)
    assert told[-1] == (total, total)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text + "\t", r"day_1: line 31: found 41 columns, expected 40 \(label"),
        (lambda text: text.rsplit("\t", 3)[0], r"day_1: line 31: found 37 columns, expected 40"),
        (lambda text: "3" + text[1:], r"day_1: line 31: column 1 \(label\): got '3', expected 0 or 1"),
        (lambda text: text[:2] + "x" + text[2:], r"day_1: line 31: column 2 \(I1\): got 'x.*', expected an integer"),
        (lambda text: text[:2] + "99999999999" + text[2:], r"day_1: line 31: column 2 \(I1\): .* to 2147483647"),
        (lambda text: text + "ghi", r"day_1: line 31: column 40 \(C26\): got '.*ghi', expected up to 8 hex"),
        (lambda text: "", r"day_1: line 31: found 1 column, expected 40"),
    ],
)
def test_a_bad_line_is_told_with_file_and_line_and_nothing_is_left(tmp_path, monkeypatch, damage, message):
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 2_000)
    lines = random_lines(60)
    lines[30] = damage(lines[30])
    sources = [write(tmp_path / "day_0", random_lines(40)), write(tmp_path / "day_1", lines)]
    for name, options in (("learning", CriteoOptions(valid_fraction=0.1)), ("writing", CriteoOptions())):
        with pytest.raises(FormatError, match=message):
            prepare(sources, tmp_path / name, options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day_0", "day_1"]


def test_of_several_bad_lines_the_first_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 1_000)
    lines = random_lines(200)
    lines[150] = lines[77] = lines[78] = "bad"
    source = write(tmp_path / "log", lines)
    for _ in range(3):
        with pytest.raises(FormatError, match="line 78: found 1 column,"):
            prepare([source], tmp_path / "out", CriteoOptions(threads=4))


def test_bad_sources_are_told_in_one_line(tmp_path, monkeypatch):
    good = write(tmp_path / "good", random_lines(5))
    empty = write(tmp_path / "empty", [])
    packed = tmp_path / "cut.gz"
    packed.write_bytes(gzip.compress("\n".join(random_lines(50)).encode())[:-30])
    hollow = tmp_path / "hollow.gz"
    hollow.write_bytes(gzip.compress(b""))
    long = write(tmp_path / "long", ["x" * 9000])
    cases = [
        ([], ConfigError, "sources: got none"),
        ([tmp_path / "none"], DataNotFoundError, "none: no such file"),
        ([good, empty], FormatError, "empty: the file is empty"),
        ([hollow], FormatError, "hollow.gz: the file is empty"),
        ([packed], FormatError, "cut.gz: not a whole gzip file"),
        ([tmp_path], FormatError, "not a file"),
        ([long], FormatError, "long: line 1 is longer than 4000 bytes"),
    ]
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 4_000)
    for sources, kind, message in cases:
        with pytest.raises(kind, match=message) as caught:
            prepare(sources, tmp_path / "out", CriteoOptions())
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_existing_data_set_is_left_alone(tmp_path):
    source = write(tmp_path / "log", random_lines(20))
    (tmp_path / "out").mkdir()
    prepare([source], tmp_path / "out", CriteoOptions())
    before = (tmp_path / "out" / "dataset.json").read_bytes()
    with pytest.raises(ConfigError, match="exists and is not empty"):
        prepare([source], tmp_path / "out", CriteoOptions())
    with pytest.raises(ConfigError, match="exists and is not empty"):
        prepare([source], source, CriteoOptions())
    assert (tmp_path / "out" / "dataset.json").read_bytes() == before


def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 2_000)
    source = write(tmp_path / "log", random_lines(300))
    seen = []

    def interrupt(done, total):
        seen.append(done)
        if done > 0.9 * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([source], tmp_path / "out", CriteoOptions(rows_per_shard=50), progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    assert len(seen) > 50


def fill_the_disk(out):
    with new_directory(out) as partial:
        (partial / "shard").write_bytes(b"x")
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")


def test_a_full_disk_is_told_in_one_line(tmp_path):
    with pytest.raises(StorageError, match="No space left on device; nothing was left behind"):
        fill_the_disk(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_may_not_be_made_is_told(tmp_path):
    write(tmp_path / "file", [])
    with pytest.raises(StorageError, match="cannot write there"), new_directory(tmp_path / "file" / "out"):
        pytest.fail("nothing can be written into a file")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_count": 0}, "CriteoOptions.min_count: got 0"),
        ({"storage": "csv"}, "CriteoOptions.storage: got 'csv', expected one of 'parquet', 'raw'"),
        ({"valid_fraction": 1.0}, "CriteoOptions.valid_fraction: got 1.0, expected less than 1"),
        ({"valid_fraction": -0.1}, "CriteoOptions.valid_fraction: got -0.1"),
        ({"valid_fraction": 0.1, "valid_last_day": True}, "expected nothing together with valid_last_day"),
        ({"rows_per_shard": 0}, "CriteoOptions.rows_per_shard: got 0"),
        ({"threads": 0}, "CriteoOptions.threads: got 0"),
    ],
)
def test_options_out_of_range_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        CriteoOptions(**fields)


def test_vocabularies_of_a_data_set_lead_back_to_the_raw_values(log, tmp_path):
    path, lines = log
    prepare([path], tmp_path / "out", CriteoOptions(min_count=1, valid_fraction=0))
    keys = split_of(tmp_path / "out", "train").keys[25]
    vocabulary = Vocabulary.load(tmp_path / "out" / "vocabularies" / "C26.parquet", "hex32")
    assert [value or "" for value in vocabulary.inverse(keys.tolist())] == [text.split("\t")[39] for text in lines]
