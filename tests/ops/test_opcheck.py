# SPDX-License-Identifier: Apache-2.0
"""Every registered op under `torch.library.opcheck`: schema, autograd, fake tensors, ahead-of-time dispatch."""

import pytest
import torch
from torch.library import opcheck

from terarec.kernels.contract import KernelGradient
from terarec.kernels.row_rules import number_names
from terarec.ops import quantize_rows
from terarec.ops.bag_lookup import _bag_lookup_op, _quantized_bag_lookup_op, key_weight_gradient_op
from terarec.ops.linear import _linear_op, _mask_gradient_op, _weight_gradient_op
from terarec.ops.onednn import has_bfloat16
from terarec.ops.pair_dots import _pair_dots_op, _pair_gradients_op
from terarec.ops.row_update import _row_update_op
from tests.ops.bags import IMPLEMENTATIONS, make_layout, make_lookup
from tests.ops.rules import make_gradients, make_rule, make_state
from tests.params import in_every_run

LOOKUPS = [("sum", False), ("max", False), ("none", False), ("sum", True), ("mean", True), ("sqrtn", True)]
"""Poolings, without and with weights of keys."""
QUICK = [("none", False), ("mean", True)]
"""What is checked knows tensors and not numbers: bags or keys, with and without weights."""


def lookup_arguments(rows, held, is_weighted, implementation="auto"):
    key_weights = held.key_weights.clone() if is_weighted else None
    return (rows, held.keys, held.offsets, held.layout.array, held.layout.pooling_codes, key_weights, implementation)


def test_these_are_all_ops():
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("terarec::")}
    checked = {_bag_lookup_op, key_weight_gradient_op, _quantized_bag_lookup_op, _row_update_op}
    checked |= {_linear_op, _weight_gradient_op, _mask_gradient_op, _pair_dots_op, _pair_gradients_op}
    assert registered == {op._qualname for op in checked}


@pytest.mark.parametrize(
    ("pooling", "is_weighted", "implementation"),
    in_every_run(
        [*((*lookup, "cpu") for lookup in QUICK), ("mean", True, "ref")],
        [
            *((*lookup, "cpu") for lookup in LOOKUPS),
            *(("mean", True, other) for other in IMPLEMENTATIONS if other != "cpu"),
        ],
    ),
)
def test_bag_lookup(pooling, is_weighted, implementation):
    held = make_lookup(make_layout(8, pooling), 5, 3)
    opcheck(_bag_lookup_op, lookup_arguments(held.weights, held, is_weighted, implementation))


@pytest.mark.parametrize(("pooling", "is_weighted"), in_every_run(QUICK, LOOKUPS))
def test_bag_lookup_with_a_gradient_of_the_rows(pooling, is_weighted):
    """All but ``test_aot_dispatch_dynamic``, which traces the way back from the rows, too.

    That is plain PyTorch that reads the offsets in order to check them, and ends in a sparse COO tensor: no graph holds
    either. Compiled training takes the ways back of `terarec.embedding`: a dense gradient, or one that is put aside.
    """
    held = make_lookup(make_layout(8, pooling), 5, 3)
    arguments = lookup_arguments(held.weights.clone().requires_grad_(), held, is_weighted)
    opcheck(_bag_lookup_op, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


@pytest.mark.parametrize("pooling", in_every_run(["mean"], ["sum", "mean", "sqrtn"]))
def test_bag_lookup_with_a_gradient_of_the_weights_of_keys(pooling):
    held = make_lookup(make_layout(8, pooling), 5, 3)
    arguments = lookup_arguments(held.weights, held, True)
    arguments[5].requires_grad_()
    opcheck(_bag_lookup_op, arguments)


@pytest.mark.parametrize("pooling", in_every_run(["mean"], ["sum", "mean", "sqrtn"]))
def test_key_weight_gradient(pooling):
    held = make_lookup(make_layout(8, pooling), 5, 3)
    arguments = (held.weights, held.keys, held.offsets, torch.randn(5, 32), held.layout.array, held.key_weights)
    opcheck(key_weight_gradient_op, (*arguments, "auto"))


@pytest.mark.parametrize(("pooling", "is_weighted"), in_every_run(QUICK, LOOKUPS))
def test_quantized_bag_lookup(pooling, is_weighted):
    held = make_lookup(make_layout(8, pooling), 5, 3)
    opcheck(_quantized_bag_lookup_op, lookup_arguments(quantize_rows(held.weights), held, is_weighted))


@pytest.mark.parametrize(
    ("kind", "mode", "pooling", "dtype"),
    [
        ("sgd", "local", "none", torch.float32),
        ("adagrad", "global", "max", torch.bfloat16),
        ("adam", "lazy_global", "sum", torch.float32),
        ("ftrl", "global", "mean", torch.float16),
    ],
)
@pytest.mark.parametrize("is_weighted", in_every_run([True], [False, True]))
def test_row_update(kind, mode, pooling, dtype, is_weighted):
    weights, gradients = make_gradients(8, pooling, 5, 2)
    takes = is_weighted and gradients[0].layout.takes_key_weights
    laid = [
        KernelGradient(
            held.keys, held.offsets, held.grad, held.layout.array, torch.rand(held.keys.shape) if takes else None
        )
        for held in gradients
    ]
    rule = make_rule(kind, mode)
    numbers = [float(getattr(rule, name)) for name in number_names(type(rule))]
    table_lr = torch.tensor([1.0, 0.0, 0.5]) if is_weighted else None
    opcheck(
        _row_update_op,
        (
            *(weights.to(dtype), list(make_state(rule, weights))),
            [part for held in laid for part in held],
            *(kind, mode, numbers, [1, 7], None, table_lr, "auto"),
        ),
    )


@pytest.mark.parametrize(
    ("dtype", "activation", "has_bias"),
    [(torch.bfloat16, "relu", True), (torch.float32, "relu", False), (torch.float32, "none", True)],
)
def test_linear(dtype, activation, has_bias):
    if not torch.backends.mkldnn.is_available() or (dtype is torch.bfloat16 and not has_bfloat16()):
        pytest.skip("oneDNN does not multiply this type here")
    x, weight, bias = (torch.randn(shape).to(dtype).requires_grad_() for shape in ((9, 6), (5, 6), (5,)))
    opcheck(_linear_op, (x, weight, bias if has_bias else None, activation))
    grad, part = torch.randn(9, 5).to(dtype), torch.randn(9, 5).to(dtype).relu_()
    opcheck(_mask_gradient_op, (grad, part))
    opcheck(_weight_gradient_op, (grad, x.detach()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pair_dots(dtype):
    first, others = torch.randn(7, 8).to(dtype).requires_grad_(), torch.randn(7, 32).requires_grad_()
    opcheck(_pair_dots_op, (first, others, 32, "auto"))
    opcheck(_pair_gradients_op, (torch.randn(7, 32).to(dtype), first.detach(), others.detach(), "auto"))
