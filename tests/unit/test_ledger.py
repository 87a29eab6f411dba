"""The state machine of the ledger: each promise by a short example. Random schedules: test_ledger_machine.py."""

import pytest

from broker.ledger import Ledger
from broker.records import Claim, Rules
from common.errors import FencedError, LedgerError, NoSignalError

B, N = 2, 2


def make(limit=1, **rules):
    defaults = dict(group_size=N, batch_size=B, max_attempts=2, lease_timeout_s=10.0, lease_limit_s=100.0)
    return Ledger(Rules(**{**defaults, **rules}), limit=limit)


def header(attempt, index, *, version=0, **changes):
    return {
        "group": attempt.group, "attempt": attempt.attempt, "index": index, "crc": 1, "num_tokens": 6,
        "num_live_tokens": 6, "reward": 1.0, "truncated": False, "oldest": version, "newest": version, "fault": None,
        **changes,
    }  # fmt: skip


def lease(ledger, now=0.0, held=None, generator="g"):
    held = ledger.counters.version if held is None else held
    return ledger.lease(generator, "1", held, now)


def finish(ledger, attempt, *, now=0.0, version=None, generator="g"):
    version = attempt.held if version is None else version
    for index in range(attempt.size):
        assert ledger.commit(generator, header(attempt, index, version=version), now) == "stored"


def train_step(ledger, epoch):
    """Lease, finish, claim and acknowledge one batch."""
    while ledger.counts["train"]["ready"] < B:
        finish(ledger, lease(ledger))
    c = ledger.counters
    claim = ledger.claim(epoch, c.step + 1, c.version, B)
    ledger.acknowledge(epoch, claim.step, applied=True)
    return claim


def states(ledger, lane="train"):
    counts = {state: n for state, n in ledger.counts[lane].items() if n}
    assert sum(counts.values()) == (ledger.issued if lane == "train" else sum(counts.values()))
    return counts


def test_a_group_goes_from_lease_to_step():
    ledger = make()
    epoch = ledger.attach("learner", "1")
    first, second = lease(ledger), lease(ledger)
    assert (first.group, second.group, first.prompt, second.prompt) == (0, 1, 0, 1)
    finish(ledger, second)
    assert states(ledger) == {"leased": 1, "ready": 1}
    assert ledger.claim(epoch, 1, 0, B) == "1 of 2 groups are ready for step 1"
    finish(ledger, first)
    claim = ledger.claim(epoch, 1, 0, B)
    assert claim == Claim(epoch=1, step=1, version=0, limit=1, short=False, keys=((0, 0), (1, 0)))
    assert states(ledger) == {"claimed": 2}
    ledger.acknowledge(epoch, 1, applied=True)
    assert states(ledger) == {"trained": 2} and ledger.counters.version == 1 and not ledger.live


def test_a_group_is_ready_with_its_last_sample_and_the_first_committed_wins():
    ledger = make()
    attempt = lease(ledger)
    assert ledger.commit("g", header(attempt, 1), 0.0) == "stored"
    assert ledger.commit("g", header(attempt, 1, reward=0.0), 0.0) == "duplicate"
    assert states(ledger) == {"leased": 1} and ledger.load_of("g") == 1
    assert ledger.commit("g", header(attempt, 0), 0.0) == "stored"
    assert ledger.commit("g", header(attempt, 0), 0.0) == "duplicate"
    assert states(ledger) == {"ready": 1} and attempt.samples[1]["reward"] == 1.0


def test_lease_gate_by_value():
    ledger = make(limit=1)
    epoch = ledger.attach("learner", "1")
    assert lease(ledger, held=-1) is None and ledger.refusal(-1) == "no weights held yet"
    assert lease(ledger, held=1) is None and "newer than the learner's 0" in ledger.refusal(1)
    leased = [lease(ledger) for _ in range(2 * B)]
    assert None not in leased and lease(ledger) is None  # N < (η + 1)·B
    assert ledger.refusal(0) == "staleness gate: 4 groups outstanding at version 0, 0 held"
    for attempt in leased[:B]:
        finish(ledger, attempt)
    assert isinstance(ledger.claim(epoch, 1, 0, B), Claim)
    assert lease(ledger) is None  # claimed groups count
    ledger.acknowledge(epoch, 1, applied=True)
    assert lease(ledger, held=0) is None  # one version behind: N < η·B, and N is B
    assert lease(ledger, held=1) is not None


