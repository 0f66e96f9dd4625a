# SPDX-License-Identifier: Apache-2.0

import json
import math
from typing import Any

import pytest

from terarec.reports.text import Show, byte_text, label, text


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("auc", 0.123456789, "0.12346"),
        ("logloss", math.nan, "-"),
        ("report", None, "-"),
        ("rows", 1234567, "1,234,567"),
        ("peak_memory_bytes", 3 * 2**29, "1.5 GiB"),
        ("bytes", 1023, "1,023 B"),
        ("rows_per_second", 123456.7, "123,457 /s"),
        ("seconds", 1.26, "1.3 s"),
        ("missing_share", 0.25, "25.00 %"),
        ("port", 8000, "8000"),
        ("ok", True, "yes"),
        ("out", "[red]run", "[red]run"),
        ("loss", 12345.678, "1.235e+04"),
        ("loss", 0.0, "0.00000"),
    ],
)
def test_a_figure_reads_with_its_unit(name: str, value: object, expected: str) -> None:
    assert text(name, value) == expected


def test_the_largest_unit_of_bytes_has_no_end() -> None:
    assert byte_text(5000 * 2**40) == "5,000.0 TiB"
    assert label("peak_memory_bytes") == "peak memory"
    assert label("best_auc") == "best reachable AUC"


def test_json_is_the_last_line_of_stdout_and_all_else_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    show = Show(as_json=True)
    show.line("a [red]word[/red]")
    show.result("Title [b]", {"auc": math.nan, "loss": math.inf, "list": [1.5, -math.inf], "path": "[green]x"})
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"auc": None, "loss": None, "list": [1.5, None], "path": "[green]x"}
    assert captured.out.count("\n") == 1
    assert "a [red]word[/red]\n" in captured.err
    assert "Title [b]" in captured.err
    assert "[green]x" in captured.err


def test_without_json_people_read_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    show = Show(as_json=False)
    with show.progress("working", "rows") as progress:
        progress(1, 2)
    rows: list[dict[str, Any]] = [{"table": "a", "rows": 1, "x": None}, {"table": "b", "rows": None, "x": None}]
    show.table("tables", rows)
    show.table("none", [])
    show.json({"not": "shown"})
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.split() == ["tables", "table", "rows", "a", "1", "b", "-"]


def wide_rows() -> list[dict[str, Any]]:
    return [
        {"table": f"feature_{row}", **{f"long_figure_{place}": 1000 + place for place in range(9)}} for row in (1, 2)
    ]


def test_a_pipe_gets_every_row_in_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are not cut by the width of a terminal that does not show them."""
    monkeypatch.setenv("COLUMNS", "80")
    show = Show(as_json=False)
    show.table("tables", wide_rows())
    show.figures("run", {"checkpoint": "/a/long/path" * 20})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["table", *(word for place in range(9) for word in ("long", "figure", str(place)))]
    assert [line.split()[0] for line in lines[2:4]] == ["feature_1", "feature_2"]
    assert "/a/long/path" * 20 in lines[-1]


def test_a_narrow_terminal_gets_columns_in_groups(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group repeats the first column."""
    for name, value in {"COLUMNS": "80", "FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    show = Show(as_json=False)
    assert show.console.is_terminal
    show.table("tables", wide_rows())
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if "feature_1" in line]
    assert len(rows) == 3
    assert [word for line in rows for word in line.split()[1:]] == [f"{1000 + place:,}" for place in range(9)]
    assert max(map(len, rows)) <= 80


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\nb\r\x07", "a\\nb\\r\\x07"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\x9b31m", "\\x9b31m"),
        ("\u6771\u4eac Z\u00fcrich", "\u6771\u4eac Z\u00fcrich"),
    ],
)
def test_what_data_hold_does_not_steer_the_terminal(value: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """E6."""
    show = Show(as_json=False)
    show.line(value)
    show.figures(value, {"value": value})
    show.table(value, [{"value": value, value: 1}])
    out = capsys.readouterr().out
    assert out.count(shown) == 6
    assert not {character for character in out if not character.isprintable()} - {"\n"}
