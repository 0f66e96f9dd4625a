# SPDX-License-Identifier: Apache-2.0
"""`EmbeddingBag` and `Embedding` against `torch.nn`: the same results, gradients and state over their arguments."""

import copy
import io
import itertools

import pytest
import torch
from torch import Tensor, nn

import terarec
from terarec.errors import ConfigError, KeyOutOfRangeError
from tests.errors import at

ROWS, WIDTH = 23, 5
KEYS = torch.tensor([3, 7, 3, 0, 22, 7, 7, 5, 0, 3, 11, 1])
OFFSETS = torch.tensor([0, 2, 2, 6, 11])


def pair(kind: str, **arguments) -> tuple[nn.Module, nn.Module]:
    """terarec's module and torch's, of equal weights."""
    torch.manual_seed(0)
    mine = getattr(terarec, kind)(ROWS, WIDTH, **arguments)
    theirs = getattr(nn, kind)(ROWS, WIDTH, **arguments)
    theirs.load_state_dict(mine.state_dict())
    return mine, theirs


def assert_alike(mine: nn.Module, theirs: nn.Module, *inputs: Tensor, tolerance: float = 1e-6) -> None:
    """Assert equal results, types, gradients and, where max_norm changes them, weights."""
    result, expected = mine(*inputs), theirs(*inputs)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(expected.dtype)
    result.backward(grad)
    expected.backward(grad)
    assert mine.weight.grad.is_sparse == theirs.weight.grad.is_sparse
    assert mine.weight.grad.dtype == theirs.weight.grad.dtype
    of_mine, of_theirs = mine.weight.grad.to_dense(), theirs.weight.grad.to_dense()
    torch.testing.assert_close(of_mine, of_theirs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mine.weight, theirs.weight)


BAGS = {
    "1-D": (KEYS, OFFSETS, False),
    "with the last offset": (KEYS, torch.cat([OFFSETS, torch.tensor([12])]), True),
    "2-D": (KEYS.reshape(4, 3), None, False),
    "int32": (KEYS.int(), OFFSETS.int(), False),
    "no bag": (KEYS[:0], OFFSETS[:0], False),
    "empty bags": (KEYS[:0], torch.tensor([0, 0, 0]), False),
    "2-D without keys": (torch.zeros(0, 3, dtype=torch.int64), None, False),
}


@pytest.mark.parametrize("bags", BAGS)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 7, -1])
def test_bags_equal_torch(bags, mode, sparse, padding_idx):
    keys, offsets, include_last = BAGS[bags]
    sparse = sparse and mode != "max"  # torch has no such gradient
    mine, theirs = pair(
        "EmbeddingBag", mode=mode, sparse=sparse, padding_idx=padding_idx, include_last_offset=include_last
    )
    assert_alike(mine, theirs, *([keys] if offsets is None else [keys, offsets]))


@pytest.mark.parametrize("padding_idx", [None, 7])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("two_dimensional", [False, True])
def test_weights_of_keys_and_their_gradient(padding_idx, sparse, two_dimensional):
    mine, theirs = pair("EmbeddingBag", mode="sum", padding_idx=padding_idx, sparse=sparse)
    keys, offsets = (KEYS.reshape(4, 3), None) if two_dimensional else (KEYS, OFFSETS)
    factors = [torch.linspace(-1, 2, 12).reshape(keys.shape).requires_grad_() for _ in range(2)]
    for module, weights in zip((mine, theirs), factors, strict=True):
        module(keys, offsets, weights).square().sum().backward()
    torch.testing.assert_close(factors[0].grad, factors[1].grad)
    torch.testing.assert_close(mine.weight.grad.to_dense(), theirs.weight.grad.to_dense())
    alone = factors[0].detach().requires_grad_()
    mine.requires_grad_(False)(keys, offsets, alone).square().sum().backward()
    torch.testing.assert_close(alone.grad, factors[1].grad)