def test_what_can_no_longer_be_trained_leaves_at_once_and_is_tried_again():
    ledger = make(limit=0)
    epoch = ledger.attach("learner", "1")
    slow = lease(ledger)
    finish(ledger, lease(ledger))
    ledger.progress("g", slow.key, 40, 1.0)
    claim = ledger.claim(epoch, 1, 0, 1)
    ledger.acknowledge(epoch, 1, applied=True)
    assert claim.keys == ((1, 0),)
    assert ledger.cancels == [("g", (0, 0), "stale")]  # its generator is told
    assert states(ledger) == {"trained": 1, "dropped": 1, "pending": 1} and ledger.outstanding == 0
    drops = ledger.drops["stale"]
    assert (drops.count, drops.tokens, drops.by_length) == (1, 40, {32: 1})  # 20 tokens a sample
    assert ledger.commit("g", header(slow, 0), 2.0) == "late"
    again = lease(ledger)
    assert again.key == (0, 1) and again.prompt == slow.prompt and again.held == 1


def test_a_group_whose_tokens_are_too_old_when_it_is_complete_is_dropped():
    ledger = make(limit=1)
    epoch = ledger.attach("learner", "1")
    for _ in range(3):
        train_step(ledger, epoch)
    attempt = lease(ledger)
    ledger.commit("g", header(attempt, 0, version=3), 0.0)
    ledger.commit("g", header(attempt, 1, version=1), 0.0)  # a token of version 1 at version 3, limit 1
    assert ledger.drops["stale"].count == 1 and (attempt.group, 1) in ledger.live


def test_claims_are_ordered_by_deadline_and_take_nothing_too_old():
    ledger = make(limit=2)
    epoch = ledger.attach("learner", "1")
    for _ in range(2):
        train_step(ledger, epoch)
    young, old = lease(ledger, held=2), lease(ledger, held=1)
    finish(ledger, young)
    finish(ledger, old)
    assert [k[0] for k in ledger.claim(epoch, 3, 2, B).keys] == [old.group, young.group]


def test_the_claim_gate_does_not_rely_on_the_dropping_of_doomed_groups():
    ledger = make(limit=1)
    epoch = ledger.attach("learner", "1")
    for _ in range(B):
        finish(ledger, lease(ledger))
    ledger.counters.version = 2  # as if nothing had been dropped when the version rose
    assert ledger.claim(epoch, 1, 2, B) == "0 of 2 groups are ready and young enough for step 1"
    ledger.counters.version = 1
    assert isinstance(ledger.claim(epoch, 1, 1, B), Claim)


def test_groups_without_signal_are_dropped_as_they_come_and_their_place_is_free():
    ledger = make(filter_groups=True, limit=0)
    first, second = lease(ledger), lease(ledger)
    assert lease(ledger) is None
    finish(ledger, first)  # all rewards are 1
    assert states(ledger) == {"leased": 1, "dropped": 1} and ledger.drops["no_signal"].count == 1
    assert ledger.counters.num_exhausted == 0 and lease(ledger).prompt == 2  # not tried again
    for index in range(N):
        ledger.commit("g", header(second, index, reward=float(index)), 0.0)
    assert second.state == "ready"


def test_a_run_that_makes_almost_nothing_but_groups_without_signal_stops():
    ledger = make(filter_groups=True, max_filtered=4)
    epoch = ledger.attach("learner", "1")
    for _ in range(4):
        finish(ledger, lease(ledger))
    assert isinstance(ledger.claim(epoch, 1, 0, B), str)
    finish(ledger, lease(ledger))
    with pytest.raises(NoSignalError, match="5 groups in a row had equal rewards only, 0 others are ready"):
        ledger.claim(epoch, 1, 0, B)
    for _ in range(B):
        attempt = lease(ledger)
        for index in range(N):
            ledger.commit("g", header(attempt, index, reward=float(index)), 0.0)
    assert isinstance(ledger.claim(epoch, 1, 0, B), Claim)  # it has made a batch after all
    finish(ledger, lease(ledger))
    assert isinstance(ledger.claim(epoch, 2, 1, B), str)  # counted anew


