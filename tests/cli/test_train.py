"""``terarec train`` from end to end, on small data of its own."""

from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import figures

SHAPE = ["--model", "wide_deep", "--width", 2, "--hidden", "4", "--batch-size", 50]


def write_csv(path: Path, *, rows: int = 300, labels: tuple[float, ...] = (0, 1), seed: int = 0) -> Path:
    """A label that follows ``x``, a number, and a category of seven values."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=rows)
    label = np.array(labels)[(x + rng.normal(size=rows) > 0).astype(int) * (len(labels) - 1)]
    lines = [f"{y:g},{a:.3f},c{c}" for y, a, c in zip(label, x, rng.integers(0, 7, rows), strict=True)]
    path.write_text("\n".join(["y,x,c", *lines]) + "\n")
    return path


def prepare(folder: Path, name: str = "data", **columns: object) -> Path:
    """A data set of `write_csv` with a fifth of its rows for validation."""
    raw = write_csv(folder / f"{name}.csv", **columns)
    out = folder / name
    columns_of = ["--label", "y", "--dense", "x", "--categorical", "c", "--valid-fraction", 0.2]
    figures("prepare", "csv", raw, "--out", out, *columns_of)
    return out


@pytest.mark.parametrize("labels", [(0.25, 0.75), (0.0, 0.3, 1.0)])
def test_labels_between_0_and_1_are_trained_and_evaluated(tmp_path: Path, labels: tuple[float, ...]) -> None:
    """B3: they were prepared and trained for an epoch, then refused, and the run was deleted."""
    data = prepare(tmp_path, labels=labels)
    trained = figures("train", *SHAPE, "--data", data, "--out", tmp_path / "run")
    evaluated = figures("evaluate", tmp_path / "run", "--data", data)
    assert evaluated["auc"] == pytest.approx(trained["auc"])
    assert evaluated["logloss"] == pytest.approx(trained["logloss"])
    assert 0 < trained["auc"] < 1
