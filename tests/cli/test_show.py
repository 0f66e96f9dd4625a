import json
import math
from typing import Any

import pytest

from terarec.cli.figures import byte_text, label, text
from terarec.cli.show import Show


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
