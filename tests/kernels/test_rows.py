# SPDX-License-Identifier: Apache-2.0
"""Arenas and the initial values of rows."""

import gc

import numpy as np
import pytest
import torch

from terarec.errors import ConfigError, StorageError
from terarec.kernels.cpu.rows import fill_rows
from terarec.kernels.ref.rows import allocate_rows as allocate_rows_ref
from terarec.kernels.ref.rows import fill_rows as fill_rows_ref
from terarec.kernels.rows import allocate_rows, initialise_rows
from tests.errors import at


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (7,), (1000, 17), (5, 3, 2)])
def test_arenas_are_zeroed_aligned_and_writable(shape):
    rows = allocate_rows(shape)
    assert rows.shape == shape
    assert rows.dtype == np.float32
    assert not rows.any()
    assert rows.ctypes.data % 64 == 0
    rows += 1.0
    assert float(rows.sum()) == rows.size


def test_an_arena_lives_as_long_as_its_views():
    view = torch.from_numpy(allocate_rows((1000, 64)))[10:20]
    gc.collect()
    view.fill_(3.0)
    assert float(view.sum()) == 3.0 * 10 * 64


@pytest.mark.parametrize("allocate", [allocate_rows, allocate_rows_ref])
def test_rejected_memory_names_its_bytes(allocate):
    with pytest.raises(StorageError, check=at("rows float32[1000000000, 1000000]", f"{4 * 10**15:,} bytes")):
        allocate((10**9, 10**6))


@pytest.mark.parametrize("width", [1, 2, 7, 64])
@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_both_fills_agree(width, kind):
    ours, theirs = np.empty((1237, width), np.float32), np.empty((1237, width), np.float32)
    fill_rows(ours, kind, 2**63 + 11, 0.25, 5)
    fill_rows_ref(theirs, kind, 2**63 + 11, 0.25, 5)
    if kind == "uniform":
        assert np.array_equal(ours, theirs)
    else:
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("initializer", ["uniform", "normal"])
def test_initial_values_depend_on_seed_table_and_row_alone(set_threads, initializer):
    def filled(table="t", seed=0, threads=1, first_row=0, rows=30_000):
        set_threads(threads)
        held = np.empty((rows, 48), np.float32)
        initialise_rows(held, table=table, seed=seed, initializer=initializer, scale=0.5, first_row=first_row)
        return held

    whole = filled()
    assert np.array_equal(filled(threads=3), whole)
    assert np.array_equal(filled(first_row=20_000, rows=10_000), whole[20_000:])
    assert not np.array_equal(filled(table="u"), whole)
    assert not np.array_equal(filled(seed=1), whole)
    assert len(np.unique(whole[:, 0])) > 29_000


def test_the_distributions_match_their_names():
    rows = np.empty((40_000, 32), np.float32)
    initialise_rows(rows, table="t", seed=3, initializer="uniform", scale=0.5)
    assert -0.5 <= rows.min() < -0.499
    assert 0.499 < rows.max() < 0.5
    assert abs(rows.mean()) < 2e-3
    assert abs(rows.std() - 0.5 / np.sqrt(3)) < 1e-3
    assert np.abs(np.corrcoef(rows[:, :8].T) - np.eye(8)).max() < 0.03
    initialise_rows(rows, table="t", seed=3, initializer="normal", scale=2.0)
    assert abs(rows.mean()) < 1e-2
    assert abs(rows.std() - 2.0) < 1e-2
    assert abs((np.abs(rows) < 2.0).mean() - 0.6827) < 2e-3
    initialise_rows(rows, table="t", seed=3, initializer="zeros", scale=2.0)
    assert not rows.any()


def test_wrong_arguments_are_rejected():
    with pytest.raises(ConfigError, check=at("initializer")):
        initialise_rows(np.empty((2, 2), np.float32), table="t", seed=0, initializer="ones", scale=1.0)
    for wrong in (np.empty((2, 2)), np.empty(4, np.float32), np.empty((4, 4), np.float32)[:, :2]):
        with pytest.raises(ConfigError, check=at("rows")):
            initialise_rows(wrong, table="t", seed=0, initializer="uniform", scale=1.0)
