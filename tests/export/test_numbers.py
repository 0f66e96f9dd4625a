# SPDX-License-Identifier: Apache-2.0
"""Files with rows and layers in narrower numbers, against the model in the same numbers, and their AUC."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from terarec.batch import Batch
from terarec.errors import ConfigError
from terarec.export import export_model
from terarec.export.artifact import EXPORT_FILE
from terarec.models.narrow import narrow
from terarec.nn.precision import autocast
from terarec.spec import Numbers
from tests.errors import at
from tests.export.samples import run_export
from tests.export.test_models import feed_of, trained
from tests.models.every import dataset, random_batch
from tests.params import in_every_run

COLUMNS = dataset(labels=1)


def scores_of(out: Path, batch: Batch) -> np.ndarray:
    description = json.loads((out / EXPORT_FILE).read_text())
    return next(iter(run_export(out, feed_of(description, batch, torch.nn.Identity())).values()))


def area(scores: np.ndarray, labels: np.ndarray) -> float:
    """The share of pairs of a positive and a negative in the right order; equal scores count half."""
    pairs = scores[labels == 1][:, None] - scores[labels == 0][None]
    return float(np.mean((pairs > 0) + 0.5 * (pairs == 0)))


@pytest.mark.parametrize(
    ("file_format", "row_type", "precision", "tolerance"),
    in_every_run(
        [("torchscript", "int8", "int8", 1e-6)],
        [
            ("torchscript", "int8", "int8", 1e-6),
            ("onnx", "int8", None, 1e-5),
            ("onnx", "int8", "int8", 0.05),
            ("torch", "int8", "bf16", 0.02),
            ("torch", "fp32", "fp16", 0.005),
            ("torchscript", "fp32", "bf16", 0.02),
        ],
    ),
)
def test_scores_are_those_of_the_model_in_the_same_numbers(
    tmp_path: Path, file_format: str, row_type: str, precision: str | None, tolerance: float
) -> None:
    numbers, batch = Numbers(row_type=row_type, precision=precision), random_batch(COLUMNS, 64)
    batch = replace(batch, label=torch.arange(64).remainder(3).eq(0).float()[:, None])
    plain, narrowed = trained("dlrm", COLUMNS), narrow(trained("dlrm", COLUMNS), numbers)
    with torch.no_grad():
        before = plain(batch).sigmoid().numpy()
        with autocast(precision if precision in ("bf16", "fp16") else "fp32"):
            expected = narrowed(batch).sigmoid().float().numpy()
    out = tmp_path / "out"
    report = export_model(
        trained("dlrm", COLUMNS), out, dataset=COLUMNS, format=file_format, numbers=numbers, samples=[batch]
    )
    found = scores_of(out, batch)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
    assert np.abs(found - before).max() > 1e-6
    labels = batch.label.numpy()[:, 0]
    assert report.auc == pytest.approx(area(found[:, 0], labels), abs=1e-6)
    assert report.auc_change == pytest.approx(report.auc - area(before[:, 0], labels), abs=1e-6)
    described = json.loads((out / EXPORT_FILE).read_text())
    assert (described["row_type"], described["precision"]) == (row_type, precision or "fp32")
    assert described["auc_change"] == report.auc_change
    assert report.max_abs_difference <= described["tolerance"]


ALL_INT8 = Numbers(row_type="int8", precision="int8")


@pytest.mark.parametrize(
    ("file_format", "numbers", "tables"),
    in_every_run(
        [("torchscript", ALL_INT8, True)],
        [
            *itertools.product(
                ["onnx", "torchscript"], [Numbers(row_type="int8"), Numbers(precision="int8"), ALL_INT8], [True, False]
            ),
            ("torch", Numbers(row_type="int8", precision="bf16"), True),
            ("torch", Numbers(precision="fp16"), False),
        ],
    ),
)
def test_graphs_in_narrower_numbers(tmp_path: Path, file_format: str, numbers: Numbers, tables: bool) -> None:
    batch = random_batch(COLUMNS, 64)
    batch = replace(batch, label=torch.arange(64).remainder(3).eq(0).float()[:, None])
    plain, narrowed = trained("graph", COLUMNS), narrow(trained("graph", COLUMNS), numbers)
    with torch.no_grad():
        before = plain.predict(batch).numpy()
        with autocast(numbers.precision if numbers.precision in ("bf16", "fp16") else "fp32"):
            expected = narrowed.predict(batch).numpy()
    out = tmp_path / "out"
    report = export_model(
        trained("graph", COLUMNS),
        out,
        dataset=COLUMNS,
        format=file_format,
        numbers=numbers,
        samples=[batch],
        tables=tables,
    )
    description = json.loads((out / EXPORT_FILE).read_text())
    found = next(iter(run_export(out, feed_of(description, batch, narrowed)).values()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 if numbers.precision is None else 0.05)
    assert np.abs(found - before).max() > 1e-6
    labels = batch.label.numpy()[:, 0]
    assert report.auc == pytest.approx(area(found[:, 0], labels), abs=1e-6)
    assert report.auc_change == pytest.approx(report.auc - area(before[:, 0], labels), abs=1e-6)
    assert (description["row_type"], description["precision"]) == (numbers.row_type, numbers.precision or "fp32")


def test_scores_of_an_onnx_file_in_int8_do_not_depend_on_the_records_beside(tmp_path: Path) -> None:
    """A server joins requests: a large number of one client made the scores of others inexact."""
    batch, out = random_batch(COLUMNS, 8), tmp_path / "out"
    export_model(trained("dlrm", COLUMNS), out, dataset=COLUMNS, format="onnx", numbers=Numbers(precision="int8"))
    dense = batch.dense.clone()
    dense[0] = 1e6
    beside = scores_of(out, replace(batch, dense=dense))
    np.testing.assert_allclose(beside[1:], scores_of(out, batch)[1:], rtol=0, atol=1e-6)


def test_vectors_of_narrower_rows_are_those_of_a_file_without_tables(tmp_path: Path) -> None:
    batch = random_batch(COLUMNS, 64)
    batch = replace(batch, label=torch.arange(64).remainder(3).eq(0).float()[:, None])
    numbers = Numbers(row_type="int8")
    with torch.no_grad():
        expected = narrow(trained("lr", COLUMNS), numbers)(batch).sigmoid().numpy()[:, 0]
    model = trained("lr", COLUMNS)
    out = tmp_path / "out"
    report = export_model(
        model, out, dataset=COLUMNS, format="torchscript", numbers=numbers, samples=[batch], tables=False
    )
    assert report.max_abs_difference <= 1e-5
    assert report.auc == pytest.approx(area(expected, batch.label.numpy()[:, 0]), abs=1e-6)


@pytest.mark.parametrize(
    ("file_format", "numbers", "tables", "field"),
    [
        ("onnx", Numbers(precision="bf16"), True, "precision"),
        ("torch", Numbers(precision="int8"), False, "precision"),
    ],
)
def test_numbers_that_a_file_cannot_hold(
    tmp_path: Path, file_format: str, numbers: Numbers, tables: bool, field: str
) -> None:
    with pytest.raises(ConfigError, check=at(field)):
        export_model(
            trained("lr", COLUMNS),
            tmp_path / "out",
            dataset=COLUMNS,
            format=file_format,
            numbers=numbers,
            tables=tables,
        )
    assert list(tmp_path.iterdir()) == []


def test_samples_of_one_class_have_no_auc(tmp_path: Path) -> None:
    """Finding N4: NaN was to be written as JSON, and the export was lost at its end."""
    batch = replace(random_batch(COLUMNS, 8), label=torch.zeros(8, 1))
    model = trained("dlrm", COLUMNS)
    report = export_model(
        model,
        tmp_path / "out",
        dataset=COLUMNS,
        format="torchscript",
        numbers=Numbers(row_type="int8"),
        samples=[batch],
    )
    assert math.isnan(report.auc)
    assert json.loads((tmp_path / "out" / EXPORT_FILE).read_text())["auc"] is None
