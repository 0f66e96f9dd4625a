# SPDX-License-Identifier: Apache-2.0
"""`Batch` and `Jagged`: what they reject, and slicing and selecting against plain Python lists."""

import copy
from dataclasses import fields, replace

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from terarec.batch import Batch, Jagged, feature_ends, first_keys, one_hot, select, slice_samples, to_device
from terarec.errors import ConfigError
from tests.errors import at

bags_of = st.integers(0, 5).flatmap(
    lambda batch_size: st.lists(
        st.lists(st.lists(st.integers(0, 99), max_size=3), min_size=batch_size, max_size=batch_size), max_size=4
    ).map(lambda features: (batch_size, features))
)


def batch_of(batch_size, features):
    bags = [bag for feature in features for bag in feature]
    offsets = torch.tensor([0, *torch.tensor([len(bag) for bag in bags], dtype=torch.int64).cumsum(0)])
    keys = torch.tensor([key for bag in bags for key in bag], dtype=torch.int64)
    numbers = torch.arange(batch_size, dtype=torch.float32)[:, None]
    names = tuple(f"f{index}" for index in range(len(features)))
    weights = torch.arange(keys.numel(), dtype=torch.float32)
    sparse = Jagged(names=names, keys=keys, offsets=offsets, weights=weights)
    metadata = {"row": pa.array(range(batch_size), pa.int64())}
    return Batch(dense=numbers * 10, label=numbers, sparse=sparse, weight=numbers[:, 0] / 2, metadata=metadata)


def weights_in(jagged, batch_size):
    """Return the weights as `bags_in` has the keys."""
    return bags_in(replace(jagged, keys=jagged.weights.long()), batch_size)


def bags_in(jagged, batch_size):
    bounds = jagged.offsets.tolist()
    keys = jagged.keys.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(keys)
    return [
        [keys[bounds[s * batch_size + b] : bounds[s * batch_size + b + 1]] for b in range(batch_size)]
        for s in range(len(jagged.names))
    ]


