"""The learner's feed without a broker: portions of a fetch, deadlines."""

import threading

import pytest

from common.errors import DeadlineError, Stopped
from learner import feed
from learner.feed import Feed


def sizes(token_counts):
    return [len(p) for p in feed._portions([{"num_tokens": n} for n in token_counts])]


def test_a_fetch_is_bounded_in_samples_and_tokens(monkeypatch):
    monkeypatch.setattr(feed, "SAMPLES_PER_FETCH", 3)
    monkeypatch.setattr(feed, "TOKENS_PER_FETCH", 100)
    assert sizes([]) == []
    assert sizes([1] * 7) == [3, 3, 1]
    assert sizes([60, 40, 1, 100, 300, 1]) == [2, 1, 1, 1, 1]


def test_a_broker_that_is_nowhere_is_named():
    silent = Feed(lambda: None, run_id="r", name="learner", stop=threading.Event(), timeout_s=0.3)
    with pytest.raises(
        DeadlineError, match=r"waited 0\.\d s for the broker's answer to attach \(not in the registry\)"
    ):
        silent.attach()
    silent.close()


def test_a_stop_ends_a_claim():
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        Feed(lambda: None, run_id="r", name="learner", stop=stop).claim(step=1, version=0, num_groups=1)
