"""What a generator holds, and when it sampled: both without sockets and with a clock of the test's."""

import pytest

from generators.activity import Activity
from generators.leases import Holdings, Lease


def lease(group=1, attempt=0):
    return Lease(group, attempt, "train", {}, [1, 2])


def test_a_lease_ends_with_its_last_sample_and_a_sample_with_its_acknowledgement():
    holdings = Holdings()
    held, new, again = holdings.open(lease(), [0, 1])
    assert (new, again) == ([0, 1], []) and held.prompt_array.tolist() == [1, 2]
    assert holdings.finish(held, 0, [b"0"], now=5.0)
    assert list(holdings.leases) == [(1, 0)]
    assert holdings.finish(held, 1, [b"1"], now=6.0)
    assert holdings.leases == {} and holdings.num_unacked == 2
    holdings.acknowledge([[1, 0, 0], [9, 9, 9]])
    assert holdings.overdue(100.0, 1.0) == [[b"1"]]
    holdings.acknowledge([[1, 0, 1]])
    assert holdings.num_unacked == 0


def test_samples_are_overdue_once_per_period():
    holdings = Holdings()
    held, *_ = holdings.open(lease(), [0])
    holdings.finish(held, 0, [b"0"], now=0.0)
    assert holdings.overdue(4.9, 5.0) == []
    assert holdings.overdue(5.0, 5.0) == [[b"0"]]
    assert holdings.overdue(9.9, 5.0) == []
    assert holdings.overdue(10.0, 5.0) == [[b"0"]]


def test_a_repeated_lease_adds_only_what_is_missing():
    holdings = Holdings()
    held, *_ = holdings.open(lease(), [0, 1])
    holdings.finish(held, 0, [b"0"], now=0.0)
    work, new, again = holdings.open(lease(), [0, 1, 2])
    assert work is held and new == [2] and again == [[b"0"]]


def test_a_dropped_lease_takes_its_samples_along_and_ignores_late_ones():
    holdings = Holdings()
    held, *_ = holdings.open(lease(), [0, 1])
    other, *_ = holdings.open(lease(group=2), [0])
    holdings.finish(held, 0, [b"0"], now=0.0)
    assert holdings.drop((1, 0)) is held
    assert holdings.num_unacked == 0
    assert not holdings.finish(held, 1, [b"1"], now=0.0)
    assert holdings.finish(other, 0, [b"2"], now=0.0)
    assert holdings.drop((1, 0)) is None


def test_progress_counts_tokens_of_all_samples_of_a_lease():
    holdings = Holdings()
    held, *_ = holdings.open(lease(), [0, 1])
    held.tokens.update({0: 7, 1: 3})
    assert holdings.progress() == [[1, 0, 10]]
    holdings.finish(held, 0, [b"0"], now=0.0)
    assert holdings.progress() == [[1, 0, 10]]  # never falls


def test_spans_are_the_union_of_requests_cut_at_each_report():
    activity = Activity(10.0)
    activity.begin(11.0)
    activity.begin(12.0)
    activity.end(13.0)
    spans, stats = activity.report(14.0)
    assert spans == [[11.0, 14.0]]
    assert stats == {"tokens": 0, "samples": 0, "running": 1, "idle_ratio": 0.25, "until": 14.0}
    activity.end(15.0)
    activity.begin(17.0)
    activity.end(17.5)
    spans, stats = activity.report(18.0)
    assert spans == [[14.0, 15.0], [17.0, 17.5]]
    assert (stats["running"], stats["idle_ratio"]) == (0, 0.625)
    assert activity.report(19.0)[0] == []


def test_a_clock_that_is_set_back_makes_no_negative_span():
    activity = Activity(10.0)
    activity.begin(11.0)
    spans, stats = activity.report(9.0)
    assert all(a <= b for a, b in spans) and 0 <= stats["idle_ratio"] <= 1
    activity.end(9.5)
    assert all(a <= b for a, b in activity.report(9.6)[0])


def test_the_rate_of_finished_samples_follows_slowly_what_single_reports_say():
    activity = Activity(10.0)
    activity.samples = 200
    activity.report(12.0)
    assert activity.samples_per_s == pytest.approx(100.0)
    activity.report(12.2)  # a report at once after another says little
    assert activity.samples_per_s == pytest.approx(90.0)
    activity.report(14.2)
    assert activity.samples_per_s == pytest.approx(0.0)