def test_a_group_without_its_greedy_sample_is_dropped():
    ledger = make(group_size=4, greedy_index=3)
    lost, kept = lease(ledger), lease(ledger)
    ledger.commit("g", header(lost, 3, reward=None, fault="reward_timeout"), 0.0)
    assert ledger.drops["reward_timeout"].count == 1 and (lost.group, 1) in ledger.live
    for index in (0, 1):
        ledger.commit("g", header(kept, index, reward=None, fault="reward_timeout"), 0.0)
    for index in (2, 3):
        ledger.commit("g", header(kept, index), 0.0)
    assert kept.state == "ready"  # one sample and its baseline


def test_under_mask_a_group_is_as_old_as_its_newest_token():
    ledger = make(limit=1, policy="mask")
    epoch = ledger.attach("learner", "1")
    for _ in range(2):
        train_step(ledger, epoch)
    mixed, old = lease(ledger), lease(ledger)
    for index in range(N):
        ledger.commit("g", header(mixed, index, oldest=0, newest=index), 0.0)  # 0 and 0–1 at version 2
        ledger.commit("g", header(old, index, oldest=0, newest=0), 0.0)
    assert ledger.drops["stale"].count == 1 and (old.group, 1) in ledger.live
    finish(ledger, lease(ledger))
    assert ledger.claim(epoch, 3, 2, B).keys == (mixed.key, (old.group, 1))  # the deadline of `mixed` is 1 + 1
    begun = lease(ledger)
    ledger.commit("g", header(begun, 0, oldest=0, newest=0), 0.0)
    ledger.acknowledge(epoch, 3, applied=True)
    assert begun.state == "leased" and ledger.drops["stale"].count == 1  # tokens to come may be young enough
    ledger.forget_generator("g", "generator_lost")
    assert lease(ledger) is begun


def test_under_wait_a_batch_waits_for_slow_groups_that_would_grow_too_old():
    ledger = make(limit=1, policy="wait", wait_s=30.0)
    epoch = ledger.attach("learner", "1")
    train_step(ledger, epoch)
    slow = lease(ledger, held=0)  # due at version 1
    for _ in range(B):
        finish(ledger, lease(ledger, held=1))  # due at version 2
    assert ledger.claim(epoch, 2, 1, B, 5.0) == (
        "policy wait: step 2 would leave 1 groups to grow too old; for 0.0 s"
    )  # fmt: skip
    assert isinstance(ledger.claim(epoch, 2, 1, B, 34.9), str)
    finish(ledger, slow)
    claim = ledger.claim(epoch, 2, 1, B, 34.9)
    assert slow.key in claim.keys and len(claim.keys) == B
    ledger.acknowledge(epoch, 2, applied=True)
    assert not ledger.drops


def test_under_wait_the_wait_ends_and_then_it_is_as_drop():
    ledger = make(limit=1, policy="wait", wait_s=30.0)
    epoch = ledger.attach("learner", "1")
    train_step(ledger, epoch)
    slow = lease(ledger, held=0)
    for _ in range(B):
        finish(ledger, lease(ledger, held=1))
    assert isinstance(ledger.claim(epoch, 2, 1, B, 5.0), str)
    assert slow.key not in ledger.claim(epoch, 2, 1, B, 35.0).keys
    ledger.acknowledge(epoch, 2, applied=True)
    assert ledger.drops["stale"].count == 1


def test_attempts_are_bounded_and_a_fresh_prompt_takes_the_place():
    ledger = make(max_attempts=2)
    first = lease(ledger)
    ledger.give_back("g", first.key, "reward_error", retry=True)
    second = lease(ledger)
    assert second.key == (first.group, 1)
    ledger.give_back("g", second.key, "reward_error", retry=True)
    assert ledger.counters.num_exhausted == 1 and states(ledger) == {"dropped": 2}
    assert lease(ledger).prompt == 1
    ledger.give_back("g", (1, 0), "prompt_too_long", retry=False)
    assert ledger.counters.num_exhausted == 2 and states(ledger) == {"dropped": 3}


def test_a_fault_drops_the_group_and_the_prompt_is_tried_again():
    ledger = make()
    attempt = lease(ledger)
    ledger.commit("g", header(attempt, 0), 0.0)
    ledger.commit("g", header(attempt, 1, reward=None, fault="reward_timeout"), 0.0)
    assert ledger.drops["reward_timeout"].count == 1 and ledger.cancels == [("g", attempt.key, "reward_timeout")]
    assert (attempt.group, 1) in ledger.live