@pytest.mark.parametrize("kind", ["EmbeddingBag", "Embedding"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 7])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_gradients_divided_by_how_often_a_key_occurs(kind, sparse, padding_idx, mode):
    """By torch's formula, not its kernel: on CPUs that divides by other keys' counts (pytorch issue 190063)."""
    arguments = {"mode": mode} if kind == "EmbeddingBag" else {}
    inputs = (KEYS, OFFSETS) if kind == "EmbeddingBag" else (KEYS,)
    mine, theirs = pair(kind, padding_idx=padding_idx, **arguments)
    mine.scale_grad_by_freq, mine.sparse = True, sparse
    for module in (mine, theirs):
        module(*inputs).square().sum().backward()
    expected = theirs.weight.grad / KEYS.bincount(minlength=ROWS).clamp(min=1)[:, None]
    torch.testing.assert_close(mine.weight.grad.to_dense(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_narrow_weights(dtype, mode):
    tolerance = 4 * torch.finfo(dtype).eps  # torch pools in the narrow type, the engine in float32
    mine, theirs = pair("EmbeddingBag", mode=mode, dtype=dtype)
    assert_alike(mine, theirs, KEYS, OFFSETS, tolerance=tolerance)
    mine, theirs = pair("Embedding")
    assert_alike(mine.to(dtype), theirs.to(dtype), KEYS, tolerance=tolerance)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("norm_type", [1.0, 2.0])
@pytest.mark.parametrize("sparse", [False, True])
def test_max_norm_shrinks_rows_as_torch_does(max_norm, norm_type, sparse):
    arguments = {"max_norm": max_norm, "norm_type": norm_type, "sparse": sparse}
    assert_alike(*pair("EmbeddingBag", mode="sum", **arguments), KEYS, OFFSETS)
    assert_alike(*pair("Embedding", **arguments), KEYS)


@pytest.mark.parametrize("shape", [(12,), (3, 4), (2, 3, 2), (0,), (2, 0), ()])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 0, -1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_embeddings_equal_torch(shape, sparse, padding_idx, dtype):
    if sparse and not shape:
        padding_idx = None  # torch's own backward fails on a single key then
    mine, theirs = pair("Embedding", sparse=sparse, padding_idx=padding_idx)
    with torch.no_grad():  # a padding row that is not zero is still looked up
        mine.weight += 1.0
        theirs.weight += 1.0
    keys = KEYS[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    assert_alike(mine, theirs, keys)


def test_a_sparse_gradient_holds_each_touched_row_once():
    for rows in (ROWS, 100_000):  # marked, and sorted
        bag = terarec.EmbeddingBag(rows, WIDTH, mode="sum", sparse=True)
        (grad,) = torch.autograd.grad(bag(KEYS, OFFSETS).sum(), bag.weight)
        assert grad.is_coalesced()
        assert grad.indices().tolist() == [[0, 1, 3, 5, 7, 11, 22]]
        assert grad.values()[:, 0].tolist() == [2, 1, 3, 1, 3, 1, 1]
        bag(KEYS, OFFSETS).sum().backward()  # autograd drops the mark, not the order
        assert torch.equal(bag.weight.grad._indices(), grad.indices())


@pytest.mark.parametrize(("kind", "inputs"), [("EmbeddingBag", (KEYS, OFFSETS)), ("Embedding", (KEYS,))])
@pytest.mark.parametrize(
    ("optimizer", "sparse"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), True),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), True),
        (lambda p: torch.optim.SparseAdam(p, lr=0.1), True),
        (lambda p: torch.optim.Adam(p, lr=0.1), False),
    ],
)
def test_an_ordinary_training_loop(kind, inputs, optimizer, sparse):
    mine, theirs = pair(kind, sparse=sparse)
    optimizers = [optimizer(mine.parameters()), optimizer(theirs.parameters())]
    for _ in range(4):
        for module, held in zip((mine, theirs), optimizers, strict=True):
            held.zero_grad()
            module(*inputs).square().sum().backward()
            module(*inputs[:1], *(torch.tensor([0, 5]),) * (len(inputs) - 1)).sin().sum().backward()  # accumulates
            held.step()
        torch.testing.assert_close(mine.weight, theirs.weight, rtol=1e-5, atol=1e-6)


def test_from_pretrained_and_given_weights():
    weights = torch.randn(ROWS, WIDTH)
    for kind, inputs in [("EmbeddingBag", (KEYS, OFFSETS)), ("Embedding", (KEYS,))]:
        mine = getattr(terarec, kind).from_pretrained(weights)
        assert type(mine) is getattr(terarec, kind)
        assert mine.weight.data_ptr() == weights.data_ptr()
        result = mine(*inputs)
        assert not result.requires_grad
        torch.testing.assert_close(result, getattr(nn, kind).from_pretrained(weights)(*inputs))
        given = getattr(terarec, kind)(ROWS, WIDTH, _weight=weights)
        assert given.weight.data_ptr() == weights.data_ptr()


def test_state_dicts_fit_both_ways():
    for kind in ("EmbeddingBag", "Embedding"):
        mine, theirs = getattr(terarec, kind)(ROWS, WIDTH), getattr(nn, kind)(ROWS, WIDTH)
        mine.load_state_dict(theirs.state_dict())
        theirs.load_state_dict(mine.state_dict())
        assert list(mine.state_dict()) == ["weight"]
        assert repr(mine).replace("terarec.", "") == repr(theirs)


