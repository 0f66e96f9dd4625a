# SPDX-License-Identifier: Apache-2.0
"""Negatives are no items of their user, and uniform among all others."""

from collections.abc import Callable

import pytest
import torch

from terarec.errors import ConfigError
from terarec.nn.negatives import Candidates, Negatives, Owned, Sampler
from terarec.spec import NegativesSpec
from tests.errors import at


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn_for(owners: torch.Tensor, users: torch.Tensor, items: torch.Tensor, high: int) -> Negatives:
    """Uniform draws from 1 to `high` - 1."""
    return Sampler(NegativesSpec(), 1, high, where="model").draw(owners, [Owned(users, items, high)], None, generator())


def test_no_negative_is_an_item_of_its_user() -> None:
    users = torch.arange(50).repeat_interleave(10)
    items = torch.randint(1, 30, (500,), generator=generator(1))
    owners = torch.arange(50).repeat_interleave(200)
    drawn, is_free = drawn_for(owners, users, items, 30)
    assert is_free.all()
    assert drawn.min() >= 1
    assert drawn.max() < 30
    own = {(user, item) for user, item in zip(users.tolist(), items.tolist(), strict=True)}
    assert not own & set(zip(owners.tolist(), drawn.tolist(), strict=True))


def test_a_user_of_all_items_but_one_gets_that_one() -> None:
    items = torch.tensor([key for key in range(1, 1000) if key != 777])
    drawn, is_free = drawn_for(torch.zeros(3, dtype=torch.int64), torch.zeros_like(items), items, 1000)
    assert drawn.tolist() == [777] * 3
    assert is_free.all()


def test_a_user_of_all_items_has_no_negative() -> None:
    items = torch.tensor([1, 2, 3, 1])
    users = torch.tensor([0, 0, 0, 1])
    drawn, is_free = drawn_for(torch.tensor([0, 1]), users, items, 4)
    assert is_free.tolist() == [False, True]
    assert drawn[1] in (2, 3)


def test_users_without_items_and_no_users() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    drawn, is_free = drawn_for(torch.tensor([4, 4]), nothing, nothing, 3)
    assert is_free.all()
    assert set(drawn.tolist()) <= {1, 2}
    assert drawn_for(nothing, nothing, nothing, 3).keys.shape == (0,)


def test_a_generator_alone_decides_the_draws() -> None:
    torch.manual_seed(0)
    drawing = Sampler(NegativesSpec(count=5), 0, 100, where="model")
    first, _ = drawing.shared(Candidates(), torch.device("cpu"), generator())
    torch.manual_seed(1)
    assert torch.equal(first, drawing.shared(Candidates(), torch.device("cpu"), generator())[0])


ITEMS = 6
OWNERS = torch.zeros(20_000, dtype=torch.int64)
OWNED = [
    Owned(torch.tensor([0, 0, 1]), torch.tensor([2, 3, 4]), ITEMS),
    Owned(torch.tensor([1]), torch.tensor([1]), ITEMS),
]
SHOWN = (torch.tensor([4, 5, 5, 2, 1]), torch.tensor([0, 4, 5, 5]))  # of three samples, the last of which has none
BATCH = torch.tensor([1, 1, 1, 2, 5])


def sampler(draw: str, **settings: object) -> Sampler:
    spec = NegativesSpec(draw=draw, column="shown" if draw == "column" else None, **settings)  # type: ignore[arg-type]
    return Sampler(spec, 1, ITEMS, where="model")


SHARES: dict[str, tuple[Sampler, list[float]]] = {
    "uniform": (sampler("uniform"), [0, 1, 0, 0, 1, 1]),
    "popularity": (sampler("popularity", power=2.0), [0, 16, 0, 0, 1, 4]),
    "batch": (sampler("batch"), [0, 3, 0, 0, 0, 1]),
    "mixed": (sampler("mixed", uniform_share=0.25), [0, 0.25 / 5 + 0.45, 0, 0, 0.25 / 5, 0.25 / 5 + 0.15]),
    "hard": (sampler("hard", pool=2), [0, 1, 0, 0, 3, 5]),  # 1 is the lowest of three, 5 the highest
    "column": (sampler("column"), [0, 0, 0, 0, 1, 2]),
}