def test_a_faulty_sample_is_left_out_while_two_sound_ones_can_be_left():
    ledger = make(group_size=4)
    epoch = ledger.attach("learner", "1")
    first, second = lease(ledger), lease(ledger)
    for index in range(3):
        ledger.commit("g", header(first, index), 0.0)
    ledger.commit("g", header(first, 3, reward=None, fault="reward_timeout", oldest=0), 0.0)
    assert states(ledger) == {"leased": 1, "ready": 1} and len(first.sound) == 3
    for index in range(2):
        ledger.commit("g", header(second, index, reward=None, fault="reward_error"), 0.0)
    ledger.commit("g", header(second, 2), 0.0)
    assert second.state == "leased"  # two can still be sound
    ledger.commit("g", header(second, 3, reward=None, fault="reward_timeout"), 0.0)
    assert ledger.drops["reward_timeout"].count == 1 and (second.group, 1) in ledger.live
    finish(ledger, lease(ledger))
    assert [h["index"] for h in ledger.live[ledger.claim(epoch, 1, 0, B).keys[0]].sound] == [0, 1, 2]


def test_what_has_come_is_kept_and_only_the_rest_is_leased_again():
    ledger = make(group_size=4)
    epoch = ledger.attach("learner", "1")
    attempt = lease(ledger, generator="a")
    for index in (0, 2):
        ledger.commit("a", header(attempt, index), 0.0)
    ledger.progress("a", attempt.key, 90, 0.0)
    ledger.forget_generator("a", "generator_lost")
    assert states(ledger) == {"pending": 1} and not ledger.drops and ledger.load_of("a") == 0
    again = lease(ledger, generator="b", now=5.0)
    assert again is attempt and again.missing == 2 and ledger.load_of("b") == 2
    assert ledger.progress("b", again.key, 1, 9.0) and again.renewed_at == 9.0  # counted from what was there
    assert ledger.commit("a", header(attempt, 1), 9.0) == "late"  # it is another's now
    assert ledger.commit("b", header(attempt, 2), 9.0) == "duplicate"
    for index in (1, 3):
        assert ledger.commit("b", header(attempt, index), 9.0) == "stored"
    finish(ledger, lease(ledger))
    assert ledger.claim(epoch, 1, 0, B).keys == ((0, 0), (1, 0))


def test_leases_of_an_attempt_are_bounded():
    ledger = make(max_attempts=2)
    attempt = lease(ledger)
    ledger.commit("g", header(attempt, 0), 0.0)
    for _ in range(2):
        assert ledger.live[attempt.key].state in ("leased", "pending")
        ledger.give_back("g", attempt.key, "tired", retry=True)
        again = lease(ledger)
    assert ledger.drops["tired"].count == 1 and again.key == (attempt.group, 1)
    ledger.commit("g", header(again, 0), 0.0)
    ledger.release_leases("shutdown")  # spends nothing
    assert again.num_leases == 0 and states(ledger) == {"dropped": 1, "pending": 1}
    ledger.give_back("g", lease(ledger).key, "prompt_too_long", retry=False)
    assert states(ledger) == {"dropped": 2} and ledger.counters.num_exhausted == 1


def test_a_kept_group_is_charged_at_the_lowest_version_it_contains():
    ledger = make(limit=1)
    epoch = ledger.attach("learner", "1")
    begun = lease(ledger, generator="a")
    ledger.commit("a", header(begun, 0), 0.0)
    train_step(ledger, epoch)  # v = 1; the group began at 0
    ledger.forget_generator("a", "generator_lost")
    assert lease(ledger, generator="b") is begun  # N is 0 < (1 + 1 − 1)·B
    ledger.commit("b", header(begun, 1, version=1), 0.0)
    begun = lease(ledger, generator="a")
    ledger.commit("a", header(begun, 0, version=0), 0.0)
    while ledger.outstanding < B + 1:
        lease(ledger)
    ledger.forget_generator("a", "generator_lost")
    again = lease(ledger)  # N is B: one at version 1 passes, one that began at 0 does not
    assert ledger.drops["stale"].count == 1 and again.key == (begun.group, 1)


