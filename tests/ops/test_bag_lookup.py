# SPDX-License-Identifier: Apache-2.0
"""`bag_lookup`: every implementation and instruction set against the plain one, torch's module and the contract."""

import pytest
import torch
from torch import nn

from terarec.errors import ConfigError, KernelError, KeyOutOfRangeError
from terarec.kernels.contract import MEAN, SUM
from terarec.ops import BagLayout, bag_lookup
from terarec.ops.checks import ROW_DTYPES
from tests.errors import at
from tests.ops.bags import IMPLEMENTATIONS, make_layout, make_lookup
from tests.ops.hosts import SETS, on_every_host
from tests.params import paired

WIDTHS = [1, 2, 3, 8, 16, 17, 32, 33, 64, 127, 128, 130, 256, 257]


@pytest.mark.parametrize(
    ("width", "pooling", "dtype"), paired(WIDTHS, ["sum", "none", ("mean", "sum", "sqrtn", "max")], ROW_DTYPES)
)
def test_equals_the_plain_kernel(select, width, pooling, dtype):
    layout = make_layout(width, pooling)
    for batch, hotness in [(0, 1), (1, 1), (1, 3), (7, 4), (31, 1), (65, 2)]:
        held = make_lookup(layout, batch, hotness)
        arguments = (held.weights.to(dtype), held.keys, held.offsets, layout)
        expected = bag_lookup(*arguments, implementation="ref")
        for name in SETS:
            select(name)
            torch.testing.assert_close(bag_lookup(*arguments, implementation="cpu"), expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_weighted_keys_equal_the_plain_kernel(select, width):
    layout = make_layout(width, ("mean", "sum", "sqrtn", "mean"))
    for batch, hotness in [(0, 1), (1, 1), (7, 4), (31, 1)]:
        held = make_lookup(layout, batch, hotness)
        arguments = (held.weights, held.keys, held.offsets, layout)
        expected = bag_lookup(*arguments, key_weights=held.key_weights, implementation="ref")
        for name in SETS:
            select(name)
            result = bag_lookup(*arguments, key_weights=held.key_weights, implementation="cpu")
            torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(
    ("width", "pooling", "dtype"), paired([1, 17, 64, 128], ["sum", "mean", "sqrtn", "max", "none"], ROW_DTYPES)
)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_same_bits_on_every_instruction_set_and_thread_count(width, pooling, dtype, weighted):
    held = make_lookup(make_layout(width, pooling), 700, 5)
    weights = held.weights.to(dtype)
    key_weights = held.key_weights if weighted and held.layout.takes_key_weights else None
    arguments = (weights, held.keys, held.offsets, held.layout)

    def looked_up():
        return bag_lookup(*arguments, key_weights=key_weights, implementation="cpu")

    results = on_every_host(looked_up, threads=(1, 2, 3))
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("width", [16, 128, 144])
@pytest.mark.parametrize("hotness", [1, 3])
def test_results_stored_past_the_caches(width, hotness):
    layout = make_layout(width)
    batch = 5_000_000 // (width * len(layout.feature_names))
    held = make_lookup(layout, batch, hotness)
    arguments = (held.weights, held.keys, held.offsets, layout)
    expected = bag_lookup(*arguments, implementation="ref")
    assert expected.numel() * 4 > 16 << 20
    first = bag_lookup(*arguments, implementation="cpu")
    torch.testing.assert_close(first, expected)
    second = bag_lookup(held.weights * 2, held.keys, held.offsets, layout, implementation="cpu")
    torch.testing.assert_close(first, expected)  # memory in use is not handed out again
    torch.testing.assert_close(second, expected * 2)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_equals_torch_with_its_sparse_gradient(mode):
    layout = make_layout(24, mode)
    held = make_lookup(layout, 29, 3)
    weights = held.weights.clone().requires_grad_()
    result = bag_lookup(weights, held.keys, held.offsets, layout)
    grad = torch.randn_like(result)
    result.backward(grad)
    bags = nn.EmbeddingBag.from_pretrained(
        held.weights.clone(), mode=mode, sparse=True, freeze=False, include_last_offset=True
    )
    expected = bags(held.keys + layout.array[:, 0].repeat_interleave(held.offsets[::29].diff()), held.offsets)
    expected = expected.reshape(4, 29, 24).transpose(0, 1).reshape(29, -1)
    torch.testing.assert_close(result, expected)
    expected.backward(grad)
    assert weights.grad.is_sparse
    torch.testing.assert_close(weights.grad.to_dense(), bags.weight.grad.to_dense())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("position", "key"), [(0, -1), (3, 1000), (57, -(2**63)), (180, 2**63 - 1)])
