# SPDX-License-Identifier: Apache-2.0
"""Golden records: what is written is read, and scores beyond the tolerance are rejected."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from terarec.batch import Batch, Jagged, slice_samples
from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.formats.container import read_tensors, write_tensors
from terarec.serve.golden import GoldenRecords, repeated, tolerance
from terarec.spec import DLRMSpec, Numbers, RunSpec, TrainingSpec
from tests.errors import at


def batch_of(lengths: list[list[int]], *, is_weighted: bool = False) -> Batch:
    """A batch with bags of some lengths: one list for each feature."""
    sizes = [length for feature in lengths for length in feature]
    keys = torch.arange(sum(sizes))
    sparse = Jagged(
        names=tuple(f"c{number}" for number in range(len(lengths))),
        keys=keys,
        offsets=torch.tensor([0, *np.cumsum(sizes).tolist()], dtype=torch.int64),
        weights=keys.float() + 0.5 if is_weighted else None,
    )
    samples = len(lengths[0])
    return Batch(dense=torch.arange(2.0 * samples).view(samples, 2), label=torch.zeros(samples, 1), sparse=sparse)


def score(batch: Batch) -> npt.NDArray[np.float32]:
    """A score that depends on all of a sample."""
    lengths = batch.sparse.offsets.diff()
    values = torch.stack([part.float().sum() for part in batch.sparse.keys.split(lengths.tolist())])
    sums = values.view(len(batch.sparse.names), -1).sum(0) + batch.dense.sum(1)
    return (sums[:, None] / 1000).numpy()


@pytest.mark.parametrize("is_weighted", [False, True])
def test_what_is_written_is_read(tmp_path: Path, *, is_weighted: bool) -> None:
    golden = GoldenRecords.of(batch_of([[1, 0, 2], [3, 1, 1]], is_weighted=is_weighted), score)
    golden.write(tmp_path / "golden.safetensors")
    found = GoldenRecords.read(tmp_path / "golden.safetensors")
    assert found.batch.sparse.names == ("c0", "c1")
    assert torch.equal(found.batch.dense, golden.batch.dense)
    assert torch.equal(found.batch.sparse.keys, golden.batch.sparse.keys)
    assert torch.equal(found.batch.sparse.offsets, golden.batch.sparse.offsets)
    assert (found.batch.sparse.weights is not None) == is_weighted
    assert found.check(score) == 0.0


def test_a_difference_beyond_the_tolerance_is_rejected() -> None:
    golden = GoldenRecords.of(batch_of([[1, 1]]), score)
    assert golden.check(lambda batch: score(batch) + np.float32(5e-5)) == pytest.approx(5e-5, rel=1e-2)
    for wrong in (2e-4, float("nan")):
        with pytest.raises(ConfigError, check=at("golden records", "off those of the run")):
            golden.check(lambda batch, wrong=wrong: score(batch) + np.float32(wrong))  # type: ignore[misc]
    with pytest.raises(ConfigError, check=at("golden records", "got scores [2, 2], expected [2, 1]")):
        golden.check(lambda batch: np.concatenate([score(batch)] * 2, axis=1))


def test_scores_that_are_no_numbers_are_not_written() -> None:
    with pytest.raises(ConfigError, check=at("golden records", "scores sample 1")):
        GoldenRecords.of(batch_of([[1, 1]]), lambda _: np.array([[0.5], [np.nan]], dtype=np.float32))
    with pytest.raises(ConfigError, check=at("golden records", "no samples")):
        GoldenRecords.of(slice_samples(batch_of([[1, 1]]), 0, 0), score)


def test_the_tolerance_is_that_of_the_numbers() -> None:
    def run(precision: str) -> RunSpec:
        return RunSpec(data="x", model=DLRMSpec(), training=TrainingSpec(precision=precision))  # type: ignore[arg-type]

    assert tolerance(Numbers(), run("fp32")) == 1e-4
    assert tolerance(Numbers(), run("bf16")) == 0.02
    assert tolerance(Numbers(precision="fp32"), run("bf16")) == 1e-4
    assert tolerance(Numbers(precision="int8"), run("fp32")) == 0.05
    assert tolerance(Numbers(row_type="int8"), run("fp32")) == 0.05


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=3), st.integers(0, 10))
def test_a_batch_is_repeated_sample_by_sample(lengths: list[list[int]], size: int) -> None:
    batch = batch_of(lengths, is_weighted=True)
    found = repeated(batch, size)
    assert found.batch_size == size
    for number in range(size):
        mine, its = slice_samples(found, number, number + 1), slice_samples(batch, number % 3, number % 3 + 1)
        assert torch.equal(mine.dense, its.dense)
        assert torch.equal(mine.sparse.keys, its.sparse.keys)
        assert torch.equal(mine.sparse.offsets, its.sparse.offsets)
        assert mine.sparse.weights is not None
        assert its.sparse.weights is not None
        assert torch.equal(mine.sparse.weights, its.sparse.weights)


def test_a_damaged_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "golden.safetensors"
    with pytest.raises(DataNotFoundError, check=at(path)):
        GoldenRecords.read(path)
    GoldenRecords.of(batch_of([[1, 0, 2], [3, 1, 1]]), score).write(path)
    arrays, metadata = read_tensors(path)
    falling = arrays["offsets"].copy()
    falling[2] = 5
    for changes, words in (
        ({"offsets": falling}, "expected offsets rising"),
        ({"scores": arrays["scores"][:2]}, "got 2 scores for 3 samples"),
        ({"keys": arrays["keys"].astype(np.float32)}, "expected int64"),
        ({"dense": arrays["dense"][:1]}, "got 3 scores for 1 samples"),
    ):
        write_tensors(path, arrays | changes, metadata)
        with pytest.raises(FormatError, match=words):
            GoldenRecords.read(path)
    for changed in ({"features": "[1"}, {"labels": "x"}, {"version": "2"}, {"format": "other"}):
        write_tensors(path, arrays, metadata | changed)
        with pytest.raises(FormatError):
            GoldenRecords.read(path)
    write_tensors(path, {name: array for name, array in arrays.items() if name != "keys"}, metadata)
    with pytest.raises(FormatError):
        GoldenRecords.read(path)
