# SPDX-License-Identifier: Apache-2.0
"""Rows of tables in tiers that ranks read ahead for each other."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from terarec.dist import Ranks, RowWise, same_for_all, shard
from terarec.dist.shard import ShardedCollection
from tests.dist.launch import Raised, run_ranks
from tests.dist.matrix import BATCH, Model, samples

NAMES = ("sum.tiers", "mean.tiers")
STEPS = 20


def requested(ranks: Ranks, files: Path) -> tuple[dict[str, list[int]], list[dict[str, list[int]]], int]:
    """Return what the thread of the steps requests, what another thread does next to steps, and the bytes sent."""
    model = Model(trains_layer=False, files=files, names=NAMES)
    shard(model, same_for_all(model.tables.specs, RowWise(), ranks.size), ranks)
    tables = model.tables
    assert isinstance(tables, ShardedCollection)
    share = ranks.share(BATCH)
    jagged, labels = samples(0, NAMES).part(share.start, share.stop)
    renamed = replace(jagged, names=("renamed", "columns"))
    tables.prefetch_rows(tables.requested_rows(renamed))  # ranks request nothing
    alone = tables.requested_rows(jagged)
    tables.columns = dict(zip(NAMES, renamed.names, strict=True))
    of_columns = tables.requested_rows(renamed)
    assert all(torch.equal(rows, of_columns[name]) for name, rows in alone.items())
    tables.columns = {}
    sent = ranks.sent_bytes["rows to read ahead"]
    tables.read_ahead_apart()
    with ThreadPoolExecutor(1) as thread:
        ahead = [thread.submit(tables.requested_rows, jagged) for _ in range(STEPS)]
        for _ in range(STEPS):
            model(jagged, labels)
        found = [each.result() for each in ahead]
    listed = [{name: rows.tolist() for name, rows in each.items()} for each in (alone, *found)]
    return listed[0], listed[1:], ranks.sent_bytes["rows to read ahead"] - sent


def steps_ahead(ranks: Ranks) -> list[float]:
    """Return the losses of steps of which one rank passes copies of its batches."""
    model = Model(trains_layer=False, names=("sum.static",))
    shard(model, same_for_all(model.tables.specs, RowWise(), ranks.size), ranks)
    tables, share, losses = model.tables, ranks.share(BATCH), []
    assert isinstance(tables, ShardedCollection)
    batches = [samples(step, model.names).part(share.start, share.stop) for step in range(4)]
    for (jagged, labels), (following, _) in pairwise(batches):
        tables.start(jagged)
        tables.announce(following)
        loss = model(jagged if ranks.is_first else replace(jagged), labels)
        loss.backward()
        losses.append(float(ranks.all_reduce_("loss", loss.detach())))
    return losses


def test_lookups_begin_ahead_on_all_ranks_or_on_none() -> None:
    """Each rank decided by its own call; then they took part in different collectives."""
    first, second = run_ranks(2, steps_ahead)
    assert isinstance(first, list), first
    assert first == second == pytest.approx(steps_ahead(Ranks()))


def steps_that_drop(ranks: Ranks, droppers: tuple[int, ...], how: str) -> list[float]:
    """Return the losses of steps in the third of which some ranks do not use what they have begun to look up."""
    model = Model(trains_layer=False, names=("sum.static",))
    shard(model, same_for_all(model.tables.specs, RowWise(), ranks.size), ranks)
    tables, share, losses = model.tables, ranks.share(BATCH), []
    assert isinstance(tables, ShardedCollection)
    batches = [samples(step, model.names).part(share.start, share.stop) for step in range(6)]
    for number, ((jagged, labels), (following, _)) in enumerate(pairwise(batches)):
        drops = how if number == 2 and ranks.rank in droppers else ""
        # Of batches that were announced, rank by rank.
        own = replace(jagged) if drops == "announced" else jagged
        tables.start(own)
        tables.announce(following)
        if drops == "no call":
            continue
        loss = model(replace(jagged) if drops == "other keys" else own, labels)
        loss.backward()
        losses.append(float(ranks.all_reduce_("loss", loss.detach())))
    return losses


DROPS = ("no call", "other keys", "announced")


@pytest.mark.parametrize(("size", "droppers"), [(2, (1,)), pytest.param(4, (1, 2), marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", DROPS)
def test_ranks_that_drop_a_lookup_which_others_use_are_named_by_all(
    how: str, size: int, droppers: tuple[int, ...]
) -> None:
    """They took part in other collectives than the rest, which then waited or got numbers of others."""
    for result in run_ranks(size, steps_that_drop, droppers, how):
        assert isinstance(result, Raised), result
        assert (result.kind, result.fields["rank"]) in [("CollectiveError", rank) for rank in droppers], result
        assert re.search(rf"rank {result.fields['rank']} \(.*\) dropped.* what ranks? \d", result.message), result


@pytest.mark.parametrize("how", DROPS)
def test_ranks_that_drop_a_lookup_together_go_on(how: str) -> None:
    first, second = run_ranks(2, steps_that_drop, (0, 1), how)
    assert isinstance(first, list), first
    assert first == second
    if how != "no call":
        assert first == pytest.approx(steps_that_drop(Ranks(), (), how))


def test_a_thread_of_its_own_requests_rows_next_to_steps(tmp_path: Path) -> None:
    results = run_ranks(2, requested, tmp_path)
    keys = dict(zip(NAMES, samples(0, NAMES).keys, strict=True))
    for rank, result in enumerate(results):
        assert isinstance(result, tuple), result
        alone, ahead, sent = result
        for name in NAMES:  # row key // 2 of the rank key mod 2
            mine = keys[name][keys[name] % 2 == rank]
            assert alone[name] == torch.unique(mine // 2).tolist()
        assert ahead == [alone] * STEPS
        assert sent > 0
