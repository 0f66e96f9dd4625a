# SPDX-License-Identifier: Apache-2.0
"""Initial values by key, and rows that grow without moving."""

import gc

import numpy as np
import pytest
import torch

from terarec.errors import ConfigError, StorageError
from terarec.kernels.cpu.rows import fill_keyed_rows
from terarec.kernels.cpu.rows import reserve_rows as reserve_rows_cpu
from terarec.kernels.ref.rows import fill_keyed_rows as fill_keyed_rows_ref
from terarec.kernels.ref.rows import reserve_rows as reserve_rows_ref
from terarec.kernels.rows import initialise_keys, initialise_rows, reserve_rows
from tests.errors import at

EXTREMES = [0, -1, 1, 2**63 - 1, -(2**63), 2**40, -(2**40)]


def keyed(keys, *, width=17, initializer="uniform", dtype=torch.float32, table="t", seed=3):
    """Rows of `keys` in the order of the keys, written to scattered rows of a larger block."""
    weights = torch.full((2 * len(keys) + 1, width), 7.0, dtype=dtype)
    rows = torch.randperm(weights.shape[0], generator=torch.Generator().manual_seed(0))[: len(keys)]
    initialise_keys(weights, rows, torch.tensor(keys), table=table, seed=seed, initializer=initializer, scale=0.5)
    untouched = torch.ones(weights.shape[0], dtype=torch.bool).index_fill_(0, rows, False)
    assert bool((weights[untouched] == 7.0).all())
    return weights[rows]


@pytest.mark.parametrize("initializer", ["uniform", "normal", "zeros"])
@pytest.mark.parametrize("width", [1, 2, 17, 64])
def test_keys_get_the_initial_rows_of_a_static_table(initializer, width):
    static = np.empty((5003, width), np.float32)
    initialise_rows(static, table="t", seed=3, initializer=initializer, scale=0.5)
    keys = torch.randperm(5003, generator=torch.Generator().manual_seed(1)).tolist()
    assert np.array_equal(keyed(keys, width=width, initializer=initializer).numpy(), static[keys])


def test_any_key_has_values_of_its_own():
    rows = keyed(EXTREMES)
    assert len(rows.unique(dim=0)) == len(EXTREMES)
    assert torch.equal(keyed(EXTREMES[::-1]), rows.flip(0))
    assert not torch.equal(keyed(EXTREMES, table="u"), rows)
    assert not torch.equal(keyed(EXTREMES, seed=4), rows)


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_both_keyed_fills_agree(kind):
    keys = np.array(EXTREMES + list(range(100, 1300)), np.int64)
    targets = np.random.default_rng(0).permutation(2 * len(keys))[: len(keys)].astype(np.int64)
    ours, theirs = (np.zeros((2 * len(keys), 7), np.float32) for _ in range(2))
    fill_keyed_rows(ours, targets, keys, kind, 2**63 + 11, 0.25)
    fill_keyed_rows_ref(theirs, targets, keys, kind, 2**63 + 11, 0.25)
    if kind == "uniform":
        assert np.array_equal(ours, theirs)
    else:
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_threads_do_not_change_keyed_values(set_threads):
    keys = list(range(-20_000, 20_000))
    results = []
    for count in (1, 4):
        set_threads(count)
        results.append(keyed(keys, width=48, initializer="normal"))
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows_get_the_rounded_values(dtype):
    keys = list(range(-10_000, 10_000))
    assert torch.equal(keyed(keys, width=3, dtype=dtype), keyed(keys, width=3).to(dtype))


def test_wrong_keyed_arguments_are_rejected():
    def initialise(weights=None, rows=(0, 1), keys=(5, 6), initializer="uniform"):
        weights = torch.zeros(4, 2) if weights is None else weights
        before = weights.clone()
        try:
            initialise_keys(
                weights,
                torch.tensor(rows),
                torch.tensor(keys),
                table="t",
                seed=0,
                initializer=initializer,
                scale=1.0,
            )
        finally:
            assert torch.equal(weights, before)

    with pytest.raises(ConfigError, check=at("rows", "got 0 to 4")):
        initialise(rows=(0, 4))
    with pytest.raises(ConfigError, check=at("rows", "got -1 to 1")):
        initialise(rows=(1, -1))
    with pytest.raises(ConfigError, check=at("keys", "got torch.int64[3] on cpu")):
        initialise(keys=(5, 6, 7))
    with pytest.raises(ConfigError, check=at("keys", "got torch.float32[2]")):
        initialise(keys=(5.0, 6.0))
    with pytest.raises(ConfigError, check=at("weights")):
        initialise(weights=torch.zeros(4, 2, dtype=torch.int32))
    with pytest.raises(ConfigError, check=at("initializer")):
        initialise(initializer="ones")


@pytest.mark.parametrize("reserve", [reserve_rows_cpu, reserve_rows_ref])
class TestReservedRows:
    def test_growing_keeps_address_and_values(self, reserve):
        rows = reserve((1 << 30, 16), np.float32)  # 64 GiB of address space
        assert len(rows) == 0
        assert rows.array(0).shape == (0, 16)
        rows.grow(3)
        first = rows.array(3)
        assert not first.any()
        first[:] = 1.0
        for count in (5, 40_000, 1_000_000):
            rows.grow(count)
            held = rows.array(count)
            assert held.ctypes.data == first.ctypes.data
            assert held.shape == (count, 16)
            assert held[:3].sum() == 48.0
            assert not held[3 : 5 if count == 5 else 40_000].any()
        rows.grow(10)
        assert len(rows) == 1_000_000
        first[0] = 9.0
        assert held[0, 0] == 9.0

    def test_arrays_outlive_the_object(self, reserve):
        rows = reserve((1000, 3), np.int32)
        rows.grow(1000)
        view = torch.from_numpy(rows.array(1000))[10:20]
        del rows
        gc.collect()
        view.fill_(3)
        assert int(view.sum()) == 90

    @pytest.mark.parametrize(("shape", "dtype"), [((7,), np.float32), ((5, 3, 2), np.uint16), ((0, 4), np.float16)])
    def test_any_shape_and_type(self, reserve, shape, dtype):
        rows = reserve(shape, dtype)
        rows.grow(shape[0])
        assert rows.array(shape[0]).shape == shape
        assert rows.array(shape[0]).dtype == dtype

    def test_more_than_is_reserved_or_held_is_rejected(self, reserve):
        rows = reserve((100, 4), np.float32)
        rows.grow(50)
        with pytest.raises(StorageError, check=at("rows", "got 101")):
            rows.grow(101)
        assert len(rows) == 50
        for wrong in (51, -1):
            with pytest.raises(StorageError, check=at("rows", f"got {wrong}, expected 0 to the 50 that have memory")):
                rows.array(wrong)

    def test_rejected_address_space_names_its_bytes(self, reserve):
        with pytest.raises(StorageError, check=at("rows [1000000000, 1000000]", f"{4 * 10**15:,} bytes")):
            reserve((10**9, 10**6), np.float32)


def test_the_address_space_is_given_back():
    for _ in range(100):  # 1.6 PiB in all, more than there is
        rows = reserve_rows((1 << 40, 4), np.float32)
        rows.grow(1)
