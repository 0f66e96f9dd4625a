# SPDX-License-Identifier: Apache-2.0
"""Results that every Triton kernel must return, as functions: interpreted in tests, compiled in ``benchmarks/gpu.py``.

Each takes the device to run on and compares with the plain kernels on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import numpy as np
import torch

from terarec.errors import ConfigError
from terarec.kernels.contract import ANY_ROWS, BadKeyError, KernelGradient
from terarec.kernels.ref import bag_lookup as ref_lookup
from terarec.kernels.ref import row_update as ref_update
from terarec.kernels.ref import rows as ref_rows
from terarec.kernels.ref.bag_lookup import quantize_rows
from terarec.kernels.ref.hash_index import HashIndex as RefIndex
from terarec.kernels.row_rules import RULE_KINDS, row_rule
from terarec.kernels.triton import bag_lookup as triton_lookup
from terarec.kernels.triton import segments
from terarec.kernels.triton.bag_lookup import bag_lookup, quantized_bag_lookup, row_dots
from terarec.kernels.triton.hash_index import HashIndex
from terarec.kernels.triton.row_update import row_gradient_norm, row_update_
from terarec.kernels.triton.rows import fill_keyed_rows, rows_at_most
from terarec.ops.layout import placed
from tests.kernels.triton_calls import (
    POOLINGS,
    compare_updates,
    compare_weights,
    expected_update,
    gradient_of,
    layouts,
    looked_up,
    moved,
    random_key_weights,
    rule_of,
    updated,
)
from tests.ops.bags import make_layout, make_lookup

BATCHES = ((0, 1), (1, 3), (7, 4), (33, 1))
"""(samples, hotness): no bag, one sample, empty bags and repeated keys, just above a power of two."""

Case = Callable[[torch.device], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Keep `function` among the cases."""
    CASES[function.__name__] = function
    return function


@case
def lookups_equal_the_plain_ones(device: torch.device) -> None:
    for number, layout in enumerate(layouts(device)):
        turn = number + number // len(POOLINGS)  # so that a pooling meets every batch
        for batch, hotness in (BATCHES[turn % 2], BATCHES[2 + turn % 2]):
            held = make_lookup(layout, batch, hotness)
            expected = ref_lookup.bag_lookup(held.weights, held.keys, held.offsets, layout.array, layout.is_pooled)
            result = looked_up(device, held.weights, held.keys, held.offsets, layout)
            torch.testing.assert_close(result, expected)


@case
def rows_wider_than_a_tile_are_looked_up(device: torch.device) -> None:
    held = make_lookup(make_layout(259), 3, 2)
    result = looked_up(device, held.weights, held.keys, held.offsets, held.layout)
    expected = ref_lookup.bag_lookup(held.weights, held.keys, held.offsets, held.layout.array, True)
    torch.testing.assert_close(result, expected)


