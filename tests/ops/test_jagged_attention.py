# SPDX-License-Identifier: Apache-2.0
"""`jagged_attention` equals its formula and a loop over sequences, with all gradients, and keeps no scores."""

import itertools
import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from terarec.errors import ConfigError
from terarec.kernels.attention import AttentionForm, ScoreBiases
from terarec.ops import jagged_attention as module
from terarec.ops.jagged_attention import jagged_attention
from tests.errors import at
from tests.params import in_every_run

Kind = Literal["softmax", "silu"]
KINDS: tuple[Kind, ...] = ("softmax", "silu")
LENGTHS = [3, 0, 1, 7, 4, 4, 0, 2]
HEADS, WIDTH, VALUES = 2, 3, 5


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def inputs(
    lengths: list[int], dtype: torch.dtype = torch.float64, *, values: int = VALUES
) -> tuple[Tensor, Tensor, Tensor]:
    total = sum(lengths)
    query, key = (drawn(total, HEADS, WIDTH, seed=seed, dtype=dtype) for seed in (1, 2))
    return query, key, drawn(total, HEADS, values, seed=3, dtype=dtype)


def biases(lengths: list[int], which: str, dtype: torch.dtype = torch.float64) -> ScoreBiases:
    position = drawn(HEADS, 2 * max(lengths) + 1, seed=4, dtype=dtype) if "position" in which else None
    if "time" not in which:
        return ScoreBiases(position=position)
    gaps = torch.randint(0, 9, (sum(lengths),), generator=torch.Generator().manual_seed(6))
    return ScoreBiases(position=position, time=drawn(HEADS, 6, seed=5, dtype=dtype), times=gaps.cumsum(0))


def by_hand(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], form: AttentionForm, added: ScoreBiases
) -> Tensor:
    """The sum over positions, one by one."""
    rows, begin = [], 0
    for length in lengths:
        for i in range(begin, begin + length):
            heads = []
            for head in range(HEADS):
                last = i + 1 if form.causal else begin + length
                scores = []
                for j in range(begin, last):
                    score = query[i, head] @ key[j, head] / math.sqrt(WIDTH)
                    if added.position is not None:
                        score = score + added.position[head, added.position.shape[1] // 2 + i - j]
                    if added.time is not None and added.times is not None:
                        gap = max(1, abs(int(added.times[i] - added.times[j])))
                        score = score + added.time[head, min(int(math.log(gap) / 0.301), added.time.shape[1] - 1)]
                    scores.append(score)
                stacked = torch.stack(scores)
                weights = stacked.softmax(0) if form.kind == "softmax" else stacked * stacked.sigmoid()
                heads.append(weights @ value[begin:last, head])
            rows.append(torch.stack(heads))
        begin += length
    return torch.stack(rows)


@pytest.mark.parametrize("values", [WIDTH, VALUES])
@pytest.mark.parametrize("which", ["none", "position", "time", "position and time"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_are_those_of_the_sum(kind: Kind, causal: bool, which: str, values: int) -> None:
    tensors, form = inputs(LENGTHS, values=values), AttentionForm(kind=kind, causal=causal)
    added = biases(LENGTHS, which)
    expected = by_hand(*tensors, LENGTHS, form, added)
    upstream = drawn(*expected.shape, seed=9).detach()
    learned = [*tensors, *(bias for bias in (added.position, added.time) if bias is not None)]
    wanted = torch.autograd.grad(expected, learned, upstream)
    implementations: tuple[Literal["auto", "ref"], ...] = ("auto", "ref")
    for implementation in implementations:
        found = jagged_attention(*tensors, offsets_of(LENGTHS), form, added, implementation=implementation)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, learned, upstream), wanted)


@pytest.mark.parametrize("which", ["none", "position and time"])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch, kind: Kind, which: str) -> None:
    lengths = [17, 2, 9, 31, 30]
    tensors, added = inputs(lengths), biases(lengths, which)
    results = []
    for scores in (1 << 21, 100):
        monkeypatch.setattr(module, "_BLOCK_SCORES", scores)
        out = jagged_attention(*tensors, offsets_of(lengths), AttentionForm(kind=kind), added)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("kind", KINDS)
