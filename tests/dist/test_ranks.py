# SPDX-License-Identifier: Apache-2.0
"""Joining, collectives and what they say when they fail."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from terarec.dist import Ranks, control, join, joining
from terarec.dist.control import Links
from terarec.dist.ranks import DEFAULT_TIMEOUT
from terarec.errors import CollectiveError, ConfigError
from tests.dist.launch import Raised, raised, run_ranks
from tests.errors import at

_OTHERS = ("sum", "begun", "gather", "first", "pair")


def caught(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return raised(error)


def collectives(ranks: Ranks) -> dict[str, Any]:
    rank, size = ranks.rank, ranks.size
    found: dict[str, Any] = {
        "sum": ranks.all_reduce_("sum", torch.tensor([1.0, rank])).tolist(),
        "max": ranks.all_reduce_("max", torch.tensor([rank]), "max").tolist(),
        "gathered": ranks.gather("gather", {"rank": rank, "text": "x" * rank}),
        "agreed": [ranks.agree("agree", flag) for flag in (True, rank != 1)],
        "nodes": ranks.nodes,
    }
    # Rank r sends r + 1 numbers to rank 0, and none to the others but itself.
    sent = [0] * size
    sent[0] = rank + 1
    received = [other + 1 for other in range(size)] if rank == 0 else [0] * size
    values = torch.full((sum(sent),), float(rank))
    found["came"] = ranks.all_to_all("all to all", values, sent, received).tolist()
    pair = ranks.subset([0, 2])
    found["pair"] = None if pair is None else pair.all_reduce_("sum", torch.tensor([rank])).tolist()
    ranks.check_same("settings", {"lr": 0.1})
    found["different"] = caught(lambda: ranks.check_same("settings", {"a": {"lr": 0.1 * rank}, "b": 1}))
    ranks.step = 7
    if rank == 2:
        return found  # and leaves
    found["left"] = caught(lambda: [ranks.all_reduce_("sum of nothing", torch.zeros(1)) for _ in range(2)])
    return found


def stopped(rank: int, what: str) -> Raised | None:
    """Begin a collective that the last rank, which has stopped, does not join; return the error."""
    ranks = join(timeout=1.5)
    last = ranks.size - 1
    numbers = ranks.gather("processes", os.getpid())
    pair = ranks.subset([0, last])
    if rank == last:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    assert pair is not None
    values, counts = torch.zeros(4, dtype=torch.int64), [2] * ranks.size
    calls: dict[str, Callable[[], Any]] = {
        "sum": lambda: ranks.all_reduce_("sum", values),
        "exchange": lambda: ranks.all_to_all("exchange", values, counts, counts),
        "begun": lambda: ranks.begin_all_to_all("begun", values, counts, counts).wait(),
        "gather": lambda: ranks.gather("gather", 1),
        "first": lambda: ranks.on_first("first", lambda: None),
        "pair": lambda: pair.barrier("pair"),
    }
    try:
        found: Raised = caught(calls[what])
        return found
    finally:
        os.kill(numbers[last], signal.SIGCONT)


@pytest.mark.parametrize("what", ["exchange", *(pytest.param(name, marks=pytest.mark.slow) for name in _OTHERS)])
def test_a_stopped_rank_is_noticed_in_time_and_named(what: str) -> None:
    """Finding L9."""
    first, _ = run_ranks(2, stopped, what, joins=False)
    assert first.kind == "CollectiveError", first
    assert (first.fields["collective"], first.fields["pairs"]) == (what, ((0, 1),))


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    results = run_ranks(3, collectives)
    assert not any(isinstance(result, Raised) for result in results), results
    return results


def test_collectives_compute_the_operation_of_their_name(found: list[dict[str, Any]]) -> None:
    for result in found:
        assert result["sum"] == [3.0, 3.0]
        assert result["max"] == [2]
        assert result["gathered"] == [{"rank": rank, "text": "x" * rank} for rank in range(3)]
        assert result["agreed"] == [True, False]
        assert result["nodes"] == (0, 0, 0)
    assert [result["came"] for result in found] == [[0.0, 1.0, 1.0, 2.0, 2.0, 2.0], [], []]
    assert [result["pair"] for result in found] == [[2], None, [2]]


def test_different_settings_are_shown_with_rank_and_path(found: list[dict[str, Any]]) -> None:
    for result in found:
        assert result["different"].kind == "CollectiveError"
        assert result["different"].fields["collective"] == "check of settings"
        assert result["different"].fields["differences"] == ((1, "a.lr"), (2, "a.lr"))


def test_a_collective_that_a_rank_has_left_names_itself_and_its_step(found: list[dict[str, Any]]) -> None:
    for result in found[:2]:
        assert result["left"].kind == "CollectiveError"
        assert result["left"].fields["collective"] == "sum of nothing"
        assert result["left"].fields["step"] == 7
        assert result["left"].fields["where"] == "sum of nothing in step 7"


def fail_again(ranks: Ranks, ends: str) -> Raised:
    """Fail alike on all ranks, then apart on some; return the error of the others."""
    with suppress(ValueError), ranks.telling():
        raise ValueError("of all")
    with ranks.telling():
        if ranks.rank == 1 and ends == "dies":
            os._exit(3)
        if ranks.rank and ends == "raise":
            raise KeyError(f"\x1b[1m{'x' * 20_000}")
        return caught(lambda: ranks.barrier("end"))


def test_ranks_that_fail_are_named_with_their_errors_on_the_others() -> None:
    first, *others = run_ranks(3, fail_again, "raise")
    assert [other.kind for other in others] == ["KeyError"] * 2
    assert (first.kind, first.fields["collective"], first.fields["pairs"]) == ("CollectiveError", "end", ())
    assert first.fields["rank"] in (1, 2)
    assert f"rank {first.fields['rank']} (" in first.message
    assert ") has failed: KeyError: " in first.message
    assert first.message.isprintable()


def test_what_ended_an_earlier_attempt_is_not_told_of_a_later_one() -> None:
    first, _, last = run_ranks(3, fail_again, "dies")
    for found in (first, last):
        assert found.kind == "CollectiveError"
        assert "has failed" not in found.message


def linger(ranks: Ranks, how: str) -> Any:
    """Do something on the last rank for which the others need not wait, while it keeps its process until they end."""
    control.ASK_AFTER, control.SILENCE = 0.2, 2.0  # type: ignore[misc]
    patient = ranks.twin()
    numbers = ranks.gather("processes", os.getpid())
    last, begin = ranks.size - 1, time.monotonic()
    error: Any = None
    try:
        with ranks.telling():
            ranks.barrier("begin")
            # A collective that it joins ends, whatever it does then.
            pending = ranks.begin_all_reduce_("joined", torch.ones(1))
            if ranks.rank == last and how == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif ranks.rank == last and how != "goes another way":
                raise {"raises": KeyError, "is interrupted": KeyboardInterrupt}[how]("x")
            time.sleep(0.5)
            assert pending.wait().tolist() == [ranks.size]
            if ranks.rank == last and how == "goes another way":
                ranks.all_to_all("other", torch.empty(0), [0] * ranks.size, [0] * ranks.size)
            else:
                ranks.barrier("end")
    except BaseException as raising:
        error = raised(raising)
    waited = time.monotonic() - begin
    if how == "stops" and ranks.is_first:
        os.kill(numbers[last], signal.SIGCONT)
    # Until the others have raised, too.
    with suppress(CollectiveError, RuntimeError):
        patient.barrier("all have ended")
    return error, waited


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("raises", "has failed: KeyError: 'x'"),
        ("is interrupted", "has failed: KeyboardInterrupt: x"),
        ("stops", "not answer"),
        ("goes another way", "began 'other' where rank"),
    ],
)
def test_a_rank_whose_process_stays_is_named_at_once(how: str, problem: str, size: int) -> None:
    """Others waited for it until the timeout."""
    *others, (own, _) = run_ranks(size, linger, how)
    for found, seconds in others:
        assert (found.kind, found.fields["rank"]) == ("CollectiveError", size - 1), found
        assert problem in found.message
        assert seconds < DEFAULT_TIMEOUT / 3
    if how == "stops" and own is None:  # the others had begun the collective that it came to afterwards
        return
    assert own.kind == {"raises": "KeyError", "is interrupted": "KeyboardInterrupt"}.get(how, "CollectiveError")


ENDS: dict[str, tuple[object, str]] = {
    "check of links": (Links, "unreachable"),
    "start of the process group": (torch.distributed, "init_process_group"),
}
"""Collective of the start -> what is called in it."""


def join_with(rank: int, problem: str) -> Any:
    if problem == "link" and rank == 2:
        joining._own_address = lambda store: "192.0.2.1"  # an address of documentation, which nobody has
    if problem == "absent" and rank == 1:
        return None
    if problem == "version" and rank == 1:
        joining.code_digest = lambda: "of other sources"  # type: ignore[assignment]
    if problem in ENDS and rank == 1:
        owner, name = ENDS[problem]
        setattr(owner, name, lambda *_, **__: os._exit(3))
    settings = {"batch_size": 64 + (rank == 1)} if problem == "settings" else {}
    link_timeout, timeout = (1.0, 2.0) if problem in ENDS else (3.0, 20.0)
    return caught(lambda: join(settings, link_timeout=link_timeout, timeout=timeout))


@pytest.mark.slow
@pytest.mark.parametrize("problem", ENDS)
def test_a_rank_that_ends_during_the_start_is_named(problem: str) -> None:
    results = run_ranks(3, join_with, problem, joins=False)
    assert results[1] == "ended with status 3"
    for rank in (0, 2):
        assert results[rank].kind == "CollectiveError", results
        assert results[rank].fields["collective"] == problem
        named = results[rank].fields["rank"], results[rank].fields["pairs"]
        assert named == ((1, ()) if problem == "check of links" else (rank, ((rank, 1),)))


def test_a_pair_of_ranks_that_cannot_talk_is_named_on_every_rank() -> None:
    results = run_ranks(4, join_with, "link", joins=False)
    for result in results:
        assert result.kind == "CollectiveError"
        assert result.fields["pairs"] == ((3, 2),)  # a rank calls those of lower numbers


def test_ranks_do_not_wait_for_one_that_does_not_come() -> None:
    results = run_ranks(3, join_with, "absent", joins=False)
    for result in (results[0], results[2]):
        assert result.kind == "CollectiveError", result
        # The store's host gives up waiting for all of them; the others then request the address of each.
        assert (result.fields["collective"], result.fields.get("rank")) in (("start", None), ("check of links", 1))


@pytest.mark.parametrize(("problem", "different"), [("settings", "batch_size"), ("version", "code")])
def test_ranks_with_other_settings_or_sources_do_not_begin(problem: str, different: str) -> None:
    for result in run_ranks(2, join_with, problem, joins=False):
        assert result.fields["collective"] == f"check of {problem}"
        assert result.fields["differences"] == ((1, different),)


def test_a_process_alone_is_a_group_of_one() -> None:
    ranks = join({"any": "settings"})
    assert (ranks.rank, ranks.size, ranks.is_first) == (0, 1, True)
    values = torch.tensor([1.0])
    assert ranks.all_reduce_("sum", values) is values
    assert ranks.gather("gather", 3) == [3]
    assert ranks.agree("agree", False) is False
    assert ranks.subset([0]) is ranks
    ranks.barrier("barrier")
    with pytest.raises(ConfigError, check=at("members")):
        ranks.subset([1])
    with pytest.raises(ConfigError, check=at("link_timeout")):
        join(link_timeout=0.0)
    assert issubclass(CollectiveError, RuntimeError)