def test_a_kept_group_that_can_no_longer_be_trained_is_dropped_while_it_waits():
    ledger = make(limit=0)
    epoch = ledger.attach("learner", "1")
    begun = lease(ledger, generator="a")
    ledger.commit("a", header(begun, 0), 0.0)
    finish(ledger, lease(ledger))
    ledger.forget_generator("a", "generator_lost")
    claim = ledger.claim(epoch, 1, 0, 1)
    ledger.acknowledge(epoch, claim.step, applied=True)
    assert states(ledger) == {"trained": 1, "dropped": 1, "pending": 1} and ledger.drops["stale"].count == 1
    again = lease(ledger)
    assert again.key == (begun.group, 1) and not again.samples


def test_leases_expire_without_progress_and_at_the_limit():
    ledger = make(lease_timeout_s=10.0, lease_limit_s=25.0)
    attempt = lease(ledger, now=0.0)
    assert ledger.next_expiry() == 10.0
    ledger.progress("g", attempt.key, 5, 8.0)
    ledger.progress("g", attempt.key, 5, 9.5)  # no new token: not renewed
    assert ledger.expire(10.0) == 0 and ledger.next_expiry() == 18.0
    assert ledger.expire(17.9) == 0
    ledger.commit("g", header(attempt, 0), 17.9)
    ledger.progress("g", attempt.key, 50, 24.0)
    assert ledger.expire(24.9) == 0 and ledger.expire(25.0) == 1
    assert ledger.cancels == [("g", (0, 0), "lease_limit")] and states(ledger) == {"pending": 1}  # it has a sample
    ledger = make(lease_timeout_s=10.0)
    second = lease(ledger, now=30.0)
    assert ledger.expire(40.0) == 1 and ledger.drops["lease_expired"].count == 1
    assert ledger.progress("g", second.key, 9, 41.0) is False


def test_a_generator_that_returns_after_its_lease_went_to_another_trains_nothing_twice():
    ledger = make()
    first = lease(ledger, generator="a")
    ledger.forget_generator("a", "generator_lost")
    second = lease(ledger, generator="b")
    assert second.key == (first.group, 1)
    assert ledger.commit("a", header(first, 0), 0.0) == "late"
    assert ledger.commit("a", header(second, 0), 0.0) == "late"  # not its lease
    finish(ledger, second, generator="b")
    assert states(ledger) == {"dropped": 1, "ready": 1}


def test_a_restarted_generator_loses_the_leases_of_its_predecessor_only():
    ledger = make()
    ledger.lease("g", "old", 0, 0.0)
    kept = ledger.lease("g", "new", 0, 0.0)
    assert ledger.forget_generator("g", "generator_restarted", but="new") == 1
    assert ledger.leases_of("g") == [kept]


def test_a_new_epoch_fences_the_old_one_and_returns_its_claim():
    ledger = make()
    first = ledger.attach("learner", "1")
    assert ledger.attach("learner", "1") == first == 1
    for _ in range(B):
        finish(ledger, lease(ledger))
    claim = ledger.claim(first, 1, 0, B)
    assert ledger.claim(first, 1, 0, B) is claim  # asked again
    second = ledger.attach("learner", "2")
    assert second == 2 and states(ledger) == {"ready": 2}
    with pytest.raises(FencedError, match="epoch 1 is over"):
        ledger.acknowledge(first, 1, applied=True)
    assert ledger.claim(second, 1, 0, B).keys == claim.keys
    ledger.acknowledge(second, 1, applied=True)
    ledger.acknowledge(second, 1, applied=True)  # repeated: nothing changes
    assert ledger.counters.version == 1
    third = ledger.attach("learner", "3")
    with pytest.raises(LedgerError, match="acknowledgement of step 1 refused"):
        ledger.acknowledge(third, 1, applied=True)  # acknowledged, but not in this epoch


@pytest.mark.parametrize(("step", "version"), [(1, 0), (3, 1), (2, 0), (2, 2)])
def test_only_the_next_step_at_the_standing_version_can_be_claimed(step, version):
    ledger = make()
    epoch = ledger.attach("learner", "1")
    train_step(ledger, epoch)
    with pytest.raises(LedgerError, match="the next is step 2 at version 1"):
        ledger.claim(epoch, step, version, B)


def test_a_skipped_step_makes_no_version_and_drops_its_groups():
    ledger = make()
    epoch = ledger.attach("learner", "1")
    for _ in range(B):
        finish(ledger, lease(ledger))
    ledger.claim(epoch, 1, 0, B)
    ledger.acknowledge(epoch, 1, applied=False, reason="nonfinite")
    assert ledger.counters.version == 0 and ledger.counters.step == 1
    assert states(ledger) == {"dropped": 2} and ledger.drops["nonfinite"].count == 2