def test_scale_and_divisor(kind: Kind) -> None:
    query, key, value = inputs([5, 2])
    found = jagged_attention(query, key, value, offsets_of([5, 2]), AttentionForm(kind=kind, scale=0.5, divisor=4.0))
    scaled = query * 0.5 * math.sqrt(WIDTH)
    plain = jagged_attention(scaled, key, value, offsets_of([5, 2]), AttentionForm(kind=kind))
    torch.testing.assert_close(found, plain / 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_positions(lengths: list[int], kind: Kind) -> None:
    out = jagged_attention(*inputs(lengths), offsets_of(lengths), AttentionForm(kind=kind))
    assert out.shape == (0, HEADS, VALUES)
    out.sum().backward()


@pytest.mark.parametrize("which", ["none", "position and time"])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_stays_near_float32(kind: Kind, which: str) -> None:
    wide = inputs(LENGTHS, torch.float32)
    narrow = [tensor.detach().bfloat16() for tensor in wide]
    added, form = biases(LENGTHS, which, torch.float32), AttentionForm(kind=kind)
    expected = jagged_attention(*wide, offsets_of(LENGTHS), form, added)
    found = jagged_attention(*narrow, offsets_of(LENGTHS), form, added)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize(
    ("kind", "which", "values"),
    in_every_run(
        [(kind, "position and time", VALUES) for kind in KINDS],
        itertools.product(KINDS, ["none", "position and time"], [WIDTH, VALUES]),
    ),
)
def test_memory_grows_with_the_sum_of_lengths(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, which: str, values: int
) -> None:
    """One long sequence beside many short ones: neither is padded to it, nor has it a matrix of scores."""
    monkeypatch.setattr(module, "_BLOCK_SCORES", 1024)
    lengths = [250, *[1] * 250, *[3] * 100]
    tensors, added = inputs(lengths, torch.float32, values=values), biases(lengths, which, torch.float32)
    with Largest() as largest:
        jagged_attention(*tensors, offsets_of(lengths), AttentionForm(kind=kind), added).sum().backward()
    assert largest.numel <= 4 * sum(lengths) * HEADS * VALUES


def test_other_inputs_are_rejected() -> None:
    query, key, value = inputs([5], torch.float32)
    with pytest.raises(ConfigError, check=at("jagged_attention", "[T, H, D]")):
        jagged_attention(query, key[:3], value, offsets_of([5]))
    with pytest.raises(ConfigError, check=at("jagged_attention", "offsets torch.int32[2], expected int64[B + 1]")):
        jagged_attention(query, key, value, offsets_of([5]).int())


CASES: dict[str, tuple[ScoreBiases, tuple[str, ...]]] = {
    "few distances": (ScoreBiases(position=torch.zeros(HEADS, 7)), ("position bias", "7 distances")),
    "an even number of distances": (ScoreBiases(position=torch.zeros(HEADS, 10)), ("position bias", "2 M + 1")),
    "other heads": (ScoreBiases(position=torch.zeros(3, 9)), ("position bias", "[3, 9]")),
    "no times": (ScoreBiases(time=torch.zeros(HEADS, 4)), ("times", "none")),
    "other times": (
        ScoreBiases(time=torch.zeros(HEADS, 4), times=torch.zeros(4, dtype=torch.int64)),
        ("times", "int64[5]"),
    ),
    "a flat time bias": (ScoreBiases(time=torch.zeros(4)), ("time bias", "[4]")),
}


@pytest.mark.parametrize("case", CASES)
def test_biases_that_do_not_fit_are_rejected(case: str) -> None:
    added, place = CASES[case]
    with pytest.raises(ConfigError, check=at(*place)):
        jagged_attention(*inputs([5], torch.float32), offsets_of([5]), None, added)