@case
def gradients_of_every_shape_are_summed(device: torch.device) -> None:
    for number, layout in enumerate(layouts(device)):
        batch, hotness = BATCHES[(number + number // len(POOLINGS)) % len(BATCHES)]
        gradients = [gradient_of(layout, batch, hotness, 1), gradient_of(layout, batch + 2, hotness, 2)]
        compare_updates(device, layout, gradients, row_rule("sgd", lr=0.05), steps=[1])


@case
def weighted_keys_equal_the_plain_ones(device: torch.device) -> None:
    layout = make_layout(16, ("sum", "mean", "sqrtn", "sum"))
    held = make_lookup(layout, 21, 3)
    key_weights = random_key_weights(held.keys.shape[0])
    arguments = (held.weights, held.keys, held.offsets)
    expected = ref_lookup.bag_lookup(*arguments, layout.array, True, key_weights)
    torch.testing.assert_close(looked_up(device, *arguments, layout, key_weights), expected)
    gradient = gradient_of(layout, 21, 3, 0)._replace(key_weights=key_weights)
    compare_updates(device, layout, [gradient, gradient_of(layout, 4, 2, 1)], row_rule("sgd", lr=0.1), steps=[1])
    dots = row_dots(*(part.to(device) for part in (*arguments, gradient.grad)), layout.array)
    torch.testing.assert_close(dots.cpu(), ref_lookup.row_dots(*arguments, gradient.grad, layout.array))


@case
def a_maximum_gives_its_gradient_to_the_first_that_attains_it(device: torch.device) -> None:
    layout = make_layout(3, ("max", "sum", "max", "max"))
    gradient = gradient_of(layout, 13, 4, 1)
    weights = make_lookup(layout, 0, 1).weights.round()  # many ties
    weights[5:40] = float("-inf")
    weights[40:50] = float("nan")
    compare_weights(device, weights, [gradient])
    result = looked_up(device, weights, gradient.keys, gradient.offsets, layout)
    expected = ref_lookup.bag_lookup(weights, gradient.keys, gradient.offsets, layout.array, True)
    torch.testing.assert_close(result, expected, equal_nan=True)


@case
def narrow_rows_are_looked_up_and_rounded_with_the_same_bits(device: torch.device) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for width in (3, 16):
            layout = make_layout(width)
            held = make_lookup(layout, 9, 3)
            weights = held.weights.to(dtype)
            weights[:6, 0] = torch.tensor([0.0, 1e-7, -6e-5, 65504.0, float("inf"), float("nan")]).to(dtype)
            expected = ref_lookup.bag_lookup(weights, held.keys, held.offsets, layout.array, True)
            result = looked_up(device, weights, held.keys, held.offsets, layout)
            torch.testing.assert_close(result, expected, equal_nan=True)
            gradient = gradient_of(layout, 9, 1, 1)  # one key a bag, so that sums have one order
            gradient.grad[3] = 1e-6
            rule = row_rule("sgd", lr=0.5)
            moved, _ = updated(device, weights, [], [gradient], rule, [1])
            plain, _ = expected_update(weights, [], [gradient], rule, [1])
            different = (moved != plain) & ~(moved.isnan() & plain.isnan())
            assert int(different.sum()) <= different.numel() // 1000  # sums of repeated keys may round the other way


@case
def quantized_rows_equal_the_plain_ones(device: torch.device) -> None:
    for width, pooling in ((3, "sum"), (16, "none"), (48, "mean")):
        layout = make_layout(width, pooling)
        held = make_lookup(layout, 9, 3)
        packed = quantize_rows(held.weights)
        arguments = (held.keys, held.offsets, layout.array, layout.is_pooled)
        expected = ref_lookup.quantized_bag_lookup(packed, *arguments)
        there = [packed.to(device), held.keys.to(device), held.offsets.to(device)]
        torch.testing.assert_close(quantized_bag_lookup(*there, layout.array, layout.is_pooled).cpu(), expected)


@case
def rules_equal_the_plain_ones(device: torch.device) -> None:
    for kind in RULE_KINDS:
        layout = make_layout(3, "mean")
        proximal = {"l1": 0.01, "l2": 0.02} if kind == "ftrl" else {}
        compare_updates(device, layout, [gradient_of(layout, 9, 3, 1)], rule_of(kind, **proximal), steps=[1, 2])


@case
def all_rows_move_in_the_global_mode(device: torch.device) -> None:
    layout = make_layout(3)
    for kind in ("adamw", "ftrl"):
        rule = rule_of(kind, mode="global", l2=0.01)
        table_lr = torch.tensor([1.0, 0.0, 0.5])
        compare_updates(device, layout, [gradient_of(layout, 5, 3, 1)], rule, steps=[1, 2], table_lr=table_lr)
        compare_updates(device, layout, [gradient_of(layout, 0, 3, 1)], rule, steps=[3])


@case
def rows_catch_up_in_the_lazy_global_mode(device: torch.device) -> None:
    layout = make_layout(3)
    for kind in ("momentum", "nesterov", "rmsprop", "adam", "adamw"):
        rule = rule_of(kind, mode="lazy_global")
        compare_updates(device, layout, [gradient_of(layout, 9, 3, 1)], rule, steps=[1, 9, 300])


@case
def rates_in_the_momentum_and_epsilon_hat(device: torch.device) -> None:
    layout = make_layout(3)
    forms = {"momentum": {"lr_in_momentum": True}, "nesterov": {"lr_in_momentum": True}, "adam": {"eps_hat": 0.05}}
    for kind, form in forms.items():
        rule = rule_of(kind, mode="lazy_global", **form)
        compare_updates(device, layout, [gradient_of(layout, 9, 3, 1)], rule, steps=[1, 9, 300])


@case
def gradients_are_scaled_clipped_and_regularised(device: torch.device) -> None:
    layout = make_layout(16)
    for more in (
        {"grad_scale": 0.25},
        {"clip_value": 0.3},
        {"clip_norm": 0.5},
        {"l1": 0.1, "l2": 0.2, "clip_norm": 1.0},
    ):
        compare_updates(device, layout, [gradient_of(layout, 9, 3, 1)], rule_of("adagrad", **more), steps=[1])


@case
def tables_have_learning_rates_of_their_own(device: torch.device) -> None:
    layout = make_layout(3)
    table_lr = torch.tensor([0.5, 0.0, 2.0])
    gradients = [gradient_of(layout, 9, 3, 1), gradient_of(layout, 4, 1, 2)]
    compare_updates(device, layout, gradients, rule_of("adam"), steps=[1], table_lr=table_lr)
    weights = make_lookup(layout, 0, 1).weights
    there = [moved(gradient, device) for gradient in gradients]
    rule = rule_of("adam", grad_scale=0.5)
    for first_row in (0, 7):
        norm = row_gradient_norm(weights.to(device), there, rule, table_lr, first_row)
        expected = ref_update.row_gradient_norm(weights, gradients, rule, table_lr, first_row)
        assert abs(norm - expected) <= 1e-6 * expected


@case
def rows_of_tiles_with_fewer_rows_than_threads_are_updated_in_every_form(device: torch.device) -> None:
    layout = make_layout(64)
    gradient = gradient_of(layout, 9, 1, 1)
    for kind in ("sgd", "adagrad"):
        table_lr = torch.tensor([0.5, 0.0, 2.0])
        compare_updates(device, layout, [gradient], rule_of(kind), steps=[1], table_lr=table_lr)
    compare_updates(device, layout, [gradient], rule_of("adam", mode="lazy_global"), steps=[1, 9])
    weights, rule = make_lookup(layout, 0, 1).weights, row_rule("sgd", lr=0.5)
    expected, _ = expected_update(weights, [], [gradient], rule, [1])
    rows = ref_lookup.locate(gradient.keys, gradient.offsets, layout.array).rows
    elsewhere = gradient._replace(places=len(weights) - 1 - rows)
    for most in (segments._INT32_ROWS, 0):  # rows of 32 bits, and of 64 as if there were too many
        with mock.patch.object(segments, "_INT32_ROWS", most):
            torch.testing.assert_close(updated(device, weights, [], [gradient], rule, [1])[0], expected)
            result, _ = updated(device, weights.flip(0), [], [elsewhere], rule, [1])
            torch.testing.assert_close(result.flip(0), expected)
    numbers = torch.arange(len(weights)).flip(0)
    for row_numbers in (numbers, torch.tensor([[0, -1, len(weights) - 1], [1000, -1, len(weights) - 1]])):
        result, _ = updated(device, weights.bfloat16(), [], [gradient], rule, [1], numbers=row_numbers)
        plain, _ = expected_update(weights.bfloat16(), [], [gradient], rule, [1], numbers=numbers)
        assert int((result != plain).sum()) <= result.numel() // 1000  # sums of repeated keys may round the other way


@case
def a_hot_key_is_summed_in_parts(device: torch.device) -> None:
    """As many occurrences as one program takes, one more, and as one more level of parts takes."""
    layout = torch.tensor([[0, 50, 0, 0]])
    rule = row_rule("sgd", lr=0.1)
    for count, repeats in ((64, 64), (65, 65), (300, 200), (6000, 5000)):
        generator = torch.Generator().manual_seed(count)
        order = torch.randperm(count, generator=generator)
        keys = torch.where(order < repeats, 7, order % 50)
        gradient = KernelGradient(keys, torch.arange(count + 1), torch.randn(count, 3, generator=generator), layout)
        weights = torch.randn(50, 3, generator=generator)
        result, _ = updated(device, weights, [], [gradient], rule, steps=[1])
        expected, _ = expected_update(weights, [], [gradient], rule, steps=[1])
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def after_other_rows(grad: torch.Tensor, others: int) -> KernelGradient:
    """Gradients `grad` of row 7, and of zeros for row 0, which lies before it in the order of rows."""
    count, width = grad.shape
    keys = torch.cat([torch.zeros(others, dtype=torch.int64), torch.full((count,), 7)])
    every = torch.cat([torch.zeros(others, width), grad])
    return KernelGradient(keys, torch.arange(others + count + 1), every, torch.tensor([[0, 50, 0, 0]]))


@case
def the_sum_of_a_row_depends_on_its_keys_alone(device: torch.device) -> None:
    """Not on the rows before it, on keys of other rows in between, or on how many columns are here."""
    rule = row_rule("sgd", lr=1.0)
    for count, width, others in ((200, 128, (5, 64, 190)), (4200, 2, (1, 4095))):
        grad = torch.randn(count, width, generator=torch.Generator().manual_seed(count))
        alone, _ = updated(device, torch.zeros(50, width), [], [after_other_rows(grad, 0)], rule, steps=[1])
        for number in others:
            gradient = after_other_rows(grad, number)
            result, _ = updated(device, torch.zeros(50, width), [], [gradient], rule, steps=[1])
            assert torch.equal(result, alone)
        part = after_other_rows(grad[:, : width // 2], 0)
        result, _ = updated(device, torch.zeros(50, width // 2), [], [part], rule, steps=[1])
        assert torch.equal(result, alone[:, : width // 2])


@case
def an_update_gives_the_same_bits_every_time(device: torch.device) -> None:
    gradient = gradient_of(make_layout(16), 40, 4, 1)
    weights = make_lookup(make_layout(16), 0, 1).weights
    rule = row_rule("sgd", lr=0.1)
    first, again = (updated(device, weights, [], [gradient], rule, steps=[1]) for _ in range(2))
    assert torch.equal(first[0], again[0])


def fault(function: Callable[..., object], *arguments: object) -> tuple[type, str]:
    try:
        function(*arguments)
    except (BadKeyError, ConfigError) as error:
        return type(error), str(error)
    raise AssertionError("nothing was raised")


@case
def what_is_bad_is_reported_as_by_the_plain_kernel(device: torch.device) -> None:
    layout = make_layout(8)
    for where, index, value in [
        ("keys", 0, -1),
        ("keys", 57, 2**63 - 1),
        ("keys", 180, -(2**63)),
        ("offsets", 0, 1),
        ("offsets", 57, 2**62),
        ("offsets", 100, -1),
        ("offsets", 200, 199),
    ]:
        held = make_lookup(layout, 50, 1)
        getattr(held, where)[index] = value
        arguments = (held.weights, held.keys, held.offsets)
        expected = fault(ref_lookup.bag_lookup, *arguments, layout.array, True)
        assert fault(looked_up, device, *arguments, layout) == expected
        gradient = KernelGradient(held.keys, held.offsets, torch.ones(50, 32), layout.array)
        assert fault(updated, device, held.weights, [], [gradient], row_rule("sgd", lr=1.0), [1]) == expected


@case
def unchecked_bad_keys_count_as_absent(device: torch.device) -> None:
    layout = make_layout(8)
    held = make_lookup(layout, 50, 1)
    grad = torch.ones(50, 32)
    good, bad = (KernelGradient(held.keys.clone(), held.offsets, grad.clone(), layout.array) for _ in range(2))
    bad.keys[[3, 60]] = 5000
    good.grad[3, :8] = good.grad[10, 8:16] = 0.0
    weights, there = held.weights.clone().to(device), moved(bad, device)
    result = bag_lookup(weights, there.keys, there.offsets, layout.array, True, is_checked=False)
    assert not result[3, :8].any()
    assert not result[10, 8:16].any()
    row_update_(weights, [], [there], row_rule("sgd", lr=1.0), 1, is_checked=False)
    expected, _ = expected_update(held.weights, [], [good], row_rule("sgd", lr=1.0), steps=[1])
    torch.testing.assert_close(weights.cpu(), expected)


@case
def the_host_does_not_wait_for_keys_that_it_has_found(device: torch.device) -> None:
    held = make_lookup(make_layout(8), 7, 2)
    arguments, layout = (held.weights, held.keys, held.offsets), placed(held.layout, ANY_ROWS)
    gradient = KernelGradient(held.keys, held.offsets, torch.ones(7, 32), layout.array)
    rule, waits = row_rule("sgd", lr=1.0), {"side_effect": AssertionError}
    with (
        mock.patch.object(triton_lookup, "raise_if_bad", **waits),
        mock.patch.object(segments, "raise_if_bad", **waits),
    ):
        result = looked_up(device, *arguments, layout)
        dots = row_dots(*(part.to(device) for part in (*arguments, gradient.grad)), layout.array)
        moved_rows, _ = updated(device, held.weights, [], [gradient], rule, [1])
    torch.testing.assert_close(result, ref_lookup.bag_lookup(*arguments, layout.array, True))
    torch.testing.assert_close(dots.cpu(), ref_lookup.row_dots(*arguments, gradient.grad, layout.array))
    torch.testing.assert_close(moved_rows, expected_update(held.weights, [], [gradient], rule, [1])[0])


@case
def an_unchecked_lookup_is_replayed_by_a_graph(device: torch.device) -> None:
    """With other keys than those of the capture."""
    layout = make_layout(8)
    held = make_lookup(layout, 50, 1)
    later = held.keys // 2
    weights, keys, offsets = (part.to(device) for part in (held.weights, held.keys, held.offsets))

    def look_up() -> torch.Tensor:
        return bag_lookup(weights, keys, offsets, layout.array, True, is_checked=False)

    if device.type == "cuda":
        look_up()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = look_up()
        keys.copy_(later)
        graph.replay()
    else:
        keys.copy_(later)
        result = look_up()
    expected = ref_lookup.bag_lookup(held.weights, later, held.offsets, layout.array, True)
    torch.testing.assert_close(result.cpu(), expected)


@case
def initial_values_equal_the_plain_ones(device: torch.device) -> None:
    """Uniform ones bit for bit; normal ones within two units in the last place, as the logarithms of doubles differ."""
    keys = torch.tensor([0, 5, -1, 2**63 - 1, -(2**63), 77])
    rows = torch.tensor([3, 0, 6, 1, 5, 2])
    for width in (1, 7, 64):
        for kind in ("uniform", "normal"):
            weights = torch.zeros(7, width, device=device)
            fill_keyed_rows(weights, rows.to(device), keys.to(device), kind, 2**63 + 11, 0.25)
            expected = np.zeros((7, width), np.float32)
            ref_rows.fill_keyed_rows(expected, rows.numpy(), keys.numpy(), kind, 2**63 + 11, 0.25)
            ulps = (weights.cpu().view(torch.int32) - torch.from_numpy(expected).view(torch.int32)).abs().max()
            assert int(ulps) <= (0 if kind == "uniform" else 2)


@case
def low_scores_are_found_in_order(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (0, 1, 1023, 2500):
        spared = torch.rand(count, generator=generator) < 0.3
        for scores in (
            torch.randint(-5, 2**62, (count,), generator=generator) % 100,
            torch.randint(0, 100, (count,), generator=generator, dtype=torch.int32),
            torch.randn(count, generator=generator),
        ):
            for limit in (50, -7, 2**31 - 1):
                result = rows_at_most(scores.to(device), limit, spared.to(device))
                assert torch.equal(result.cpu(), ref_rows.rows_at_most(scores, limit, spared))


@case
def an_index_does_what_a_dict_does(device: torch.device) -> None:
    """Through growth, erased keys and rows that are given out again; a key that is repeated races with itself."""
    batch, most = (20_000, 60_000) if device.type == "cuda" else (40, 120)
    extremes = torch.tensor([0, -1, 2**63 - 1, -(2**63), 2**62, -(2**32), 2**63 - 1, -(2**63)])
    index, plain = HashIndex(device=device), RefIndex()
    free = torch.empty(0, dtype=torch.int64)
    next_row = 0
    for seed in range(7):
        keys = torch.randint(-most, most, (batch,), generator=torch.Generator().manual_seed(seed))
        keys[5:13] = extremes
        rows, new_keys = plain.insert(keys, free, next_row)
        result = index.insert(keys.to(device), free.to(device), next_row)
        assert torch.equal(result[0].cpu(), rows)
        assert torch.equal(result[1].cpu(), new_keys)
        next_row += max(0, new_keys.numel() - free.numel())
        gone = plain.erase(keys[:: 1 + seed % 3])
        assert torch.equal(index.erase(keys[:: 1 + seed % 3].to(device)).cpu(), gone)
        free = torch.cat([free[new_keys.numel() :], gone[gone >= 0]])
        assert torch.equal(index.find(keys.to(device)).cpu(), plain.find(keys))
        assert len(index) == len(plain)
    assert torch.equal(index.count(keys.to(device)).cpu(), plain.count(keys))
    for held in (index, plain):
        held.assign(keys.to(held.device), torch.arange(batch, device=held.device))
    found, rows, following = index.items()
    assert dict(zip(found.tolist(), rows.tolist(), strict=True)) == dict(
        zip(*(part.tolist() for part in plain.items()[:2]), strict=True)
    )
    assert following == -1
