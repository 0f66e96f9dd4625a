# SPDX-License-Identifier: Apache-2.0
"""Invalid input ends in one line and an exit code, without a traceback or half-written files."""

import gc
import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from terarec.errors import DataNotFoundError, FormatError
from terarec.formats import read_dataset
from terarec.formats.shard import open_shard
from tests.cli.conftest import Workshop, figures, rejected, terarec

LINE = "1\t" + "\t".join(["5"] * 13) + "\t" + "\t".join(["0a1b2c3d"] * 26)


def raw_file(folder: Path, *lines: str) -> Path:
    path = folder / "day_0.tsv"
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("bad", "place", "problem"),
    [
        (LINE + "\textra", "line 3", "41 fields"),
        (LINE.rsplit("\t", 1)[0], "line 3", "39 fields"),
        (LINE.replace("5", "five", 1), "line 3, column 'I1'", "'five'"),
        (LINE.replace("0a1b2c3d", "nothex", 1), "line 3, column 'C1'", "'nothex'"),
        (LINE.replace("1", "2", 1), "line 3, column 'label'", "got 2"),
    ],
)
def test_a_wrong_line_is_reported_with_its_number(tmp_path: Path, bad: str, place: str, problem: str) -> None:
    path = raw_file(tmp_path, LINE, LINE, bad, LINE)
    prepare = ["prepare", "criteo", path, "--out", tmp_path / "data"]
    rejected(*prepare, error=FormatError, where=f"{path}: {place}", problem=problem)
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
    reported = [line for line in ended.err.splitlines() if line.startswith("terarec: ")]
    assert ended.code in (1, 2)
    assert len(reported) == 1
    assert reported[0].startswith(f"terarec: error: {path}: ")
    assert expected in reported[0]
    assert len(reported[0]) < 500
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["movies.csv", "ratings.csv"]


def test_missing_raw_files(tmp_path: Path) -> None:
    for kind in (["criteo"], ["csv", "--label", "y", "--dense", "x"]):
        typed = ["prepare", *kind, tmp_path / "none.tsv", "--out", tmp_path / "data"]
        rejected(*typed, error=DataNotFoundError, where=tmp_path / "none.tsv")
    assert list(tmp_path.iterdir()) == []


def test_an_output_directory_that_is_in_use(workshop: Workshop) -> None:
    day = workshop.raw / "day_0.tsv"
    before = sorted(workshop.data.rglob("*"))
    rejected("prepare", "criteo", day, "--out", workshop.data, where="--out", problem=f"{workshop.data} exists")
    rejected("generate", "criteo", "--rows", 10, "--out", workshop.raw, where="--out", problem=f"{workshop.raw} exists")
    assert sorted(workshop.data.rglob("*")) == before


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--format", "csv"], "got 'csv'"),
        (["--valid-fraction", "1.5"], "got 1.5"),
        (["--valid-fraction", "0.1", "--valid-last-day"], "got --valid-last-day as well"),
        (["--min-count", "0"], "expected an integer >= 1"),
    ],
)
def test_wrong_options_of_prepare(workshop: Workshop, tmp_path: Path, flags: list[str], problem: str) -> None:
    days = sorted(workshop.raw.glob("*.tsv"))
    rejected("prepare", "criteo", *days, "--out", tmp_path / "data", *flags, where=flags[0], problem=problem)
    assert list(tmp_path.iterdir()) == []


def test_wrong_columns_of_a_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,y\n1,0\n2,1\nthree,1\n")
    prepare = ["prepare", "csv", path, "--out", tmp_path / "data", "--label", "y"]
    rejected(*prepare, "--dense", "z", where=path, problem="'z'")
    rejected(*prepare, "--dense", "x", error=FormatError, where=f"{path}: line 4, column 'x'", problem="got 'three'")
    rejected(*prepare, "--buckets", "x=2,=3", where="--buckets", problem="got '=3'")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.csv"]


