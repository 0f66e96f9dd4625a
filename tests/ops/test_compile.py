# SPDX-License-Identifier: Apache-2.0
"""The embedding ops inside compiled and exported graphs."""

import io

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from terarec.kernels.cpu.dense import has_pair_dots
from terarec.nn import MLP, DotInteraction
from terarec.ops import bag_lookup, quantize_rows, quantized_bag_lookup
from terarec.ops.onednn import has_bfloat16
from terarec.ops.row_update import BagGradient, row_rule, row_update_
from tests.ops.bags import make_layout, make_lookup

RULE = row_rule("sgd", lr=0.1)
LAYOUT = make_layout(8)


def lookup_update_lookup(weights: Tensor, keys: Tensor, offsets: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Two equal lookups, an update, and the same lookup again."""
    first = bag_lookup(weights, keys, offsets, LAYOUT)
    same = bag_lookup(weights, keys, offsets, LAYOUT)
    row_update_(weights, (), [BagGradient(keys, offsets, grad, LAYOUT)], RULE, step=1)
    return first, same, bag_lookup(weights, keys, offsets, LAYOUT)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_lookups_around_an_update_are_neither_merged_nor_moved(backend):
    held = make_lookup(make_layout(8), 6, 2)
    grad = torch.ones(6, 32)
    results = []
    for function in (lookup_update_lookup, torch.compile(lookup_update_lookup, backend=backend, fullgraph=True)):
        weights = held.weights.clone()
        results.append((weights, *function(weights, held.keys, held.offsets, grad)))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
    _, first, same, last = results[1]
    assert torch.equal(first, same)
    assert not torch.equal(first, last)


@pytest.mark.parametrize(
    ("pooling", "is_weighted"), [("sum", False), ("mean", False), ("none", False), ("max", False), ("sqrtn", True)]
)
@pytest.mark.parametrize("op", [bag_lookup, quantized_bag_lookup])
def test_one_graph_serves_batches_of_every_size(op, pooling, is_weighted):
    torch.compiler.reset()  # compiled code of other cases counts against the most that there may be
    layout = make_layout(8, pooling)

    def function(rows: Tensor, keys: Tensor, offsets: Tensor, key_weights: Tensor | None) -> Tensor:
        return op(rows, keys, offsets, layout, key_weights=key_weights).sin()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for batch in (3, 4, 7, 64, 33):
        held = make_lookup(layout, batch, 2, seed=batch)
        rows = held.weights if op is bag_lookup else quantize_rows(held.weights)
        tensors = (rows, held.keys, held.offsets, held.key_weights if is_weighted else None)
        assert torch.equal(compiled(*tensors), function(*tensors))
    assert counter.frame_count <= 2  # the first size alone, then any


class Lookup(nn.Module):
    """A lookup that `torch.export` can take."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights = nn.Buffer(weights)
        self.layout = make_layout(8)

    def forward(self, keys: Tensor, offsets: Tensor) -> Tensor:
        return bag_lookup(self.weights, keys, offsets, self.layout)


def test_the_op_stays_itself_in_an_exported_program():
    held = make_lookup(make_layout(8), 6, 2)
    module = Lookup(held.weights)
    any_size = {0: torch.export.Dim.AUTO}
    program = torch.export.export(module, (held.keys, held.offsets), dynamic_shapes=(any_size, any_size))
    assert [node.name for node in program.graph.nodes if "terarec" in str(node.target)] == ["bag_lookup"]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for batch in (6, 11):
        other = make_lookup(make_layout(8), batch, 3, seed=batch)
        assert torch.equal(loaded(other.keys, other.offsets), module(other.keys, other.offsets))


@pytest.mark.parametrize("is_narrow", [True, False])
@pytest.mark.usefixtures("onednn")
def test_layers_are_their_own_ops_forward_and_backward(is_narrow):
    if not has_pair_dots(is_narrow) or (is_narrow and not has_bfloat16()):
        pytest.skip("the processor has no units for these products")
    torch.compiler.reset()
    bottom = MLP(32, (32,), generator=torch.Generator().manual_seed(1), relus=(True,))
    dots = DotInteraction(3, 32)
    x, others = torch.randn(4096, 32, requires_grad=True), torch.randn(4096, 64, requires_grad=True)
    called = set()

    def record(graph, inputs):
        called.update(str(node.target) for node in graph.graph.nodes if str(node.target).startswith("terarec."))
        return make_boxed_func(graph.forward)

    def loss(x, others):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
            return dots(bottom(x), others).float().square().mean()

    results = []
    for function in (loss, torch.compile(loss, backend=aot_autograd(fw_compiler=record), fullgraph=True)):
        value = function(x, others)
        results.append((value, *torch.autograd.grad(value, [x, others, *bottom.parameters()])))
    ops = ("linear", "mask_gradient", "pair_dots", "pair_gradients", *(() if is_narrow else ("weight_gradient",)))
    assert called == {f"terarec.{op}.default" for op in ops}
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=2**-7 if is_narrow else 1e-5, atol=1e-6)
