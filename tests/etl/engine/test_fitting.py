# SPDX-License-Identifier: Apache-2.0
"""Rows that are counted while the first steps learn: the same results as by a phase of its own, in one pass less."""

from collections.abc import Callable
from pathlib import Path

import pytest

from terarec.errors import ConfigError, FormatError
from terarec.etl import prepare
from terarec.etl.ops import Categorify, LogOp
from terarec.etl.source import source as source_module
from terarec.etl.source.delimited import DelimitedReader
from terarec.etl.workflow import Workflow
from terarec.spec import LabelSpec, PrepareOptions, Split, SplitByFiles, SplitByFraction
from tests.errors import at
from tests.etl.engine.contents import contents
from tests.etl.engine.logs import SOURCE, shop_files, shop_workflow


def workflow(split: Split) -> Workflow:
    """Two fit phases."""
    return Workflow(
        [
            LogOp(columns=("price",), shift=None, outputs=("log_price",)),
            Categorify(columns=("user", "item"), min_count=2),
            Categorify(columns=("tags",), min_count=2),
            LogOp(columns=("log_price",), shift=None, outputs=("twice",)),
        ],
        source=SOURCE,
        labels=[LabelSpec(name="bought")],
        categorical=["user", "item"],
        split=split,
    )


def set_block_bytes(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    """Read delimited text in blocks of such a size."""
    readers = {"delimited": lambda spec: DelimitedReader(spec, block_bytes)}
    monkeypatch.setattr(source_module, "_READERS", readers)


@pytest.mark.parametrize(
    "split",
    [SplitByFraction(valid=0.1, test=0.2), SplitByFiles(valid=1), SplitByFiles(valid=0, test=1, valid_fraction=0.25)],
)
@pytest.mark.parametrize("longer", [slice(0), slice(0, 300), slice(300, 600)])
def test_results_do_not_depend_on_what_was_fitted_while_counting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: Split, longer: slice
) -> None:
    """Longer lines in the one half leave much for after the count, or let too many rows be observed before."""
    log = shop_files(tmp_path / "raw", files=3)
    for path in log:
        lines = path.read_text().splitlines()
        numbers = range(200 * log.index(path), 200 * log.index(path) + 200)
        path.write_text(
            "".join(
                line + " tag" * 20 * (n in range(600)[longer]) + "\n" for n, line in zip(numbers, lines, strict=True)
            )
        )
    reports = []
    for out, block_bytes in (("whole", 1 << 20), ("blocks", 1000)):
        set_block_bytes(monkeypatch, block_bytes)
        reports.append(prepare(workflow(split), log, tmp_path / out, PrepareOptions()))
    assert contents(tmp_path / "whole") == contents(tmp_path / "blocks")
    assert [phase.name for phase in reports[1].phases] == ["fit 1", "fit 2", "write"]
    again = longer.start == 300 and split != SplitByFiles(valid=1)
    assert (reports[1].phases[0].rows > 600) == again


@pytest.mark.parametrize("make", [workflow, shop_workflow], ids=["while learning", "before"])
def test_a_log_of_one_bad_line_reports_the_line(tmp_path: Path, make: Callable[[Split], Workflow]) -> None:
    path = tmp_path / "log.tsv"
    path.write_text("1,2\n")
    split = SplitByFraction(valid=0.1)
    with pytest.raises(FormatError, check=at(f"{path}: line 1")):
        prepare(make(split), [path], tmp_path / "out", PrepareOptions())
    with pytest.raises(ConfigError, check=at("split")):
        prepare(make(split), [path], tmp_path / "out", PrepareOptions(bad_input="skip"))
