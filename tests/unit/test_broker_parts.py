"""The broker's small parts: prompt order, overlap, peers, parsing."""

import pytest

from broker import parse
from broker.overlap import Overlap, union
from broker.peers import Peers
from broker.prompts import Prompts
from broker.records import Drops
from common.errors import WireError


# ---------------------------------------------------------------- prompts
def test_each_epoch_has_each_row_once_in_another_order():
    prompts = Prompts(list("abcdefg"), seed=3, epochs=2)
    first, second = [prompts.row(i) for i in range(7)], [prompts.row(i) for i in range(7, 14)]
    assert sorted(first) == sorted(second) == list("abcdefg") and first != second
    assert prompts.count == 14 and Prompts(list("abc")).count is None


def test_the_order_depends_on_the_seed_and_a_place_alone():
    orders = {tuple(Prompts(range(50), seed=s).row(i) for i in range(50)) for s in range(5)}
    assert len(orders) == 5
    assert Prompts(range(50), seed=1).row(777) == Prompts(range(50), seed=1).row(777)
    assert [Prompts("abc", shuffle=False).row(i) for i in range(5)] == list("abcab")


# ---------------------------------------------------------------- overlap
def test_union_of_spans():
    assert union([(3, 4), (0, 1), (0.5, 2), (2, 2.5), (9, 9)]) == [(0, 2.5), (3, 4)]


def test_overlap_is_judged_once_everybody_has_reported():
    overlap = Overlap()
    overlap.sampled("a", [(0.0, 4.0)], until=4.0)
    overlap.sampled("b", [], until=1.0)
    overlap.stepped((2.0, 6.0))
    assert overlap.ratio is None
    overlap.sampled("a", [(5.0, 7.0)], until=7.0)
    assert overlap.ratio is None  # b has said nothing since 1.0
    overlap.sampled("b", [(3.5, 4.5)], until=6.5)
    assert overlap.ratio == pytest.approx(3.5 / 4)  # 2 to 4.5 and 5 to 6


def test_a_generator_that_is_gone_holds_nothing_up():
    overlap = Overlap()
    overlap.sampled("a", [(0.0, 9.0)], until=9.0)
    overlap.sampled("b", [], until=1.0)
    overlap.stepped((2.0, 4.0))
    overlap.forget("b")
    assert overlap.ratio == 1.0


def test_ratio_is_about_the_latest_steps_and_reports_stay_bounded():
    overlap = Overlap(window=2)
    for i in range(5_000):
        overlap.sampled("a", [(i, i + 0.5)], until=i + 1.0)
        overlap.stepped((i, i + 1.0))
    assert overlap.ratio == pytest.approx(0.5)
    overlap.sampled("a", [(5_000.0, 5_002.0)], until=5_002.0)
    overlap.stepped((5_000.0, 5_001.0))
    assert overlap.ratio == pytest.approx(0.75)
    for i in range(5_002, 40_000):
        overlap.sampled("a", [(i, i + 0.5)], until=i + 1.0)
    assert len(overlap._merged) + len(overlap._new) < 8_000


# ---------------------------------------------------------------- peers
def test_a_later_process_of_a_name_replaces_the_earlier():
    peers = Peers()
    old, replaced = peers.greet(b"1", "g", "x", 0.0)
    assert replaced is None and peers.greet(b"2", "g", "x", 0.0) == (old, None)  # dialled again
    assert peers.get(b"1") is None and peers.get(b"2") is old
    new, replaced = peers.greet(b"3", "g", "y", 0.0)
    assert replaced is old and peers.named("g") is new and peers.get(b"2") is None
    assert peers.is_superseded("g", "x") and not peers.is_superseded("g", "y")
    peers.remove(new)
    assert len(peers) == 0 and peers.get(b"3") is None


def test_each_peer_comes_first_in_turn_and_rates_are_measured():
    peers = Peers()
    for name in "abc":
        peers.greet(name.encode(), name, "1", 0.0)
    assert {peers.in_turn()[0].name for _ in range(3)} == set("abc")
    for now in range(30):
        peers.named("a").report({"tokens": 100.0 * now, "idle_ratio": 0.5, "running": 3}, float(now))
    figures = peers.figures()
    assert figures["generator/tokens_per_s"] == pytest.approx(100) and figures["generator/idle_ratio"] == 0.5
    assert figures["generator/count"] == 3 and figures["generator/version_min"] == -1


# ---------------------------------------------------------------- parsing, drops
def test_parsing_refuses_what_the_schema_leaves_open():
    assert parse.int_lists([[1, 2, 3]], 3, "x") == [(1, 2, 3)]
    for bad in ([[1, 2]], [[1, 2, "3"]], [[1, 2, True]], [None], ["abc"]):
        with pytest.raises(WireError, match="wrong_type"):
            parse.int_lists(bad, 3, "x")
    assert parse.span([1, 2.5], "x") == (1.0, 2.5)
    for bad in ([2, 1], [1], [float("nan"), 1], [1, float("inf")], [True, 2], "12", [1, 10**30]):
        with pytest.raises(WireError, match="wrong_type"):
            parse.span(bad, "x")
    assert parse.numbers({"a": 1, "b": "x", "c": float("nan"), "d": True, "e": 2.5}) == {"a": 1.0, "e": 2.5}
    assert parse.word(" reward timeout! ") == "reward_timeout" and parse.word("é/") == "unnamed"
    assert len(parse.word("x" * 1000)) == 64


def test_drops_are_counted_by_length():
    drops = Drops()
    for tokens in (0, 8, 9, 16, 17):
        drops.add(tokens, size=8)
    assert drops == Drops(count=5, tokens=50, by_length={0: 1, 1: 1, 2: 2, 4: 1})
