# SPDX-License-Identifier: Apache-2.0
"""Ranks that decode their own samples alone: metrics of all samples, and runs on HugeCTR's files, as in one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.data import InMemorySource, RankShare, Reader
from terarec.data.records import write_as_records
from terarec.dist import Ranks
from terarec.spec import (
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    LabelColumn,
    MetadataColumn,
    RecordOptions,
)
from terarec.train.evaluation import Evaluator
from tests.data.records.samples import break_checksum
from tests.dist.launch import Raised, run_ranks
from tests.dist.test_training import check_close, fit, on_ranks, run_spec
from tests.train.planted import make_planted

ROWS = 103
COLUMNS = DatasetSpec(
    name="rated",
    storage="parquet",
    labels=(LabelColumn(name="y"),),
    dense=(DenseColumn(name="x"), DenseColumn(name="z")),
    categorical=(CategoricalColumn(name="user", rows=9, hotness=1),),
    workflow="workflow",  # so that user 0 is a missing one
    weight="w",
    metadata=(MetadataColumn(name="country", type="string"),),
)


class Scores(nn.Module):
    """A logit from the dense numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.tensor([1.5, -0.5]))

    def forward(self, batch: Batch) -> Tensor:
        return (batch.dense * self.factors).sum(1, keepdim=True)


def rated() -> InMemorySource:
    rng = np.random.default_rng(5)
    dense = rng.normal(size=(ROWS, 2)).astype(np.float32)
    label = (dense[:, :1] + rng.normal(size=(ROWS, 1)) > 0).astype(np.float32)
    users = rng.integers(0, 9, ROWS)
    countries = [["at", "be", None][number % 3] for number in range(ROWS)]
    weight = rng.random(ROWS).astype(np.float32)
    return InMemorySource(COLUMNS, label, dense, [users], weight=weight, metadata={"country": countries})


def evaluated(ranks: Ranks, *, is_share: bool) -> list[dict[str, Any]]:
    """Return metrics by groups and slices of both kinds of columns, of full batches and of batches with idle ranks."""
    found = []
    for batch_size, group in ((40, "user"), (34, "country"), (2, "country")):
        reader = Reader(rated(), batch_size=batch_size)
        if is_share:
            reader.take_share(RankShare(rank=ranks.rank, size=ranks.size, is_span=True))
        metrics = ("auc", "logloss", "gauc", "average_loss")
        evaluator = Evaluator(metrics=metrics, group=group, slices=("country", "user"), ranks=ranks)
        result = evaluator.evaluate(Scores(), reader)
        found.append({"rows": result.rows, **result.results.to_json()})
    return found


def flattened(value: object, at: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {path: held for name, part in value.items() for path, held in flattened(part, f"{at}.{name}").items()}
    if isinstance(value, list | tuple):
        parts = enumerate(value)
        return {path: held for number, part in parts for path, held in flattened(part, f"{at}[{number}]").items()}
    return {at: value}


def test_metrics_of_shares_are_those_of_all_samples() -> None:
    expected = flattened(evaluated(Ranks(), is_share=False))
    assert len(expected) > 60
    for result in run_ranks(3, on_shares):
        assert not isinstance(result, Raised | str), result
        found = flattened(result)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), name


def on_shares(ranks: Ranks) -> list[dict[str, Any]]:
    return evaluated(ranks, is_share=True)


@pytest.mark.parametrize("kind", ["norm", pytest.param("parquet", marks=pytest.mark.slow)])
def test_a_run_on_hugectrs_files_with_wrong_checksums_equals_one_process(tmp_path: Path, kind: Any) -> None:
    make_planted(tmp_path / "data", train=400, valid=151, rows_per_group=100)
    write_as_records(tmp_path / "data", tmp_path / "files", RecordOptions(kind=kind))
    if kind == "norm":
        for split, records in (("train", (0, 17, 399)), ("valid", (3, 150))):
            for record in records:
                break_checksum(next((tmp_path / "files" / split).glob("*.data")), record)
    spec = run_spec(tmp_path / "files", epochs=2, batch_size=64)
    expected = fit(Ranks(), spec, tmp_path / "one", None, False)
    found = on_ranks(2, spec, tmp_path / "many", None, False)
    check_close(found, expected)
    assert found["samples"] == expected["samples"]
