# SPDX-License-Identifier: Apache-2.0

from pathlib import Path

from tests.cli.conftest import Workshop, figures


def test_predict_tells_its_memory_as_evaluate_does(workshop: Workshop, tmp_path: Path) -> None:
    reported = figures("predict", workshop.run, "--data", workshop.data, "--out", tmp_path / "scores.parquet")
    assert reported["peak_memory_bytes"] > 2**20