def test_no_data_set(workshop: Workshop, tmp_path: Path) -> None:
    commands = [
        ["train", "--data", tmp_path / "none", "--out", tmp_path / "run"],
        ["evaluate", workshop.run, "--data", tmp_path / "none"],
        ["predict", workshop.run, "--data", tmp_path / "none", "--out", tmp_path / "scores.parquet"],
    ]
    for command in commands:
        rejected(*command, error=DataNotFoundError, where=tmp_path / "none")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "none").mkdir()
    for command in commands:
        rejected(*command, error=DataNotFoundError, where=tmp_path / "none", problem="dataset.json")
    assert [entry.name for entry in tmp_path.iterdir()] == ["none"]


def test_no_run(workshop: Workshop, tmp_path: Path) -> None:
    scores = tmp_path / "scores.parquet"
    for command in (["evaluate"], ["predict", "--out", scores]):
        typed = [*command, tmp_path / "none", "--data", workshop.data]
        rejected(*typed, error=DataNotFoundError, where=tmp_path / "none", problem="run.json")
    rejected("serve", tmp_path / "none", "--port", 0, error=DataNotFoundError, where=tmp_path / "none" / "run.json")
    assert list(tmp_path.iterdir()) == []


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "error"), [(cut, FormatError), (Path.unlink, DataNotFoundError)], ids=["cut", "gone"]
)
@pytest.mark.parametrize("kind", ["data", "raw_format"])
def test_a_spoilt_shard(
    workshop: Workshop, tmp_path: Path, kind: str, spoil: Callable[[Path], None], error: type[FormatError]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(getattr(workshop, kind), copy)
    shard = next((copy / "valid").glob("part-*"))
    spoil(shard)
    for command in (["evaluate"], ["predict", "--out", tmp_path / "scores.parquet"]):
        rejected(*command, workshop.run, "--data", copy, error=error, where=shard)
    assert [entry.name for entry in tmp_path.iterdir()] == ["copy"]


def test_a_key_outside_its_table(workshop: Workshop, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(workshop.raw_format, copy)
    shard = next((copy / "train").glob("part-*"))
    content = bytearray(shard.read_bytes())
    content[4 * 14 : 4 * 15] = (10**6).to_bytes(4, "little")  # the first record's key of C1
    shard.write_bytes(content)
    typed = ["train", "--data", copy, "--out", tmp_path / "run"]
    rejected(*typed, error=FormatError, where=f"{shard}: row group 0, column 'C1'", problem="key 1000000")


def test_a_spoilt_description(workshop: Workshop, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(workshop.data, copy)
    path = copy / "dataset.json"
    for text, where in (('{"format": ', path), ("{}", f"{path}: $.format")):
        path.write_text(text)
        rejected("inspect", copy, error=FormatError, where=where)
    described = json.loads((workshop.data / "dataset.json").read_text())
    described["dataset"]["categorical"][2]["rows"] = "many"
    path.write_text(json.dumps(described))
    rejected("inspect", copy, error=FormatError, where=f"{path}: $.dataset.categorical[2].rows", problem="got 'many'")


def test_a_damaged_checkpoint(workshop: Workshop, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(workshop.run, copy)
    table = next((copy / "checkpoints").rglob("C7-*.safetensors"))
    damage(table)
    for command in (["evaluate", copy, "--data", workshop.data], ["inspect", copy], ["serve", copy, "--port", 0]):
        rejected(*command, error=FormatError, where=table)


def test_another_data_set_than_the_model_knows(workshop: Workshop, tmp_path: Path) -> None:
    days = sorted(workshop.raw.glob("*.tsv"))
    figures("prepare", "criteo", *days, "--out", tmp_path / "other", "--min-count", 9)
    rejected("evaluate", workshop.run, "--data", tmp_path / "other", where="data set 'criteo', column 'C1'")


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("{", "line 1 column 2", "JSON"),
        ('{"data": "d", "epochs": 1}', "$.epochs", "unknown field"),
        ('{"data": "d", "training": {"batch_size": "big"}}', "$.training.batch_size", "got 'big'"),
    ],
)
def test_a_wrong_run_description(tmp_path: Path, text: str, place: str, problem: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(text)
    rejected("train", config, "--out", tmp_path / "run", where=f"{config}: {place}", problem=problem)
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


def test_a_port_that_is_taken_or_none(workshop: Workshop) -> None:
    rejected("serve", workshop.run, "--port", 70000, where="--port", problem="got 70000")


@pytest.mark.parametrize(
    ("flags", "where", "problem"),
    [
        ([], "", "got no column to learn from"),
        (["--dense", "x", "--format", "csv"], "--format", "got 'csv'"),
        (["--dense", "x", "--delimiter", ';"'], "--delimiter", "got ';\"'"),
        (["--dense", "x", "--valid-fraction", "1"], "--valid-fraction", "got 1.0"),
        (["--dense", "x", "--valid-fraction", "0.5", "--valid", "v.csv"], "--valid-fraction", "(--valid)"),
        (["--buckets", "x=1"], "--buckets", "got 1 for 'x'"),
        (["--dense", "x", "--name", "a/b"], "--name", "got 'a/b'"),
        (["--dense", "x", "--out", "."], "--out", f"{Path.cwd()} exists"),
    ],
)
def test_wrong_options_of_csv_are_named_as_typed(tmp_path: Path, flags: list[str], where: str, problem: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,y\n1,0\n2,1\n")
    out = [] if "--out" in flags else ["--out", tmp_path / "data"]
    rejected("prepare", "csv", path, "--label", "y", *out, *flags, where=where, problem=problem)


def test_a_last_day_of_one_file_names_the_option(workshop: Workshop, tmp_path: Path) -> None:
    day = workshop.raw / "day_0.tsv"
    rejected("prepare", "criteo", day, "--out", tmp_path / "data", "--valid-last-day", where="--valid-last-day")


@pytest.mark.parametrize("policy", ["raise", "skip", "missing"])
def test_quoted_text_is_not_a_row_of_the_data_set(tmp_path: Path, policy: str) -> None:
    """A quoted field with line ends adds no row, even in a column that is not used."""
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
    ("rows", "column", "hint"),
    [
        ("2,1,a\n0,1,b\n", "label", "--positive"),
        (",1,a\n0,1,b\n", "label", "--bad-input skip"),
        ('0,1,"a"b\n', "note", "closing quote"),
    ],
)
def test_hints_name_options_and_columns(tmp_path: Path, rows: str, column: str, hint: str) -> None:
    """The hint names an option as typed, and an unused column by its name."""
    path = tmp_path / "log.csv"
    path.write_text(f"label,x,note\n{rows}")
    prepare = ["prepare", "csv", path, "--label", "label", "--dense", "x", "--out", tmp_path / "d"]
    rejected(*prepare, error=FormatError, where=f"{path}: line 2, column '{column}'", problem=hint)


@pytest.mark.parametrize("name", ["workflow.json", "dataset.json"])
def test_deep_json_is_reported(tmp_path: Path, name: str) -> None:
    """JSON that is nested 1,000 levels deep and more ends in one line."""
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
            # A finalizer that runs on a full stack cannot be called and prints a line: no garbage of other tests there.
            gc.collect()
            ended = terarec(*command)
            assert ended.code in (1, 2)
            assert ended.err.count("\n") == 1
            assert len(ended.err) < 2000


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("generate", "criteo", "--rows", "1.5"), "--rows"),
        (("generate", "criteo", "--rows", "5", "--seed", "-1"), "--seed"),
        (("train", "--data", "d", "--epochs", "two"), "--epochs"),
        (("generate", "movielens", "--rows", "5", "--layout", "2m"), "--layout"),
    ],
)
def test_a_rejected_value_is_shown(arguments: tuple[str, ...], option: str, tmp_path: Path) -> None:
    reported = rejected(*arguments, "--out", tmp_path / "out", where=option, problem=repr(arguments[-1]))
    assert "Value error" not in reported["error"]


def test_a_rejected_choice_is_shown_with_the_accepted_ones(tmp_path: Path) -> None:
    arguments = ("generate", "movielens", "--rows", "5", "--layout", "2m", "--out", tmp_path / "out")
    rejected(*arguments, where="--layout", problem="latest")
