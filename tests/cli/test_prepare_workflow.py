# SPDX-License-Identifier: Apache-2.0
"""``terarec prepare WORKFLOW``."""

from pathlib import Path

import pytest

from terarec.errors import ConfigError, DataNotFoundError
from terarec.spec import SplitByFiles
from tests.cli.conftest import figures, rejected, terarec
from tests.etl.engine.logs import shop_files, shop_workflow


@pytest.fixture
def shop(tmp_path: Path) -> tuple[Path, list[Path]]:
    """A workflow's file, and logs."""
    shop_workflow().to_json(tmp_path / "shop.json")
    return tmp_path / "shop.json", shop_files(tmp_path / "raw")


def test_a_workflow_of_ones_own_and_the_fitted_one(shop: tuple[Path, list[Path]], tmp_path: Path) -> None:
    workflow, log = shop
    reported = figures("prepare", workflow, *log, "--out", tmp_path / "data", "--shuffle", "--memory", 1)
    assert reported["splits"] == {"train": 510, "valid": 60, "test": 30}
    assert [phase["name"] for phase in reported["phases"]] == ["split", "group", "fit 1", "fit 2", "write"]
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    section = page.split("## terarec prepare criteo")[1].split("\n## ")[0]
    assert {name for name in reported if f"`{name}`" not in section} == set()
    again = figures(
        "prepare",
        tmp_path / "data" / "workflow",
        tmp_path / "raw",
        "--out",
        tmp_path / "again",
        "--earlier-rows",
        "none",
    )
    assert again["splits"] == reported["splits"]
    assert [phase["name"] for phase in again["phases"]] == ["split", "group", "write"]


def test_a_ready_workflow_by_its_name(tmp_path: Path) -> None:
    figures("generate", "avazu", "--rows", 300, "--out", tmp_path / "raw")
    raw = next((tmp_path / "raw").glob("*.csv"))
    reported = figures("prepare", "avazu", raw, "--out", tmp_path / "data")
    assert reported["rows"] == 300


def test_what_people_read(shop: tuple[Path, list[Path]], tmp_path: Path) -> None:
    workflow, log = shop
    with log[0].open("a") as file:
        file.write("1\t2\n")
    ended = terarec("prepare", workflow, *log, "--out", tmp_path / "data", "--bad-input", "skip")
    assert ended.code == 0
    assert f"{log[0]}: line 301: found 2 fields, expected 6" in ended.out
    for words in ("Splits", "Columns", "Embedding table sizes", "Phases", "Bad input"):
        assert words in ended.out


def test_a_data_set_for_hugectr(shop: tuple[Path, list[Path]], tmp_path: Path) -> None:
    workflow, log = shop
    figures("prepare", workflow, *log, "--out", tmp_path / "data", "--format", "norm", "--rows-per-shard", 100)
    assert (tmp_path / "data" / "records.json").exists()
    assert len(list((tmp_path / "data" / "train").glob("part-*.keyset"))) == 6


@pytest.mark.parametrize(
    ("arguments", "error", "where", "problem"),
    [
        (["nosuch", "a.csv"], ConfigError, "WORKFLOW", "got nosuch"),
        (["SHOP", "RAW", "--table", "news"], ConfigError, "--table", "got 'news'"),
        (["SHOP", "RAW", "--bad-input", "ignore"], ConfigError, "--bad-input", "got 'ignore'"),
        (["SHOP", "RAW", "--format", "csv"], ConfigError, "--format", "got 'csv'"),
        (["SHOP", "RAW", "--master", "local[2]"], ConfigError, "--master", "'local'"),
        (["SHOP", "RAW", "--memory", "0.001"], ConfigError, "--memory", "0.0625"),
        (["SHOP", "RAW", "--leave-one-out", "user"], ConfigError, "--leave-one-out", "got 'user', expected USER=TIME"),
        (["SHOP", "RAW", "--leave-one-out", "who=time"], ConfigError, "split", "column 'who' does not exist"),
        (
            ["SHOP", "RAW", "--leave-one-out", "user=time", "--split", "test"],
            ConfigError,
            "--leave-one-out",
            "got split (--split) as well",
        ),
        (["SHOP", "nosuch.csv"], DataNotFoundError, "nosuch.csv", ""),
    ],
)
def test_what_is_wrong_is_reported_in_one_line(
    shop: tuple[Path, list[Path]], tmp_path: Path, arguments: list[str], error: type, where: str, problem: str
) -> None:
    places = {"SHOP": str(shop[0]), "RAW": str(shop[1][0])}
    words = [places.get(argument, argument) for argument in arguments]
    rejected("prepare", *words, "--out", tmp_path / "data", error=error, where=where, problem=problem)
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "data.partial").exists()


def test_the_last_rows_of_users_are_left_out(shop: tuple[Path, list[Path]], tmp_path: Path) -> None:
    """Of a workflow, instead of its split, and of a CSV file whose other columns are not read."""
    workflow, log = shop
    splits = figures("prepare", workflow, *log, "--out", tmp_path / "a", "--leave-one-out", "user=time")["splits"]
    assert splits["valid"] == splits["test"] > 50
    table = tmp_path / "a.csv"
    table.write_text("y,who,item,when\n" + "".join(f"{row % 2},u{row % 3},i{row},{9.5 - row}\n" for row in range(8)))
    arguments = ("prepare", "csv", table, "--out", tmp_path / "b", "--label", "y", "--categorical", "item")
    reported = figures(*arguments, "--leave-one-out", "who=when")
    assert reported["splits"] == {"train": 4, "valid": 2, "test": 2}
    assert [column["name"] for column in reported["columns"]] == ["y", "item"]
    other = ("--leave-one-out", "who=when", "--valid-fraction", 0.1)
    rejected(*arguments, *other, error=ConfigError, where="--leave-one-out", problem="got another split as well")


def test_the_last_day_is_validated(tmp_path: Path) -> None:
    """Finding N1: `raw/day_*.tsv`, which a shell sorts as texts, validates on day 11; the report names the files."""
    shop_workflow(SplitByFiles(valid=1)).to_json(tmp_path / "shop.json")
    log = shop_files(tmp_path / "raw", files=12)
    listed = sorted(map(str, log))
    reported = figures("prepare", tmp_path / "shop.json", *listed, "--out", tmp_path / "data")
    assert [file["file"] for file in reported["files"]] == list(map(str, log))
    assert [list(file["splits"]) for file in reported["files"]] == [["train"]] * 11 + [["valid"]]
    out = terarec("prepare", tmp_path / "shop.json", tmp_path / "raw", "--out", tmp_path / "again").out
    table = out.split("Files of the splits")[1].split("\n\n")[0]
    assert "day_10.tsv" in table
    assert "day_11.tsv" in table