def test_a_returned_batch_is_ready_again():
    ledger = make()
    epoch = ledger.attach("learner", "1")
    for _ in range(B):
        finish(ledger, lease(ledger))
    keys = ledger.claim(epoch, 1, 0, B).keys
    assert ledger.return_claim(epoch, 1) and not ledger.return_claim(epoch, 1)
    assert states(ledger) == {"ready": 2}
    assert ledger.claim(epoch, 1, 0, B).keys == keys


def test_one_batch_may_be_claimed_ahead_for_the_version_at_which_it_is_trained():
    ledger = make(limit=1)
    epoch = ledger.attach("learner", "1")
    for _ in range(2 * B):
        finish(ledger, lease(ledger))
    with pytest.raises(LedgerError, match="claim of step 2 at version 1 refused: the next is step 1 at version 0"):
        ledger.claim(epoch, 2, 1, B)
    first = ledger.claim(epoch, 1, 0, B)
    ahead = ledger.claim(epoch, 2, 1, B)
    assert (ahead.step, ahead.version, ahead.keys) == (2, 1, ((2, 0), (3, 0))) and ledger.claims == [first, ahead]
    assert ledger.claim(epoch, 1, 0, B) is first and ledger.claim(epoch, 2, 1, B) is ahead  # asked again
    with pytest.raises(LedgerError, match="the next is step 3 at version 2; claimed: step 1, 2"):
        ledger.claim(epoch, 3, 2, B)
    with pytest.raises(LedgerError, match="acknowledgement of step 2 refused: step 1 is claimed"):
        ledger.acknowledge(epoch, 2, applied=True)
    ledger.acknowledge(epoch, 1, applied=True)
    assert ledger.claims == [ahead] and ledger.claim(epoch, 2, 1, B) is ahead
    ledger.acknowledge(epoch, 2, applied=True)
    assert states(ledger) == {"trained": 4} and ledger.counters.version == 2


def test_with_a_limit_of_zero_nothing_can_be_claimed_ahead():
    ledger = make(limit=0)
    epoch = ledger.attach("learner", "1")
    for _ in range(B):
        finish(ledger, lease(ledger))
    ledger.claim(epoch, 1, 0, B)
    assert ledger.claim(epoch, 2, 1, B) == "0 of 2 groups are ready for step 2"
    ledger.acknowledge(epoch, 1, applied=True)
    for _ in range(B):
        finish(ledger, lease(ledger))
    assert isinstance(ledger.claim(epoch, 2, 1, B), Claim)  # the same request, later


def test_what_would_be_too_old_at_the_named_version_is_not_claimed_ahead():
    ledger = make(limit=1)
    epoch = ledger.attach("learner", "1")
    train_step(ledger, epoch)
    old = [lease(ledger, held=0) for _ in range(B)]  # good for version 1
    young = [lease(ledger, held=1), lease(ledger, held=1)] if ledger.refusal(1) is None else []
    for attempt in (*old, *young):
        finish(ledger, attempt)
    ledger.claim(epoch, 2, 1, 1)
    assert ledger.claim(epoch, 3, 2, B).keys == tuple(a.key for a in young)


def test_a_skipped_step_leaves_the_batch_claimed_ahead_to_be_trained_at_the_version_that_stays():
    ledger = make(limit=1)
    epoch = ledger.attach("learner", "1")
    for _ in range(2 * B):
        finish(ledger, lease(ledger))
    ledger.claim(epoch, 1, 0, B)
    keys = ledger.claim(epoch, 2, 1, B).keys
    ledger.acknowledge(epoch, 1, applied=False, reason="nonfinite")
    assert [(c.step, c.version, c.keys) for c in ledger.claims] == [(2, 0, keys)]
    assert ledger.claim(epoch, 2, 0, B).keys == keys
    ledger.acknowledge(epoch, 2, applied=True)
    assert ledger.counters.version == 1 and ledger.counters.step == 2


