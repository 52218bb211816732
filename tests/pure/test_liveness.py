"""What keeps ranks waiting is found from what all of them say, whoever notices it first."""

import threading
from dataclasses import replace

import pytest

from charm_megatron.liveness.beats import heartbeats
from charm_megatron.liveness.process import standing_of_process, watch, watch_addresses
from charm_megatron.liveness.root import find_root, named
from charm_megatron.liveness.standing import Exchange, Standing, Waiting

pytestmark = pytest.mark.pure

RANKS = (0, 1, 2, 3)


def standing(waits_for=None, *, is_recv=True, number=0, sends=(), recvs=(), for_s=3.0):
    """A rank that has posted sends and receives, by peer, and waits for one of them."""
    counts = [tuple(list(peers).count(rank) for rank in RANKS) for peers in (sends, recvs)]
    waiting = None if waits_for is None else Waiting(waits_for, is_recv, number, "kv1")
    doing = "in ring forward, action 2 (wait 0.1)"
    return Standing(doing, for_s, (Exchange(RANKS, *counts, waiting),))


def test_a_silent_rank_is_to_blame_whoever_else_waits():
    standings = {0: standing(1, recvs=[1]), 1: standing(2, recvs=[2]), 2: standing(0)}
    root = find_root(standings, {2: 4.0})
    assert root.ranks == (2,)
    assert root.sentence.startswith("rank 2 does not answer, for 4.0 s; its last word: in ring forward")


def test_several_silent_ranks_are_named_together():
    root = find_root({}, {3: 4.0, 1: 5.0})
    assert root.sentence == "ranks 1 and 3 do not answer, for 5.0 s"


def test_a_transfer_that_both_ends_have_posted_blames_their_link():
    """Rank 0 waits for its second receive, of which rank 1 has sent one."""
    standings = {
        0: standing(1, recvs=[1, 1], number=1),
        1: standing(2, recvs=[2], sends=[0]),
        2: standing(1, is_recv=False, sends=[1]),
    }
    root = find_root(standings, {})
    assert root.ranks == (1, 2)
    assert root.sentence == (
        "the link between ranks 1 and 2 does not carry: kv1 from rank 2, which both have posted, is not through "
        "after 3.0 s"
    )


def test_links_that_share_a_rank_blame_its_links():
    standings = {
        0: standing(1, recvs=[1]),
        1: standing(2, recvs=[2], sends=[0]),
        2: standing(1, is_recv=False, sends=[1]),
    }
    root = find_root(standings, {})
    assert root.ranks == (1, 0, 2)
    assert root.sentence.startswith("the links of rank 1, to ranks 0 and 2, do not carry: kv1 from rank ")


def test_a_rank_that_waits_for_nobody_is_behind():
    standings = {
        0: standing(1, recvs=[1]),
        1: standing(3, recvs=[3]),
        2: standing(3, recvs=[3]),
        3: standing(),
    }
    root = find_root(standings, {})
    assert root.ranks == (3,)
    assert root.sentence.startswith("rank 3 keeps the others waiting; it answers: in ring forward")


def test_a_rank_that_has_said_nothing_is_behind():
    assert find_root({0: standing(2, recvs=[2])}, {}).sentence == (
        "rank 2 keeps the others waiting; it has said nothing"
    )


def test_ranks_in_different_calls_wait_in_a_circle():
    standings = {0: standing(1, recvs=[1]), 1: standing(0, recvs=[0]), 2: standing()}
    root = find_root(standings, {})
    assert set(root.ranks) == {0, 1}
    assert "wait for each other in different calls: rank " in root.sentence


def test_nothing_is_said_where_nobody_waits():
    assert find_root({0: standing(), 1: Standing()}, {}) is None
    assert find_root({}, {}) is None


def test_a_dead_connection_is_named_by_its_two_ranks_where_the_other_end_is_known():
    known = {2: Standing(addresses=frozenset({"10.0.0.2:4000"}))}
    assert find_root(known, {}, [(1, ("10.0.0.2:9999", "10.0.0.2:4000"))]).ranks == (1, 2)
    root = find_root(known, {}, [(1, ("10.0.0.3:1", "10.0.0.3:2"))])
    assert root.sentence.startswith("the link of rank 1 to 10.0.0.3:1 does not carry")


def test_a_rank_behind_that_lost_a_connection_to_the_kernel_was_itself_kept_waiting_by_that_link():
    """As in a collective of Megatron's own, of which attention knows nothing."""
    standings = {
        0: Standing(),
        1: replace(standing(3, recvs=[3]), addresses=frozenset({"10.0.0.1:4000"})),
        2: standing(1, recvs=[1]),
        3: standing(),
    }
    behind = find_root(standings, {})
    assert (behind.ranks, behind.is_final) == ((3,), False)
    link = find_root(standings, {}, [(3, ("10.0.0.1:4000",))])
    assert (link.ranks, link.is_final) == ((1, 3), True)


def test_a_rank_that_does_something_else_is_to_blame_though_connections_to_it_are_given_up():
    standings = {0: standing(1, recvs=[1]), 1: replace(standing(), addresses=frozenset({"10.0.0.1:4000"}))}
    assert find_root(standings, {}, [(0, ("10.0.0.1:4000",))]).ranks == (1,)
    assert "keeps the others waiting" in find_root(standings, {}, [(0, ("10.0.0.1:4000",))]).sentence


def test_a_standing_survives_the_way_to_other_ranks():
    whole = Standing("in x", 1.5, standing(1, recvs=[1]).exchanges, frozenset({"a:1"}))
    assert Standing.from_json(whole.to_json()) == whole


def test_ranks_are_named_in_words():
    assert [named((2,)), named((1, 4)), named((0, 1, 2))] == ["rank 2", "ranks 1 and 4", "ranks 0, 1 and 2"]
    assert named(tuple(range(100))) == "ranks 0, 1, 2, 3, 4, 5, 6 and 93 others"


class Waits:
    def __init__(self, standing):
        self.standing = standing


def test_a_process_speaks_for_all_that_wait_in_it():
    """Transfers of the same group count together; those of what has gone no longer do."""
    earlier = Waits(standing(None, recvs=[1, 1], for_s=9.0))
    now = Waits(standing(1, recvs=[1], number=0, for_s=0.5))
    gone = Waits(standing(3, recvs=[3] * 7, for_s=0.1))
    for one in (earlier, now, gone):
        watch(one)
    del gone, one
    watch_addresses(["10.0.0.1:7"])
    whole = standing_of_process()
    (exchange,) = whole.exchanges
    assert exchange.recvs == (0, 3, 0, 0)
    assert exchange.waiting == Waiting(1, True, 2, "kv1")
    assert whole.for_s == 0.5
    assert "10.0.0.1:7" in whole.addresses


def test_heartbeats_come_until_the_block_ends_and_stop_where_nobody_listens():
    heard = threading.Semaphore(0)

    def beat(standing):
        heard.release()

    with heartbeats(beat, period_s=0.01):
        assert all(heard.acquire(timeout=10) for _ in range(3))
    deaf = threading.Event()

    def fail(standing):
        deaf.set()
        raise BrokenPipeError

    with heartbeats(fail, period_s=0.01):
        assert deaf.wait(10)