def test_copies_are_independent_and_ordinary():
    mine, _ = pair("EmbeddingBag", mode="sum")
    mine(KEYS, OFFSETS)
    buffer = io.BytesIO()
    torch.save(mine, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(mine), torch.load(buffer, weights_only=False)):
        assert torch.equal(twin(KEYS, OFFSETS), mine(KEYS, OFFSETS))
        twin(KEYS, OFFSETS).sum().backward()
        assert twin.weight.grad is not None
        assert mine.weight.grad is None


@pytest.mark.parametrize(("kind", "inputs"), [("EmbeddingBag", (KEYS, OFFSETS)), ("Embedding", (KEYS,))])
def test_transforms_traces_and_shapes_alone_are_torchs(kind, inputs):
    mine, theirs = pair(kind)

    def gradient(module):
        def loss(weight):
            return torch.func.functional_call(module, {"weight": weight}, inputs).square().sum()

        return torch.func.grad(loss)(module.weight.detach())

    torch.testing.assert_close(gradient(mine), gradient(theirs))
    keys = KEYS.reshape(3, 4)
    assert torch.equal(torch.func.vmap(mine)(keys[:, None]), torch.func.vmap(theirs)(keys[:, None]))
    if kind == "EmbeddingBag":  # whose keys may be of two dimensions
        for trace in (lambda module: torch.jit.trace(module, keys), torch.fx.symbolic_trace):
            torch.testing.assert_close(trace(mine)(keys), theirs(keys))
    shapes = mine.to("meta")(*(tensor.to("meta") for tensor in inputs))
    assert (shapes.device.type, shapes.shape) == ("meta", theirs(*inputs).shape)


def test_gradients_flow_to_what_made_the_weight():
    mine, _ = pair("EmbeddingBag", mode="sum")
    scale = torch.tensor(2.0, requires_grad=True)
    torch.func.functional_call(mine, {"weight": mine.weight * scale}, (KEYS, OFFSETS)).sum().backward()
    expected = mine(KEYS, OFFSETS).sum()
    torch.testing.assert_close(scale.grad, expected)


@pytest.mark.parametrize(
    ("inputs", "place"),
    [
        ((KEYS,), ("input", "got shape [12] with offsets of none")),
        ((KEYS.reshape(3, 4), OFFSETS), ("offsets", "got a tensor with an input [B, L]")),
        ((KEYS.float(), OFFSETS), ("input", "got float32")),
        ((KEYS, OFFSETS.float()), ("offsets", "got float32")),
        ((KEYS, OFFSETS + 1), ("offsets[0]",)),
        ((KEYS.reshape(3, 2, 2), OFFSETS), ("input", "got shape [3, 2, 2]")),
        ((KEYS, OFFSETS, torch.ones(11)), ("per_sample_weights",)),
    ],
)
def test_inputs_that_do_not_fit_are_rejected(inputs, place):
    with pytest.raises(ConfigError, check=at(*place)):
        terarec.EmbeddingBag(ROWS, WIDTH, mode="sum")(*inputs)


def test_what_torch_rejects_is_rejected():
    for mode in ("mean", "max"):
        with pytest.raises(ConfigError, check=at("per_sample_weights")):
            terarec.EmbeddingBag(ROWS, WIDTH, mode=mode)(KEYS, OFFSETS, torch.ones(12))
    with pytest.raises(ConfigError, check=at("scale_grad_by_freq")):
        terarec.EmbeddingBag(ROWS, WIDTH, mode="max", scale_grad_by_freq=True)(KEYS, OFFSETS)


def test_a_jagged_nested_input():
    mine, theirs = pair("EmbeddingBag", mode="sum")
    nested = torch.nested.nested_tensor_from_jagged(KEYS, torch.cat([OFFSETS, torch.tensor([12])]))
    assert_alike(mine, theirs, nested)


def test_a_key_outside_and_a_wrong_type_are_rejected():
    mine = terarec.Embedding(ROWS, WIDTH)
    for key in (-1, ROWS):
        with pytest.raises(KeyOutOfRangeError, check=at("feature 'input'")):
            mine(torch.tensor([0, key]))
    with pytest.raises(ConfigError, check=at("weights")):
        mine.double()(KEYS)
    with pytest.raises(ConfigError, check=at("BagLayout.pooling")):
        terarec.EmbeddingBag(ROWS, WIDTH, mode="median")(KEYS, OFFSETS)


def test_the_grid_of_arguments_is_torchs():
    """Every argument of torch's constructors is one of ours, with its default."""
    import inspect

    for kind in ("EmbeddingBag", "Embedding"):
        for method in ("__init__", "from_pretrained", "forward"):
            mine, theirs = (
                inspect.signature(getattr(getattr(library, kind), method)).parameters for library in (terarec, nn)
            )
            for (name, one), (other_name, other) in itertools.zip_longest(mine.items(), theirs.items()):
                assert name == other_name
                assert one.default == other.default
