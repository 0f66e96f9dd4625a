# SPDX-License-Identifier: Apache-2.0
"""Encoders: a sequence has the same vectors alone, beside others, and padded."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from terarec.nn.sequences import HSTU, RecurrentEncoder, SequenceEncoder, Transformer

LENGTHS = [3, 1, 0, 5, 2]
LENGTH, WIDTH = 5, 4


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def transformer(*, causal: bool, rate: float = 0.0) -> Transformer:
    return Transformer(LENGTH, WIDTH, layers=2, heads=2, inner=6, causal=causal, rate=rate, generator=generator())


ENCODERS: dict[str, Callable[[], SequenceEncoder]] = {
    "causal": lambda: transformer(causal=True),
    "bidirectional": lambda: transformer(causal=False),
    "hstu": lambda: HSTU(LENGTH, WIDTH, layers=2, heads=2, rate=0.0, generator=generator()),
    "recurrent": lambda: RecurrentEncoder(WIDTH, 3, 2, rate=0.0, generator=generator()),
}
each_encoder = pytest.mark.parametrize("name", ENCODERS)


def encoder_of(name: str) -> SequenceEncoder:
    """In float64, with weights that are not near zero."""
    encoder = ENCODERS[name]().double().eval()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.normal_(0, 0.7, generator=generator())
    return encoder


def vectors_of(lengths: list[int]) -> tuple[Tensor, Tensor]:
    values = torch.randn(sum(lengths), WIDTH, generator=generator(), dtype=torch.float64, requires_grad=True)
    return values, torch.tensor([0, *lengths]).cumsum(0)


@each_encoder
def test_sequences_do_not_see_each_other(name: str) -> None:
    encoder, (values, offsets) = encoder_of(name), vectors_of(LENGTHS)
    together = encoder(values, offsets)
    for begin, end in pairwise(offsets.tolist()):
        alone = encoder(values[begin:end], torch.tensor([0, end - begin]))
        torch.testing.assert_close(together[begin:end], alone)


@each_encoder
def test_padded_sequences_have_the_same_vectors(name: str) -> None:
    encoder, (values, offsets) = encoder_of(name), vectors_of(LENGTHS)
    lengths = torch.tensor(LENGTHS)
    padded = torch.full((len(LENGTHS), LENGTH, WIDTH), 9.0, dtype=torch.float64)
    for row, (begin, end) in enumerate(pairwise(offsets.tolist())):
        padded[row, : end - begin] = values[begin:end]
    out = encoder.padded(padded, lengths)
    is_there = torch.arange(LENGTH) < lengths.unsqueeze(1)
    torch.testing.assert_close(out[is_there], encoder(values, offsets))


@pytest.mark.parametrize("name", ["causal", "hstu", "recurrent"])
def test_later_positions_change_no_earlier_one(name: str) -> None:
    """Apart from the vectors of positions, which count from the end: both sequences have one length."""
    encoder, (values, offsets) = encoder_of(name), vectors_of([4])
    other = values.detach().clone()
    other[3] = 5.0
    torch.testing.assert_close(encoder(other, offsets)[:3], encoder(values, offsets)[:3])


@each_encoder
def test_gradients(name: str) -> None:
    encoder, (values, offsets) = encoder_of(name), vectors_of([2, 3])
    assert torch.autograd.gradcheck(lambda x: encoder(x, offsets), values)


@each_encoder
def test_no_positions(name: str) -> None:
    values, offsets = vectors_of([0, 0])
    assert encoder_of(name)(values, offsets).shape == (0, WIDTH)


def test_dropout_is_in_training_alone() -> None:
    encoder, (values, offsets) = transformer(causal=True, rate=0.5).double(), vectors_of(LENGTHS)
    assert torch.equal(encoder.eval()(values, offsets), encoder(values, offsets))
    assert not torch.equal(encoder.train()(values, offsets), encoder(values, offsets))