@given(data=bags_of, bounds=st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_slices_hold_the_samples(data, bounds):
    batch_size, features = data
    start, stop = sorted(min(bound, batch_size) for bound in bounds)
    part = slice_samples(batch_of(batch_size, features), start, stop)
    assert part.batch_size == stop - start
    assert part.label[:, 0].tolist() == list(range(start, stop))
    assert part.dense[:, 0].tolist() == [10.0 * sample for sample in range(start, stop)]
    assert part.weight.tolist() == [sample / 2 for sample in range(start, stop)]
    assert part.metadata["row"].to_pylist() == list(range(start, stop))
    assert bags_in(part.sparse, stop - start) == [feature[start:stop] for feature in features]
    whole = weights_in(batch_of(batch_size, features).sparse, batch_size)
    assert weights_in(part.sparse, stop - start) == [feature[start:stop] for feature in whole]


@given(data=bags_of, order=st.permutations(range(4)), count=st.integers(0, 4))
def test_selections_hold_the_features(data, order, count):
    batch_size, features = data
    chosen = [index for index in order if index < len(features)][:count]
    picked = select(batch_of(batch_size, features).sparse, [f"f{index}" for index in chosen])
    assert picked.names == tuple(f"f{index}" for index in chosen)
    assert bags_in(picked, batch_size) == [features[index] for index in chosen]
    whole = weights_in(batch_of(batch_size, features).sparse, batch_size)
    assert weights_in(picked, batch_size) == [whole[index] for index in chosen]


@given(data=bags_of, order=st.permutations(range(4)))
def test_selections_by_known_ends_equal_those_that_read_offsets(data, order):
    batch_size, features = data
    sparse = batch_of(batch_size, features).sparse
    known = replace(sparse, ends=feature_ends(sparse))
    names = [f"f{index}" for index in order if index < len(features)][:-1]
    picked, expected = select(known, names), select(sparse, names)
    assert torch.equal(picked.keys, expected.keys)
    assert torch.equal(picked.offsets, expected.offsets)
    assert feature_ends(picked) == feature_ends(expected)


def test_a_copy_on_a_device_has_the_ends_of_features_in_host_memory():
    batch = batch_of(2, [[[1, 2], [3]], [[4], []]])
    assert batch.sparse.ends is None
    there = to_device(replace(batch, metadata={}), "meta").sparse
    assert there.ends == feature_ends(batch.sparse) == (0, 3, 4)


@given(data=bags_of, limits=st.lists(st.none() | st.integers(1, 3), min_size=4, max_size=4))
def test_first_keys_of_each_bag(data, limits):
    batch_size, features = data
    sparse = batch_of(batch_size, features).sparse
    limits = limits[: len(features)]
    cut = first_keys(sparse, limits)
    assert cut.names == sparse.names
    assert bags_in(cut, batch_size) == [
        [bag[:limit] for bag in feature] for feature, limit in zip(features, limits, strict=True)
    ]
    assert weights_in(cut, batch_size) == [
        [bag[:limit] for bag in feature] for feature, limit in zip(weights_in(sparse, batch_size), limits, strict=True)
    ]


def test_first_keys_without_a_longer_bag_copies_nothing():
    sparse = batch_of(2, [[[1, 2], [3]]]).sparse
    assert first_keys(sparse, [2]) is sparse
    with pytest.raises(ConfigError, check=at("limits")):
        first_keys(sparse, [2, None])
    for offsets, place in (
        ([0, 2, 1], ("offsets", "got 0 to 1")),
        ([1, 2, 3], ("offsets", "got 1 to 3")),
        ([0, 4, 3], ("offsets[2]", "got 3")),
    ):
        with pytest.raises(ConfigError, check=at(*place)):
            first_keys(replace(sparse, offsets=torch.tensor(offsets)), [1])


def test_offsets_that_leave_keys_out_and_tensors_on_two_devices_are_rejected():
    sparse = batch_of(2, [[[1, 2], [3]], [[4], [5]]]).sparse
    for offsets, got in (([0, 2, 3, 4, 4], "0 to 4"), ([1, 2, 3, 4, 5], "1 to 5")):
        with pytest.raises(ConfigError, check=at("offsets", f"got {got}")):
            select(replace(sparse, offsets=torch.tensor(offsets)), ["f1"])
    with pytest.raises(ConfigError, check=at("Jagged", "keys on meta, offsets on cpu")):
        replace(sparse, keys=sparse.keys.to("meta"), weights=None)


def test_a_feature_that_is_not_there():
    with pytest.raises(ConfigError, check=at("feature 'x'")):
        select(batch_of(1, [[[1]], [[2]]]).sparse, ["f1", "x"])


def test_one_key_per_feature_and_sample():
    jagged = one_hot(["a", "b"], torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert jagged.batch_size == 3
    assert bags_in(jagged, 3) == [[[1], [2], [3]], [[4], [5], [6]]]
    elsewhere = one_hot(["a"], torch.zeros(1, 3, dtype=torch.int64, device="meta"))
    assert elsewhere.offsets.device == elsewhere.keys.device
    for keys in (torch.zeros(3, 4), torch.zeros(6)):
        with pytest.raises(ConfigError, check=at("one_hot")):
            one_hot(["a", "b"], keys)


def test_the_same_device_keeps_the_samples():
    batch = batch_of(2, [[[1, 2], [3]]])
    moved = to_device(batch, "cpu")
    assert torch.equal(moved.dense, batch.dense)
    assert torch.equal(moved.sparse.keys, batch.sparse.keys)
    assert torch.equal(moved.sparse.offsets, batch.sparse.offsets)
    assert moved.sparse.names == batch.sparse.names
    assert torch.equal(moved.sparse.weights, batch.sparse.weights)
    assert torch.equal(moved.weight, batch.weight)
    elsewhere = to_device(batch, "meta")
    assert (elsewhere.weight.device, elsewhere.label.device) == (torch.device("meta"), torch.device("meta"))
    assert elsewhere.metadata is batch.metadata


def test_what_a_batch_rejects():
    batch = batch_of(2, [[[1], [2]]])
    for wrong in (torch.ones(3), torch.ones(2, 1), torch.ones(2, dtype=torch.float64)):
        with pytest.raises(ConfigError, check=at("Batch", ", expected float32[2]")):
            replace(batch, weight=wrong)
    with pytest.raises(ConfigError, check=at("Batch", "got weight on meta, label on cpu")):
        replace(batch, weight=torch.ones(2, device="meta"))
    with pytest.raises(ConfigError, check=at("Batch", "got 3 values of metadata 'user'")):
        replace(batch, metadata={"user": pa.array(["a", "b", "c"])})


def test_a_batch_is_a_tree_of_its_tensors():
    batch = batch_of(2, [[[1], [2]]])
    leaves, structure = pytree.tree_flatten(batch)
    assert [leaf is tensor for leaf, tensor in zip(leaves, (batch.dense, batch.label), strict=False)] == [True, True]
    assert leaves[-1] is batch.weight
    again = pytree.tree_unflatten(leaves, structure)
    assert again.weight is batch.weight
    assert again.metadata == {}  # no tensor
    doubled = pytree.tree_map(lambda tensor: tensor * 2, batch)
    assert torch.equal(doubled.weight, batch.weight * 2)
    without = replace(batch, weight=None, metadata={})
    leaves, structure = pytree.tree_flatten(without)
    assert structure.num_leaves == 5  # as in programs that were exported before there were weights
    assert pytree.tree_unflatten(leaves, structure).weight is None
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(batch)[0]]
    assert paths == [".dense", ".label", ".sparse.keys", ".sparse.offsets", ".sparse.weights", ".weight"]


def test_a_batch_of_a_tree_has_every_field():
    """So that it can be changed and copied as others, as the exports of models do that rename columns."""
    again = pytree.tree_map(lambda tensor: tensor, batch_of(2, [[[1], [2]]]))
    for one in (again, again.sparse):
        assert all(hasattr(one, field.name) for field in fields(one))
    assert replace(again.sparse, names=("renamed",)).ready is None
    assert torch.equal(copy.deepcopy(again).sparse.keys, again.sparse.keys)


@pytest.mark.parametrize(
    ("names", "keys", "offsets", "problem"),
    [
        (("a",), torch.zeros(2, dtype=torch.int32), torch.tensor([0, 2]), "got keys torch.int32"),
        (("a",), torch.zeros(2, dtype=torch.int64), torch.tensor([0.0, 2.0]), "offsets torch.float32"),
        (("a", "b"), torch.tensor([1]), torch.tensor([0, 1]), "got 2 offsets for 2 features"),
        (("a",), torch.tensor([1]), torch.zeros(0, dtype=torch.int64), "got 0 offsets for 1 features"),
        ((), torch.tensor([1]), torch.tensor([0, 1]), "got 2 offsets for 0 features"),
        (("a",), torch.tensor([[1]]), torch.tensor([0, 1]), "got keys [1, 1], offsets [2]"),
    ],
)
def test_what_a_jagged_rejects(names, keys, offsets, problem):
    with pytest.raises(ConfigError, check=at("Jagged", problem)):
        Jagged(names=names, keys=keys, offsets=offsets)


@pytest.mark.parametrize("ends", [(0, 2), (0, 1, 3), (1, 1, 2), (0, 3, 2)])
def test_ends_that_do_not_rise_from_0_to_the_keys_are_rejected(ends):
    jagged = Jagged(names=("a", "b"), keys=torch.tensor([1, 2]), offsets=torch.tensor([0, 1, 2]), ends=(0, 1, 2))
    with pytest.raises(ConfigError, check=at("Jagged", f"got ends {ends}")):
        replace(jagged, ends=ends)


def test_weights_that_are_not_one_a_key_are_rejected():
    for wrong in (torch.ones(1), torch.ones(2, dtype=torch.float64), torch.ones(2, 1)):
        with pytest.raises(ConfigError, check=at("Jagged", ", expected float32[2]")):
            Jagged(names=("a",), keys=torch.tensor([1, 2]), offsets=torch.tensor([0, 2]), weights=wrong)


def test_a_jagged_without_features_has_no_samples():
    assert Jagged(names=(), keys=torch.zeros(0, dtype=torch.int64), offsets=torch.tensor([0])).batch_size == 0
