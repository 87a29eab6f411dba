"""Random schedules of everything that can happen to a ledger, crashes included."""

import random
import types
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import broker.ledger
from broker.ledger import Ledger
from broker.store import Store
from common import staleness
from tests.ledger_walk import Walk, reachable


def walk(seed, *, ops, ledger_class=Ledger, store=None, **rules):
    rng = random.Random(seed)
    walk = Walk(rng.randrange, ledger_class, store, **rules)
    for _ in range(ops):
        walk.step()
    return walk


RULES = [{"policy": "drop"}, {"policy": "drop", "filter_groups": True}, {"policy": "mask"}, {"policy": "wait"}]


@pytest.mark.parametrize(("seed", "rules"), enumerate(RULES))
def test_seeded_walk_in_memory(seed, rules):
    reachable(walk(seed, ops=25_000, **rules))


def test_seeded_walk_on_disk_with_crashes(tmp_path):
    store = Store(tmp_path / "ledger.sqlite", identity={})
    found = walk(0, ops=4_000, store=store)
    assert found.done["crash"] > 50
    found.commit()
    stored = {tuple(row) for row in store._db.execute("SELECT grp, attempt, idx FROM samples")}
    assert stored == found.stored  # everything acknowledged is there, and nothing else
    trained = dict(store._db.execute("SELECT grp, step FROM attempts WHERE state = 'trained'"))
    assert trained == found.trained | found.given_up and found.given_up
    survive = dict(store._db.execute("SELECT grp, step FROM rollouts WHERE state = 'trained' AND NOT abandoned"))
    assert survive == found.trained
    store.close()


class Machine(RuleBasedStateMachine):
    @initialize(data=st.data(), limit=st.integers(0, 2), policy=st.sampled_from(["drop", "mask", "wait"]))
    def begin(self, data, limit, policy):
        self.walk = Walk(lambda n: data.draw(st.integers(0, n - 1)), Ledger, limit=limit, policy=policy)

    @rule(name=st.sampled_from(Walk.OPERATIONS), data=st.data())
    def operate(self, name, data):
        self.walk.pick = lambda n: data.draw(st.integers(0, n - 1))
        getattr(self.walk, name)()
        self.walk.check()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=15, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)

# what is put in the place of what, in broker/ledger.py
FAULTS = {
    "dedup skipped": ("if index in attempt.samples:", "if False:"),
    "lost expiry": ("heapq.heappush(self._expiries, (due, key))", "pass"),
    "doomed groups stay": ("c.version += 1\n            self._drop_doomed()", "c.version += 1"),
    "claim survives its epoch": ("self._return_claims(0)\n            self.attached", "self.attached"),
    "no fence": ("if epoch != self.counters.epoch or epoch == 0:", "if False:"),
    "lease gate open": ("if not staleness.may_lease(", "if False and not staleness.may_lease("),
    "version raised by a skipped step": ("if applied:\n            c.version", "if True:\n            c.version"),
    "late samples taken": (
        'if attempt is None or attempt.generator != generator:\n            return "late"',
        'if attempt is None:\n            return "stored"',
    ),
    "claim ahead keeps the version that was not made": ("self.claims[0] = replace(", "replace("),
    "claim ahead outlives the batch before it": ("for claim in self.claims[first:]:", "for claim in self.claims[:1]:"),
    "kept group charged as a fresh one": ("held=min(held, attempt.oldest)", "held=held"),
    "rollback leaves the floor": ("c.floor, c.epoch_start = c", "_, c.epoch_start = c"),
    "rollback keeps the epoch": ("c.epoch, self.attached = c.epoch + 1, (R", "c.epoch, self.attached = c.epoch, (R"),
    "rollback keeps what waits with samples": ('state != "pending" or attempt.samples:', 'state != "pending":'),
    "rollback keeps checkpoints given up": ("[step for step in self.checkpoints if step <= to]", "self.checkpoints"),
    "rollback gives a prompt up": ("ROLLED_BACK, retry=True", "ROLLED_BACK, retry=False"),
    "lost samples stay owed": ("attempt.num_leases += 1", "attempt.num_leases += 1; self._owed[generator] += 1"),
    "repeated acknowledgement counts again": ("c.epoch_start < step <= c.step:", "c.epoch_start < step < c.step:"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_faults_of_the_state_machine_are_caught(fault):
    source = Path(broker.ledger.__file__).read_text()
    right, wrong = FAULTS[fault]
    assert source.count(right) == 1, "the code has changed: mend the list of faults"
    module = types.ModuleType("faulty_ledger")
    exec(compile(source.replace(right, wrong), "faulty_ledger", "exec"), module.__dict__)
    with pytest.raises(Exception):  # noqa: B017 (which check finds it does not matter)
        for seed in range(8):
            walk(seed, ops=4_000, ledger_class=module.Ledger)


GATES = {
    "lease_room": (
        lambda *, outstanding, version, held, limit, batch: 1 - outstanding + (limit + 1 - (version - held)) * batch,
        "leased beyond the gate",
    ),
    "may_train": (lambda *, oldest, version, limit: version <= oldest + limit + 1, "claimed too old"),
    "is_doomed": (lambda *, oldest, version, limit: version > oldest + limit + 1, "doomed, but still outstanding"),
}


@pytest.mark.parametrize("gate", GATES)
def test_seeded_faults_by_one_in_the_shared_gates_are_caught(monkeypatch, gate):
    wrong, found = GATES[gate]
    monkeypatch.setattr(staleness, gate, wrong)
    with pytest.raises(AssertionError, match=found):
        for seed in range(3):
            walk(seed, ops=4_000)