def check_shares(keys: torch.Tensor, shares: torch.Tensor) -> None:
    """The test of chi-square: the bound has 0.1 % of samples above it for five values, and fewer for less."""
    counts, expected = keys.bincount(minlength=ITEMS).double(), len(keys) * shares
    assert not counts[shares == 0].any()
    is_drawn = shares > 0
    assert ((counts - expected).square()[is_drawn] / expected[is_drawn]).sum() < 18.5


@pytest.mark.parametrize("kind", SHARES)
def test_a_sampler_draws_by_its_kind_and_none_of_the_owner(kind: str) -> None:
    drawing, weights = SHARES[kind]
    drawing.observe(torch.tensor([1, 1, 1, 2, 5]))
    candidates = Candidates(batch=BATCH, lists=SHOWN, samples=torch.zeros_like(OWNERS), score=lambda keys: keys.float())
    keys, is_valid = drawing.draw(OWNERS, OWNED, candidates, generator())
    assert is_valid.all()
    expected = torch.tensor(weights, dtype=torch.float64)
    check_shares(keys, expected / expected.sum())


@pytest.mark.parametrize("kind", SHARES)
def test_owners_of_all_there_is_to_draw_have_none(kind: str) -> None:
    owned = [Owned(torch.zeros(5, dtype=torch.int64), torch.arange(1, 6), ITEMS)]
    owners, samples = torch.tensor([0, 0]), torch.tensor([0, 2])
    candidates = Candidates(batch=BATCH, lists=SHOWN, samples=samples, score=lambda keys: keys.float())
    drawn = SHARES[kind][0].draw(owners, owned, candidates, generator())
    assert not drawn.is_valid.any()
    assert SHARES[kind][0].draw(owners[:0], owned, candidates._replace(samples=samples[:0])).keys.shape == (0,)


def test_a_list_without_keys_gives_no_negative() -> None:
    candidates = Candidates(lists=SHOWN, samples=torch.tensor([1, 2]))
    assert SHARES["column"][0].draw(torch.tensor([7, 7]), OWNED, candidates).is_valid.tolist() == [True, False]


@pytest.mark.parametrize("kind", ["uniform", "popularity", "batch", "mixed"])
def test_the_probabilities_of_shared_negatives_are_those_of_their_draws(kind: str) -> None:
    drawing = sampler(kind, count=40_000)
    drawing.observe(BATCH)
    keys, log_q = drawing.shared(Candidates(batch=BATCH), torch.device("cpu"), generator())
    check_shares(keys, torch.zeros(ITEMS).double().index_copy(0, keys, log_q.exp().double()))


@pytest.mark.parametrize("kind", ["hard", "column"])
def test_draws_that_differ_by_sample_are_not_shared(kind: str) -> None:
    with pytest.raises(ConfigError, check=at("negatives.draw", repr(kind))):
        SHARES[kind][0].shared(Candidates(batch=BATCH), torch.device("cpu"))


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: Sampler(NegativesSpec(), 1, 2, where="mf"), ("mf", "got 1 items")),
        (lambda: Sampler(NegativesSpec(), 1, None, where="mf"), ("mf", "any keys")),
        (lambda: NegativesSpec(draw="column"), ("NegativesSpec.column", "None")),
        (lambda: NegativesSpec(column="shown"), ("NegativesSpec.column", "'shown'")),
        (lambda: NegativesSpec(count=0), ("NegativesSpec.count",)),
        (lambda: NegativesSpec(uniform_share=1.5), ("NegativesSpec.uniform_share",)),
    ],
)
def test_what_cannot_be_drawn_is_rejected(make: Callable[[], object], place: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, check=at(*place)):
        make()
