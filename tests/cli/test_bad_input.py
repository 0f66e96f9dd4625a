"""Whatever is wrong with the input: one line, a code, no traceback, and nothing half-written."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from terarec.formats import open_shard, read_dataset
from tests.cli.conftest import Workshop, figures, refused, terarec

LINE = "1\t" + "\t".join(["5"] * 13) + "\t" + "\t".join(["0a1b2c3d"] * 26)


def raw_file(folder: Path, *lines: str) -> Path:
    path = folder / "day_0.tsv"
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (LINE + "\textra", "line 3"),
        (LINE.rsplit("\t", 1)[0], "line 3"),
        (LINE.replace("5", "five", 1), "'five'"),
        (LINE.replace("0a1b2c3d", "nothex", 1), "'nothex'"),
        (LINE.replace("1", "2", 1), "line 3"),
    ],
)
def test_a_wrong_line_is_reported_with_its_number(tmp_path: Path, bad: str, expected: str) -> None:
    path = raw_file(tmp_path, LINE, LINE, bad, LINE)
    message = refused("prepare", "criteo", path, "--out", tmp_path / "data", code=1)
    assert expected in message
    assert f"{path}" in message
    assert "line 3" in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["day_0.tsv"]


HEADER = b"userId,movieId,rating,timestamp\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "the file is empty, expected at least one row"),
        (HEADER, "the file is empty, expected at least one row"),
        (b"\n" + HEADER, "line 1: empty, expected the names of columns"),
        (HEADER + b"1,2\x00,3,4\n", "line 2, column 'movieId': got '2\\x00', expected an integer"),
        ((HEADER + b"1,2,3,4\n").replace(b"\n", b"\r"), "its lines end in carriage returns alone"),
        ((HEADER + b"1,2,3,4\n").decode().encode("utf-16"), "line 1: byte 0 is not UTF-8"),
        (gzip.compress(HEADER + b"1,2,3,4\n", mtime=0)[:-9], "not a whole gzip file"),
        (
            HEADER + b"9" * 3_000_000,
            "line 2: got '9999999999999999999999999999999999999...', expected a line of at most",
        ),
    ],
    ids=["empty", "header", "blank", "nul", "cr", "utf16", "cut", "oversized"],
)
def test_a_file_that_is_none_of_the_workflow_is_reported(tmp_path: Path, content: bytes, expected: str) -> None:
    path, movies = tmp_path / "ratings.csv", tmp_path / "movies.csv"
    path.write_bytes(content)
    movies.write_bytes(b"movieId,title,genres\n2,Film,Drama\n")
    prepare = ["prepare", "movielens", path, "--out", tmp_path / "data", "--table", f"movies={movies}"]
    ended = terarec(*prepare)
    told = [line for line in ended.err.splitlines() if line.startswith("terarec: ")]
    assert ended.code in (1, 2)
    assert len(told) == 1
    assert told[0].startswith(f"terarec: error: {path}: ")
    assert expected in told[0]
    assert len(told[0]) < 500
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["movies.csv", "ratings.csv"]


def test_missing_raw_files(tmp_path: Path) -> None:
    for kind in (["criteo"], ["csv", "--label", "y", "--dense", "x"]):
        message = refused("prepare", *kind, tmp_path / "none.tsv", "--out", tmp_path / "data", code=1)
        assert "none.tsv" in message
    assert list(tmp_path.iterdir()) == []


def test_an_output_directory_that_is_in_use(workshop: Workshop) -> None:
    day = workshop.raw / "day_0.tsv"
    before = sorted(workshop.data.rglob("*"))
    assert str(workshop.data) in refused("prepare", "criteo", day, "--out", workshop.data, code=2)
    assert str(workshop.raw) in refused("generate", "criteo", "--rows", 10, "--out", workshop.raw, code=2)
    assert sorted(workshop.data.rglob("*")) == before


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--format", "csv"], "--format: got 'csv', expected one of 'parquet', 'raw'"),
        (["--valid-fraction", "1.5"], "--valid-fraction: got 1.5, expected a number from 0 to below 1"),
        (["--valid-fraction", "0.1", "--valid-last-day"], "--valid-fraction: got --valid-last-day as well"),
        (["--min-count", "0"], "--min-count"),
    ],
)
def test_wrong_options_of_prepare(workshop: Workshop, tmp_path: Path, flags: list[str], expected: str) -> None:
    days = sorted(workshop.raw.glob("*.tsv"))
    message = refused("prepare", "criteo", *days, "--out", tmp_path / "data", *flags, code=2)
    assert expected in message
    assert "Options" not in message
    assert list(tmp_path.iterdir()) == []


def test_wrong_columns_of_a_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,y\n1,0\n2,1\nthree,1\n")
    prepare = ["prepare", "csv", path, "--out", tmp_path / "data", "--label", "y"]
    assert "'z'" in refused(*prepare, "--dense", "z", code=2)
    message = refused(*prepare, "--dense", "x", code=1)
    assert "'three'" in message
    assert f"{path}" in message
    assert "got '=3', expected COLUMN=COUNT" in refused(*prepare, "--buckets", "x=2,=3", code=2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.csv"]


def test_no_data_set(workshop: Workshop, tmp_path: Path) -> None:
    commands = [
        ["train", "--data", tmp_path / "none", "--out", tmp_path / "run"],
        ["evaluate", workshop.run, "--data", tmp_path / "none"],
        ["predict", workshop.run, "--data", tmp_path / "none", "--out", tmp_path / "scores.parquet"],
    ]
    for command in commands:
        assert "none: no such directory, expected a data set" in refused(*command, code=1)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "none").mkdir()
    for command in commands:
        assert "holds no dataset.json" in refused(*command, code=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["none"]


def test_no_run(workshop: Workshop, tmp_path: Path) -> None:
    scores = tmp_path / "scores.parquet"
    for command in (["evaluate"], ["predict", "--out", scores]):
        assert "run.json" in refused(*command, tmp_path / "none", "--data", workshop.data, code=1)
    assert "run.json" in refused("serve", tmp_path / "none", "--port", 0, code=1)
    assert list(tmp_path.iterdir()) == []


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("spoil", [cut, Path.unlink], ids=["cut", "gone"])
@pytest.mark.parametrize("kind", ["data", "raw_format"])
def test_a_spoilt_shard(workshop: Workshop, tmp_path: Path, kind: str, spoil: Callable[[Path], None]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(getattr(workshop, kind), copy)
    shard = next((copy / "valid").glob("part-*"))
    spoil(shard)
    for command in (["evaluate"], ["predict", "--out", tmp_path / "scores.parquet"]):
        assert str(shard) in refused(*command, workshop.run, "--data", copy, code=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["copy"]


def test_a_key_outside_its_table(workshop: Workshop, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(workshop.raw_format, copy)
    shard = next((copy / "train").glob("part-*"))
    content = bytearray(shard.read_bytes())
    content[4 * 14 : 4 * 15] = (10**6).to_bytes(4, "little")  # the first record's key of C1
    shard.write_bytes(content)
    message = refused("train", "--data", copy, "--out", tmp_path / "run", code=1)
    assert "'C1'" in message
    assert "key 1000000" in message
    assert f"{shard}" in message


def test_a_spoilt_description(workshop: Workshop, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(workshop.data, copy)
    path = copy / "dataset.json"
    for text, expected in (('{"format": ', "line 1"), ("{}", "terarec.dataset")):
        path.write_text(text)
        assert expected in refused("inspect", copy, code=1)
    described = json.loads((workshop.data / "dataset.json").read_text())
    described["dataset"]["categorical"][2]["rows"] = "many"
    path.write_text(json.dumps(described))
    assert "$.dataset.categorical[2].rows: got 'many', expected an integer" in refused("inspect", copy, code=1)


def test_a_damaged_checkpoint(workshop: Workshop, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(workshop.run, copy)
    table = next((copy / "checkpoints").rglob("C7-*.safetensors"))
    damage(table)
    for command in (["evaluate", copy, "--data", workshop.data], ["inspect", copy], ["serve", copy, "--port", 0]):
        assert str(table) in refused(*command, code=1)


def test_another_data_set_than_the_model_knows(workshop: Workshop, tmp_path: Path) -> None:
    days = sorted(workshop.raw.glob("*.tsv"))
    figures("prepare", "criteo", *days, "--out", tmp_path / "other", "--min-count", 9)
    message = refused("evaluate", workshop.run, "--data", tmp_path / "other", code=2)
    assert "ids fitted again" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "line 1 column 2"),
        ('{"data": "d", "epochs": 1}', "$.epochs: unknown field"),
        ('{"data": "d", "training": {"batch_size": "big"}}', "$.training.batch_size: got 'big', expected an integer"),
    ],
)
def test_a_wrong_run_description(tmp_path: Path, text: str, expected: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(text)
    message = refused("train", config, "--out", tmp_path / "run", code=2)
    assert expected in message
    assert str(config) in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


def test_a_port_that_is_taken_or_none(workshop: Workshop) -> None:
    told = refused("serve", workshop.run, "--port", 70000, code=2)
    assert told == "--port: got 70000, expected a TCP port from 0 to 65535"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "got no column to learn from, expected dense"),
        (["--dense", "x", "--format", "csv"], "--format: got 'csv'"),
        (["--dense", "x", "--delimiter", ';"'], "--delimiter: got ';\"', expected ASCII characters, at least one"),
        (["--dense", "x", "--valid-fraction", "1"], "--valid-fraction: got 1.0, expected a number from 0 to below 1"),
        (["--dense", "x", "--valid-fraction", "0.5", "--valid", "v.csv"], "--valid-fraction: got valid (--valid) as"),
        (["--buckets", "x=1"], "--buckets: got 1 for 'x', expected an integer >= 2"),
        (["--dense", "x", "--name", "a/b"], "--name: got 'a/b', expected a non-empty name"),
        (["--dense", "x", "--out", "."], "--out: /"),
    ],
)
def test_wrong_options_of_csv_are_named_as_typed(tmp_path: Path, flags: list[str], expected: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,y\n1,0\n2,1\n")
    out = [] if "--out" in flags else ["--out", tmp_path / "data"]
    message = refused("prepare", "csv", path, "--label", "y", *out, *flags, code=2)
    assert message.startswith(expected)


def test_a_last_day_of_one_file_names_the_option(workshop: Workshop, tmp_path: Path) -> None:
    day = workshop.raw / "day_0.tsv"
    message = refused("prepare", "criteo", day, "--out", tmp_path / "data", "--valid-last-day", code=2)
    assert message.startswith("--valid-last-day: got one file, expected at least two")


@pytest.mark.parametrize("policy", ["raise", "skip", "missing"])
def test_quoted_text_is_no_row_of_the_data_set(tmp_path: Path, policy: str) -> None:
    """A10, D15: the row that a user wrote into a column that is not used does not come out."""
    path = tmp_path / "log.csv"
    path.write_text('label,x,note\n0,1,"a\n1,5,fake\nb"\n0,2,c\n')
    ended = terarec(
        "prepare", "csv", path, "--out", tmp_path / "d", "--label", "label", "--keys", "x", "--bad-input", policy
    )
    assert ended.code == 0
    spec = read_dataset(tmp_path / "d")
    shard = spec.shards("train")[0]
    group = open_shard(spec, tmp_path / "d" / shard.file, shard.rows).read_group(0)
    assert [key.tolist() for key in group.keys] == [[1, 2]]
    assert group.label[:, 0].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("rows", "flags", "hint"),
    [
        ("2,1,a\n0,1,b\n", [], "--positive"),
        (",1,a\n0,1,b\n", [], "--bad-input skip"),
        ('0,1,"a"b\n', [], "column 'note'"),
    ],
)
def test_hints_name_options_and_columns(tmp_path: Path, rows: str, flags: list[str], hint: str) -> None:
    """E1: the hint names what one types, and a column that is not used goes by its name."""
    path = tmp_path / "log.csv"
    path.write_text(f"label,x,note\n{rows}")
    told = refused("prepare", "csv", path, "--label", "label", "--dense", "x", "--out", tmp_path / "d", *flags, code=1)
    assert hint in told


@pytest.mark.parametrize("name", ["workflow.json", "dataset.json"])
def test_deep_json_is_reported(tmp_path: Path, name: str) -> None:
    """S3: files that are nested to depth 1,000 and more."""
    for depth in (1000, 100_000):
        path = tmp_path / name
        body = '{"a":' * depth + "1" + "}" * depth
        path.write_text(body)
        word = "terarec.workflow" if name == "workflow.json" else "terarec.dataset"
        for text in (body, f'{{"format": "{word}", "version": 1, "workflow": {body}, "labels": {body}}}'):
            path.write_text(text)
            command = (
                ["prepare", path, "x.csv", "--out", tmp_path / "d"]
                if name == "workflow.json"
                else ["inspect", tmp_path]
            )
            ended = terarec(*command)
            assert ended.code in (1, 2)
            assert ended.err.count("\n") == 1
            assert len(ended.err) < 2000