def test_returning_a_batch_returns_the_one_claimed_ahead_and_a_new_epoch_both():
    ledger = make(limit=1)
    epoch = ledger.attach("learner", "1")
    for _ in range(2 * B):
        finish(ledger, lease(ledger))
    first = ledger.claim(epoch, 1, 0, B)
    ledger.claim(epoch, 2, 1, B)
    assert ledger.return_claim(epoch, 2) and ledger.claims == [first]
    ledger.claim(epoch, 2, 1, B)
    assert ledger.return_claim(epoch, 1) and ledger.claims == [] and states(ledger) == {"ready": 4}
    ledger.claim(epoch, 1, 0, B)
    ledger.claim(epoch, 2, 1, B)
    ledger.attach("learner", "2")
    assert ledger.claims == [] and states(ledger) == {"ready": 4}


def test_another_limit_acts_from_the_next_claim():
    ledger = make(limit=2)
    epoch = ledger.attach("learner", "1")
    train_step(ledger, epoch)
    old, young = lease(ledger, held=0), lease(ledger, held=1)
    for attempt in (old, young):
        finish(ledger, attempt)
    claim = ledger.claim(epoch, 2, 1, B)
    ledger.set_limit(0)
    assert ledger.claimed is claim and claim.limit == 2  # the claim keeps the limit it was made with
    ledger.return_claim(epoch, 2)
    assert ledger.drops["stale"].count == 1 and states(ledger)["ready"] == 1


def test_the_end_of_the_data_is_a_short_batch_then_none():
    ledger = make(num_prompts=3)
    epoch = ledger.attach("learner", "1")
    train_step(ledger, epoch)
    last = lease(ledger)
    assert lease(ledger) is None and ledger.refusal(1) == "the data ended"
    assert ledger.claim(epoch, 2, 1, B) == "0 of 2 groups are ready for step 2"  # the last one may yet come
    finish(ledger, last)
    claim = ledger.claim(epoch, 2, 1, B)
    assert claim.short and claim.keys == ((2, 0),)
    ledger.acknowledge(epoch, 2, applied=True)
    assert ledger.claim(epoch, 3, 2, B) is None


def test_bad_samples_are_refused():
    ledger = make()
    attempt = lease(ledger)
    with pytest.raises(LedgerError, match="bad_index: sample 2 of a group of 2"):
        ledger.commit("g", header(attempt, 2), 0.0)
    with pytest.raises(LedgerError, match="bad_version: 1 is newer"):
        ledger.commit("g", header(attempt, 0, version=1), 0.0)
    ledger.counters.floor = 1
    ledger.counters.version = 1
    with pytest.raises(LedgerError, match="bad_version: 0 is older"):
        ledger.commit("g", header(attempt, 0, version=0), 0.0)
    assert "older than the rollback" in ledger.refusal(0)


def test_evaluation_is_outside_the_gate_and_waits_for_its_version():
    ledger = make(limit=0)
    epoch = ledger.attach("learner", "1")
    for _ in range(B):
        lease(ledger)
    ledger.validate(epoch, 0, 1, num_prompts=2)
    ledger.validate(epoch, 0, 1, num_prompts=2)
    assert lease(ledger, held=0) is None and ledger.next_size(0) == N
    ledger.counters.version = 1
    first, second = lease(ledger, held=1), lease(ledger, held=1)
    assert (first.lane, first.prompt, first.size, second.prompt) == ("eval", 0, 1, 1)
    finish(ledger, first, version=1)
    assert not ledger.validations[0].done
    for _ in range(2):  # the second prompt fails twice
        key = second.key
        ledger.give_back("g", key, "prompt_too_long", retry=True)
        second = lease(ledger, held=1) if (key[0], 1) in ledger.live else second
    validation = ledger.validations[0]
    assert (validation.done, validation.num_scored, validation.num_dropped, validation.total) == (True, 1, 1, 1.0)
    assert states(ledger, "eval") == {"scored": 1, "dropped": 2} and ledger.outstanding == B
    assert not ledger.drops  # drops are about training


def test_stop_releases_leases_without_spending_attempts():
    ledger = make(max_attempts=1)
    attempt = lease(ledger)
    assert ledger.release_leases("shutdown") == 1
    assert states(ledger) == {"dropped": 1, "pending": 1}
    assert lease(ledger).key == (attempt.group, 1)


def test_a_checkpoint_is_valid_only_of_an_acknowledged_step():
    ledger = make()
    epoch = ledger.attach("learner", "1")
    ledger.checkpoint_valid(epoch, 0, "step_0")
    with pytest.raises(LedgerError, match="step 0 was the last acknowledged"):
        ledger.checkpoint_valid(epoch, 1, "step_1")
