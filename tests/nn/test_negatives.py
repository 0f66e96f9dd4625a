# SPDX-License-Identifier: Apache-2.0
"""Negatives are no items of their user, and uniform among all others."""

import torch

from terarec.nn.negatives import draw_keys, draw_negatives


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_no_negative_is_an_item_of_its_user() -> None:
    users = torch.arange(50).repeat_interleave(10)
    items = torch.randint(1, 30, (500,), generator=generator(1))
    owners = torch.arange(50).repeat_interleave(200)
    drawn, is_free = draw_negatives(owners, (users, items), 1, 30, generator())
    assert is_free.all()
    assert drawn.min() >= 1
    assert drawn.max() < 30
    own = {(user, item) for user, item in zip(users.tolist(), items.tolist(), strict=True)}
    assert not own & set(zip(owners.tolist(), drawn.tolist(), strict=True))


def test_negatives_are_uniform() -> None:
    owners = torch.zeros(40_000, dtype=torch.int64)
    taken = torch.tensor([2, 3])
    drawn, _ = draw_negatives(owners, (torch.zeros_like(taken), taken), 1, 6, generator())
    shares = drawn.bincount(minlength=6) / len(drawn)
    torch.testing.assert_close(shares, torch.tensor([0, 1, 0, 0, 1, 1]) / 3, atol=0.02, rtol=0)


def test_a_user_of_all_items_but_one_gets_that_one() -> None:
    items = torch.tensor([key for key in range(1, 1000) if key != 777])
    drawn, is_free = draw_negatives(torch.zeros(3, dtype=torch.int64), (torch.zeros_like(items), items), 1, 1000)
    assert drawn.tolist() == [777] * 3
    assert is_free.all()


def test_a_user_of_all_items_has_no_negative() -> None:
    items = torch.tensor([1, 2, 3, 1])
    users = torch.tensor([0, 0, 0, 1])
    drawn, is_free = draw_negatives(torch.tensor([0, 1]), (users, items), 1, 4, generator())
    assert is_free.tolist() == [False, True]
    assert drawn[1] in (2, 3)


def test_users_without_items_and_no_users() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    drawn, is_free = draw_negatives(torch.tensor([4, 4]), (nothing, nothing), 1, 3)
    assert is_free.all()
    assert set(drawn.tolist()) <= {1, 2}
    assert draw_negatives(nothing, (nothing, nothing), 1, 3)[0].shape == (0,)


def test_a_generator_alone_decides_the_draws() -> None:
    torch.manual_seed(0)
    first = draw_keys(torch.Size([5]), 0, 100, torch.device("cpu"), generator())
    torch.manual_seed(1)
    assert torch.equal(first, draw_keys(torch.Size([5]), 0, 100, torch.device("cpu"), generator()))