def test_a_key_outside_its_table_is_named(implementation, position, key):
    held = make_lookup(make_layout(8), 50, 1)
    held.keys[position] = key
    name, table, rows = [("a", "large", 1000), ("b", "small", 13), ("c", "large", 1000), ("d", "one", 1)][
        position // 50
    ]
    with pytest.raises(KeyOutOfRangeError) as caught:
        bag_lookup(held.weights, held.keys, held.offsets, held.layout, implementation=implementation)
    assert str(caught.value) == (
        f"feature '{name}': got key {key} at position {position}, expected 0 <= key < {rows}, "
        f"the rows of table '{table}'"
    )


@pytest.mark.parametrize("implementation", ["cpu", "ref"])
def test_of_several_bad_keys_the_first_is_named(implementation):
    held = make_lookup(make_layout(8), 20_000, 1)
    held.keys[[79_999, 12_345, 40_000]] = -7
    with pytest.raises(KeyOutOfRangeError, check=at("feature 'a'")):
        bag_lookup(held.weights, held.keys, held.offsets, held.layout, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("index", "value"),
    [
        *[(0, 1), (200, 199), (200, 201), (100, 300), (100, -1), (57, 55), (57, 2**62)],
        ([57, 58], [-(2**63), -1]),  # whose differences wrap and seem to rise
    ],
)
def test_bad_offsets_are_named(implementation, index, value):
    held = make_lookup(make_layout(8), 50, 1)
    held.offsets[index] = torch.tensor(value)
    first = index if isinstance(index, int) else index[0]
    places = f"offsets[{first}]", f"offsets[{first + 1}]"  # the value that is too large, or the next one, which falls
    with pytest.raises(ConfigError, check=lambda error: error.where in places):
        bag_lookup(held.weights, held.keys, held.offsets, held.layout, implementation=implementation)


def test_tensors_that_do_not_fit_are_rejected():
    held = make_lookup(make_layout(8), 5, 1)
    good = (held.weights, held.keys, held.offsets)
    for wrong, name in [
        ((held.weights[:, :7], *good[1:]), "weights"),
        ((held.weights[:1000], *good[1:]), "weights"),
        ((held.weights.double(), *good[1:]), "weights"),
        ((good[0], held.keys.int(), good[2]), "keys"),
        ((good[0], held.keys[None], good[2]), "keys"),
        ((*good[:2], held.offsets.int()), "offsets"),
        ((*good[:2], held.offsets[:-1]), "offsets"),
        ((*good[:2], held.offsets[:0]), "offsets"),
        ((good[0], held.keys.to("meta"), good[2]), "devices"),
    ]:
        with pytest.raises(ConfigError, check=at(name)):
            bag_lookup(*wrong, held.layout)
    for wrong in (held.key_weights[:-1], held.key_weights.double(), held.key_weights[None]):
        with pytest.raises(ConfigError, check=at("key_weights", ", expected float32[20], one a key")):
            bag_lookup(*good, held.layout, key_weights=wrong)
    for pooling in ("max", "none", ("sum", "max", "sum", "sum")):
        with pytest.raises(ConfigError, check=at("key_weights", "got some with pooling")):
            bag_lookup(*good, make_layout(8, pooling), key_weights=held.key_weights)
    with pytest.raises(KernelError, check=at("implementation")):
        bag_lookup(*good, held.layout, implementation="fast")


def test_tensors_with_gaps_are_read_right():
    held = make_lookup(make_layout(8), 9, 2)
    wide = torch.randn(held.weights.shape[0], 16)
    keys = torch.stack([held.keys, held.keys * 0], dim=1)[:, 0]
    torch.testing.assert_close(
        bag_lookup(wide[:, ::2], keys, held.offsets, held.layout, implementation="cpu"),
        bag_lookup(wide[:, ::2].contiguous(), held.keys, held.offsets, held.layout, implementation="ref"),
    )


@pytest.mark.parametrize("field", ["feature_table", "pooling", "table_base", "table_rows", "width"])
def test_a_layout_checks_itself(field):
    good = {
        "table_names": ("t",),
        "table_base": (0,),
        "table_rows": (3,),
        "feature_names": ("f", "g"),
        "feature_table": (0, 0),
        "pooling": ("sum", "mean"),
        "width": 2,
    }
    bad = {"feature_table": (0, 1), "pooling": ("sum", "none"), "table_base": (-3,), "table_rows": (), "width": 0}
    with pytest.raises(
        ConfigError, check=at("BagLayout" if field in ("table_base", "table_rows") else f"BagLayout.{field}")
    ):
        BagLayout(**{**good, field: bad[field]})


def test_the_layout_array_says_which_rows_how_and_which_table():
    array = make_layout(8, ("mean", "sum", "mean", "mean")).array
    assert array.tolist() == [[0, 1000, MEAN, 0], [1000, 13, SUM, 1], [0, 1000, MEAN, 0], [1013, 1, MEAN, 2]]
