"""The broker without its socket: a fake router, a fake registry, a clock that the test turns."""

import logging
import random
import threading

import msgpack
import numpy as np
import psutil
import pytest

from broker.server import LATER, NOW, SOON, Server, open_service, read_vocab_size
from common.config import Config
from common.errors import ConfigError, LedgerError
from common.loading import load_config
from common.wire import GENERATOR_OPS, LEARNER_OPS, decode, encode, encode_sample, unpack
from tests.simulated import make_sample

B, N = 2, 2


class FakeRouter:
    def __init__(self):
        self.sent = []

    def send(self, peer, frames):
        self.sent.append((peer, frames))
        return True

    def take(self, peer=None):
        """(op, fields, payload) of what went out (to ``peer``) since the last call."""
        taken = [m for m in self.sent if peer in (None, m[0])]
        self.sent = [m for m in self.sent if m not in taken]
        return [decode(frames, GENERATOR_OPS | LEARNER_OPS) for _, frames in taken]


class FakeDirectory:
    def __init__(self):
        self.state, self.limits, self.names, self.folder = "running", {}, {"a", "b"}, None

    def desired(self):
        return self.state

    def limit(self, name):
        return self.limits.get(name)

    def entry(self, name):
        return name if name in self.names else None

    def model(self):
        return self.folder


class Broker:
    def __init__(self, folder, **overrides):
        tree = {
            "run": {"id": "r"}, "data": {"task": "reverse_digits", "train_batch_size": B, "val_size": 3},
            "rollout": {"n": N}, "staleness": {"max": 1}, "ledger": {"lease_timeout_s": 20},
        }  # fmt: skip
        for key, value in overrides.items():
            section, name = key.split("__")
            tree.setdefault(section, {})[name] = value
        self.now, self.router, self.directory = 100.0, FakeRouter(), FakeDirectory()
        log = logging.getLogger("test")
        config = Config.model_validate(tree)
        self.service = open_service(config, self.directory, folder, log=log, clock=lambda: self.now)
        self.server = Server(self.service, self.router)
        self.ids = 0

    def tell(self, peer, op, *payload, **fields):
        self.server.handle(peer, encode(op, *payload, **fields))

    def turn(self):
        self.server.turn()
        return self.router.take()

    def hello(self, name, *, version=0, incarnation="1", capacity=100):
        peer = name.encode()
        self.tell(peer, "hello", run="r", name=name, incarnation=incarnation, version=version)
        self.beat(name, version=version, capacity=capacity)

    def beat(self, name, *, version=0, capacity=100, progress=(), sampling=(), stats=None):
        self.tell(
            name.encode(), "heartbeat", version=version, capacity=capacity, progress=list(progress),
            sampling=list(sampling), stats=stats or {},
        )  # fmt: skip

    def ask(self, op, **fields):
        """The answer to a learner's request."""
        self.ids += 1
        self.tell(b"learner", op, id=self.ids, **fields)
        self.server.turn()
        answers = self.router.take(b"learner")
        assert len(answers) == 1 and answers[0][1]["id"] == self.ids, answers
        return answers[0]

    def deliver(self, name, leases, **changes):
        for op, f, _ in leases:
            if op == "lease":
                for index in f["indices"]:
                    sample = make_sample(f["group"], f["attempt"], index, **changes)
                    self.server.handle(name.encode(), encode_sample(sample))


@pytest.fixture
def broker(tmp_path):
    made = []

    def make(**overrides):
        made.append(Broker(tmp_path / f"run{len(made)}", **overrides))
        return made[-1]

    yield make
    for b in made:
        b.service.store.close()


def with_ready_groups(broker):
    """A broker to which a generator has delivered and a learner has attached; and the learner's epoch."""
    b = broker()
    b.hello("a")
    b.deliver("a", b.turn())
    b.turn()
    return b, b.ask("attach", run="r", name="learner", incarnation="1")[1]["epoch"]


def ops(messages):
    return [op for op, *_ in messages]


def test_nothing_is_answered_before_it_is_committed(broker):
    b = broker()
    b.hello("a")
    assert b.router.sent == []
    sent = b.turn()
    assert ops(sent) == ["welcome", *["lease"] * 2 * B, "wait"]
    row = unpack(sent[1][2][0])
    assert row["data_source"] == "reverse_digits" and sent[1][1]["indices"] == [0, 1]
    b.deliver("a", sent[1:3])
    assert b.router.sent == []
    assert b.service.store._db.execute("SELECT COUNT(*) FROM samples").fetchone() == (0,)
    acks = b.turn()
    assert ops(acks) == ["acks"] and acks[0][1]["keys"] == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]
    assert b.service.store._db.execute("SELECT COUNT(*) FROM samples").fetchone() == (2 * N,)


def test_capacity_is_in_samples_and_at_least_one_group(broker):
    b = broker()
    b.hello("a", capacity=1)
    assert ops(b.turn()) == ["welcome", "lease"]
    b.beat("a", capacity=2 * N + 1)
    assert ops(b.turn()) == ["lease"]
    b.beat("a", capacity=0)
    assert b.turn() == []


def test_leases_go_round(broker):
    b = broker()
    b.hello("a")
    b.hello("b")
    b.turn()
    assert [len(b.service.ledger.leases_of(name)) for name in "ab"] == [2, 2]


def test_why_a_generator_waits_is_told_when_the_kind_changes(broker):
    b = broker()
    b.directory.names = set()
    b.hello("a", version=-1)
    assert [f.get("reason") for _, f, _ in b.turn()] == [None, "generator a has no registry entry"]
    b.directory.names = {"a"}
    assert [f["reason"] for _, f, _ in b.turn()] == ["no weights held yet"]
    b.directory.state = "paused"
    assert [f["reason"] for _, f, _ in b.turn()] == ["the run is paused"]
    assert b.turn() == []
    b.directory.state = "running"
    b.beat("a", version=0)
    assert ops(b.turn()) == ["lease"] * 2 * B + ["wait"]
    assert any(line.startswith("a waits: staleness gate: 4 groups") for line in b.ask("status")[1]["status"]["waits"])


def test_a_silent_generator_gets_nothing_and_is_forgotten_when_its_entry_is_gone(broker):
    b = broker(staleness__max=0)
    b.hello("a", capacity=N)
    b.turn()
    b.now += 4.0
    b.hello("b", capacity=N)
    assert ops(b.turn()) == ["welcome", "lease"]
    b.beat("a", capacity=2 * N)
    b.now += 6.0
    b.directory.names = {"b"}
    b.beat("b", capacity=4 * N)
    sent = b.turn()  # a's group goes to b
    assert [(f["group"], f["attempt"]) for op, f, _ in sent if op == "lease"] == [(0, 1)]
    assert b.service.ledger.drops["generator_lost"].count == 1 and len(b.service.peers) == 1


def test_progress_renews_and_what_is_not_leased_is_cancelled(broker):
    b = broker()
    b.hello("a", capacity=N)
    b.turn()
    for tokens in (1, 2):
        b.now += 15.0
        b.beat("a", capacity=N, progress=[[0, 0, tokens]])
        assert b.turn() == []
    b.beat("a", capacity=N, progress=[[7, 0, 1]])
    assert [(op, f["group"], f["reason"]) for op, f, _ in b.turn()] == [("cancel", 7, "not_leased")]
    b.now += 19.9
    b.beat("a", capacity=N, progress=[[0, 0, 2]])  # alive, but no new token
    assert b.turn() == []
    b.now += 0.1
    assert [(op, f.get("reason"), f.get("attempt")) for op, f, _ in b.turn()] == [
        ("cancel", "lease_expired", 0), ("lease", None, 1)
    ]  # fmt: skip


def test_a_generator_that_dials_again_is_sent_what_it_still_owes(broker):
    b = broker()
    b.hello("a", capacity=N)
    sent = b.turn()
    b.server.handle(b"a", encode_sample(make_sample(0, 0, 1)))
    b.turn()
    b.tell(b"a-second-connection", "hello", run="r", name="a", incarnation="1", version=0)
    sent = b.turn()
    assert ops(sent) == ["welcome", "lease"] and sent[1][1]["indices"] == [0]
    b.tell(b"a-second-connection", "hello", run="r", name="a", incarnation="1", version=0)
    assert ops(b.turn()) == ["welcome"]  # the same connection: it only asked for a word


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"response_ids": [100] * 6}, "token_out_of_vocabulary"),
        ({"version": 1}, "bad_version"),
        ({"index": 5}, "bad_index"),
        ({"sampling": {"temperature": 0.0}}, "bad_sampling"),
        ({"behavior_logprobs": [float("nan")] * 6}, "bad_logprob"),
    ],
)
def test_a_refused_sample_ends_its_lease_and_the_prompt_is_tried_again(broker, tmp_path, changes, reason):
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 100}}')
    b = broker()
    b.directory.folder = str(tmp_path)
    b.hello("a", capacity=N)
    b.turn()
    if "response_ids" in changes:
        changes = {"response_ids": np.array(changes["response_ids"], dtype=np.int32)}
    if "behavior_logprobs" in changes:
        changes = {"behavior_logprobs": np.array(changes["behavior_logprobs"], dtype=np.float32)}
    b.server.handle(b"a", encode_sample(make_sample(0, 0, changes.pop("index", 0), **changes)))
    sent = b.turn()
    assert [(op, f.get("reason")) for op, f, _ in sent] == [("refused", reason), ("cancel", reason), ("lease", None)]
    assert sent[2][1]["attempt"] == 1 and b.ask("status")[1]["status"]["queue/refused_samples"] == 1


def test_the_greedy_sample_of_remax_is_leased_with_its_group_and_is_greedy(broker):
    b = broker(algorithm__adv_estimator="remax")
    b.hello("a", capacity=N + 1)
    (_, f, _) = b.turn()[1]
    assert f["indices"] == [0, 1, 2]
    greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
    for index in range(3):
        b.server.handle(b"a", encode_sample(make_sample(0, 0, index, **({"sampling": greedy} if index == 2 else {}))))
    assert ops(b.turn()) == ["acks", "lease"] and b.service.ledger.num_ready == 1
    b.server.handle(b"a", encode_sample(make_sample(1, 0, 2)))
    assert "temperature 1.0 in the greedy sample" in next(f for op, f, _ in b.turn() if op == "refused")["detail"]


def test_a_refused_sample_without_a_lease_is_acknowledged_so_that_it_is_forgotten(broker):
    b = broker()
    b.hello("a", capacity=N)
    b.turn()
    b.server.handle(b"a", encode_sample(make_sample(9, 0, 0, reward=float("nan"))))
    sent = b.turn()
    assert [op for op, *_ in sent] == ["acks", "refused"] and sent[0][1]["keys"] == [[9, 0, 0]]


def test_a_damaged_payload_is_never_claimed(broker):
    b = broker()
    b.hello("a")
    b.deliver("a", b.turn())
    b.turn()
    store = b.service.store
    store._db.execute("UPDATE payloads SET data = x'00' WHERE id = (SELECT MIN(id) FROM payloads)")
    epoch = b.ask("attach", run="r", name="learner", incarnation="1")[1]["epoch"]
    op, _, payload = b.ask("claim", epoch=epoch, step=1, version=0, num_groups=B)
    assert op == "claimed" and [g["group"] for g in unpack(payload[0])] == [1, 2]  # not group 0
    assert b.service.ledger.drops["damaged"].count == 1
    b.ask("ack_step", epoch=epoch, step=1, applied=True, reason="", settings={}, digest="", optimizer_span=[0, 1])


def test_a_waiting_claim_is_told_why_once_a_second_and_served_at_once(broker):
    b = broker()
    epoch = b.ask("attach", run="r", name="learner", incarnation="1")[1]["epoch"]
    op, fields, _ = b.ask("claim", epoch=epoch, step=1, version=0, num_groups=B)
    assert (op, fields["reason"]) == ("waiting", "0 of 2 groups are ready for step 1; no generator is connected")
    b.now += 0.5
    assert b.turn() == []
    b.hello("a", capacity=N)
    b.now += 0.5
    b.turn()
    b.now += 1.0
    b.beat("a", capacity=N)
    b.server.turn()
    (answer,) = b.router.take(b"learner")
    assert answer[1]["reason"] == (
        "0 of 2 groups are ready for step 1; 1 are leased (the oldest, 0/0, for 1.0 s to a)"
    )  # fmt: skip
    b.beat("a", capacity=100)
    b.deliver("a", [("lease", {"group": 0, "attempt": 0, "indices": [0, 1]}, []), *b.turn()])
    b.server.turn()
    (answer,) = b.router.take(b"learner")
    assert answer[0] == "claimed" and answer[1]["version"] == 0 and not answer[1]["short"]


def test_another_staleness_limit_while_running(broker, caplog):
    b = broker(weights__publish_every=2)
    b.directory.limits["staleness.max"] = 3
    b.turn()
    assert b.service.ledger.limit == 3
    for impossible in (0, -1, "x", 1.5, True):  # 0: the lease gate would close for ever with publish_every=2
        b.directory.limits["staleness.max"] = impossible
        b.turn()
        assert b.service.ledger.limit == 3
        b.turn()
    refused = [r.getMessage() for r in caplog.records if "is not taken" in r.getMessage()]
    assert len(refused) == 5 and refused[0].startswith("staleness.max=0 is not taken: it must be a whole number from 1")


def test_other_runs_stale_processes_and_learners_of_other_runs_are_refused(broker):
    b = broker()
    b.tell(b"x", "hello", run="other", name="x", incarnation="1", version=0)
    assert b.turn()[0][1]["reason"] == "other_run"
    b.hello("a", incarnation="1")
    b.tell(b"a2", "hello", run="r", name="a", incarnation="2", version=0)
    b.turn()
    b.tell(b"a3", "hello", run="r", name="a", incarnation="1", version=0)
    assert b.turn()[0][1]["reason"] == "stale_incarnation"
    op, fields, _ = b.ask("attach", run="other", name="learner", incarnation="1")
    assert (op, fields["kind"]) == ("error", "ledger")
    op, fields, _ = b.ask("claim", epoch=0, step=1, version=0, num_groups=B)
    assert (op, fields["kind"]) == ("error", "fenced")


def test_validation_needs_held_out_prompts(broker, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"data_source": "d", "prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "1"}}\n'
    )
    b = broker(data__task=None, data__train_files=str(path))
    epoch = b.ask("attach", run="r", name="learner", incarnation="1")[1]["epoch"]
    assert "no held-out prompts" in b.ask("validate", epoch=epoch, step=0, version=0)[1]["detail"]


def test_vocabulary_of_a_model_folder(tmp_path):
    assert read_vocab_size(tmp_path) is None
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    assert read_vocab_size(tmp_path) == 7
    (tmp_path / "config.json").write_text("{")
    assert read_vocab_size(tmp_path) is None


def mutated(rng, frames):
    """A message with one thing wrong (or, now and then, none that shows)."""
    frames = list(frames)
    i = rng.randrange(len(frames))
    how = rng.randrange(9)
    if how == 0 and frames[i]:  # bits
        frame = bytearray(frames[i])
        for _ in range(rng.randrange(1, 4)):
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        frames[i] = bytes(frame)
    elif how == 1:  # cut short
        frames[i] = frames[i][: rng.randrange(len(frames[i]) + 1)]
    elif how == 2:  # a field of another type
        header = unpack(frames[0])
        header[rng.choice(sorted(header))] = rng.choice([None, -1, 1 << 61, "x", b"x", [], {}, 0.5, float("nan"), True])
        frames[0] = msgpack.packb(header)
    elif how == 3:  # a field too many, or too few
        header = unpack(frames[0])
        header.pop(rng.choice(sorted(header))) if rng.random() < 0.5 else header.update({"x" * rng.randrange(9): 1})
        frames[0] = msgpack.packb(header)
    elif how == 4:  # a huge declared length
        frames[i] = rng.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6"]) + b"\xff\xff\xff\xff" + frames[i][:64]
    elif how == 5:  # a nested bomb
        frames[i] = b"\x91" * rng.choice([17, 1_000, 100_000]) + b"\x01"
    elif how == 6:  # many frames
        frames += [b"x"] * rng.choice([1, 10, 5_000])
    elif how == 7:  # a payload that is another's
        frames[-1] = rng.randbytes(rng.randrange(200))
    else:
        frames.pop(i)
    return frames


@pytest.mark.parametrize("number", [15_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_mutated_messages_are_refused_with_a_reason_and_cost_no_memory(broker, number):
    b, rng = broker(), random.Random(0)
    b.hello("a")
    epoch = b.ask("attach", run="r", name="learner", incarnation="1")[1]["epoch"]

    def messages():
        group = rng.randrange(8)
        yield encode_sample(make_sample(group, 0, rng.randrange(N)))
        yield encode(
            "heartbeat", version=0, capacity=4, progress=[[group, 0, 3]], sampling=[[1.0, 2.0]], stats={"x": 1}
        )
        yield encode("give_back", group=group, attempt=0, reason="no", retry=True)
        yield encode("hello", run="r", name="b", incarnation="2", version=0)
        yield encode("claim", id=1, epoch=epoch, step=1, version=0, num_groups=B)
        yield encode("fetch", id=2, epoch=epoch, keys=[[group, 0, 0]])
        yield encode(
            "ack_step",
            id=3,
            epoch=epoch,
            step=1,
            applied=True,
            reason="",
            settings={},
            digest="",
            optimizer_span=[0, 1],
        )

    process, before = psutil.Process(), 0
    for i in range(number):
        if i == number // 10:
            before = process.memory_info().rss
        for_whom = rng.choice([b"a", b"b", b"learner", b"nobody"])
        b.server.handle(for_whom, mutated(rng, rng.choice(list(messages()))))
        if i % 50 == 0:
            b.now += 0.1
            b.beat("a")
            b.turn()
    assert process.memory_info().rss - before < 64e6
    reasons = b.service.refused
    assert sum(reasons.values()) > 0.6 * number
    assert {"not_msgpack", "wrong_type", "missing_field", "extra_field", "too_many_frames", "checksum"} <= set(reasons)


def random_message(rng, ops):
    """A message whose header obeys the schema by name, with values of any kind."""

    def value(kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        kind = rng.choice(kinds) if rng.random() < 0.9 else rng.choice([int, str, list, dict, type(None)])
        numbers = [0, 1, 2, 3, -1, 7, 1 << 40, -(1 << 61)]
        return {
            int: rng.choice(numbers), float: rng.random(), str: rng.choice(["r", "a", "b", "1", "x" * 2_000, ""]),
            bool: rng.random() < 0.5, type(None): None,
            list: rng.choice([[], [[0, 0, 1]], [[1, 0]], [0, 1], ["x"], [[0, 0, 0]] * 50, [None], [1.5, 2.5]]),
            dict: rng.choice([{}, {"until": 1.0}, {"a": [1]}, {"tokens": float("nan")}, {"x": b"y"}]),
        }[kind]  # fmt: skip

    op = rng.choice(sorted(ops))
    header = {"v": 1, "op": op, **{name: value(kind) for name, kind in ops[op].items()}}
    if rng.random() < 0.05:
        header.pop(rng.choice(sorted(header)))
    return [msgpack.packb(header), *[rng.randbytes(rng.randrange(40)) for _ in range(rng.choice([0, 0, 1, 2]))]]


def test_no_message_ends_the_broker(broker):
    """Random headers of every kind from several peers, between real samples: refused or served, never an exception."""
    b, rng = broker(), random.Random(0)
    b.hello("a")
    everything = GENERATOR_OPS | LEARNER_OPS
    for i in range(8_000):
        peer = rng.choice([b"a", b"b", b"learner"])
        b.server.handle(peer, random_message(rng, everything))
        if i % 10 == 0:
            b.now += 0.2
            b.hello("a", version=min(b.service.ledger.counters.version, 3))
            b.deliver("a", [m for m in b.turn() if m[0] == "lease"][:2])
        counts = b.service.ledger.counts["train"]
        assert min(counts.values(), default=0) >= 0
    b.turn()
    assert sum(b.service.refused.values()) > 1_000 and len(b.service.refused) > 5
    snapshot = b.service.store.snapshot()
    assert snapshot.counts["train"] == {s: n for s, n in b.service.ledger.counts["train"].items() if n}


def test_a_learner_that_waits_for_data_nobody_can_score_is_told_why_and_then_stopped(broker):
    b = broker(ledger__max_attempts=1)
    b.hello("a")
    epoch = b.ask("attach", run="r", name="learner", incarnation="1")[1]["epoch"]
    b.tell(b"learner", "claim", id=90, epoch=epoch, step=1, version=0, num_groups=B)
    told = []
    for _ in range(100):
        for op, f, _payload in b.turn():
            if op == "lease":
                b.tell(b"a", "give_back", group=f["group"], attempt=f["attempt"], reason="bad_prompt", retry=False)
            elif op in ("waiting", "error"):
                told.append((op, f))
        b.now += 1.0
        b.beat("a")
    assert "dropped most often: bad_prompt" in told[-2][1]["reason"]
    assert told[-1][0] == "error" and told[-1][1]["kind"] == "no_signal" and "bad_prompt (" in told[-1][1]["detail"]


def test_a_ledger_is_continued_with_its_own_config_only_and_only_if_it_may_be(tmp_path):
    def open_with(*overrides, begun="first"):
        given = ["model.toy=true", "data.task=reverse_digits", "run.id=r", f"run.dir={tmp_path}", *overrides]
        open_service(load_config([], given), FakeDirectory(), tmp_path, begun=begun).store.close()

    open_with("trainer.resume_mode=off")
    open_with("trainer.resume_mode=off")  # a broker that was started again
    for other in ("actor.optim.lr=0.5", "algorithm.adv_estimator=rloo", "staleness.max=3", "data.shuffle=false"):
        with pytest.raises(LedgerError, match=f"another config .{other.partition('=')[0]}: "):
            open_with(other)
    with pytest.raises(ConfigError, match=r"already has a run; set trainer\.resume_mode=auto"):
        open_with("trainer.resume_mode=off", begun="second")
    open_with("run.max_steps=7", "generators.count=3", begun="second")
    open_with("trainer.resume_mode=off", begun="second")


def test_who_waits_for_an_answer_gets_it_at_once(broker):
    """A learner, a generator that owes nothing more; samples of the others share a transaction."""
    b = broker(staleness__max=3)
    hello = encode("hello", run="r", name="a", incarnation="1", version=0)
    assert b.server.handle(b"a", hello) == SOON
    b.beat("a", capacity=6)
    leases = [f for op, f, _ in b.turn() if op == "lease"]
    keys = [(f["group"], f["attempt"], index) for f in leases for index in f["indices"]]
    assert len(keys) == 6
    attach = encode("attach", id=1, run="r", name="learner", incarnation="1")
    assert b.server.handle(b"learner", attach) == NOW
    b.turn()
    claim = encode("claim", id=2, epoch=1, step=1, version=0, num_groups=B)
    assert b.server.handle(b"learner", claim) == LATER  # no batch is ready
    hastes = [b.server.handle(b"a", encode_sample(make_sample(*key))) for key in keys]
    assert hastes == [LATER, LATER, LATER, NOW, SOON, SOON]  # the second group makes the batch that the learner wants
    assert {"acks", "claimed", "lease"} <= set(ops(b.turn()))
    assert b.server.handle(b"a", b"") == LATER


class ScriptedRouter(FakeRouter):
    """Gives one entry of the script for each ``receive`` (None: nobody has written), then sets ``stop``."""

    def __init__(self, script, stop):
        super().__init__()
        self.script, self.stop, self.events = list(script), stop, []

    def receive(self, timeout_s):
        self.events.append("waits" if timeout_s > 0 else "looks")
        if not self.script:
            self.stop.set()
            return None
        return self.script.pop(0)

    def send(self, peer, frames):
        self.events.append(decode(frames, GENERATOR_OPS | LEARNER_OPS)[0])
        return super().send(peer, frames)


def test_the_learner_is_answered_before_the_next_message_and_samples_are_waited_for(broker):
    b = broker()
    b.hello("a")
    b.turn()
    beat = (b"a", encode("heartbeat", version=0, capacity=0, progress=[], sampling=[], stats={}))
    status, stop = (b"learner", encode("status", id=1)), threading.Event()
    b.server._router = router = ScriptedRouter([status, beat, None, beat, None], stop)
    b.server.run(stop)
    assert router.events[:6] == ["waits", "status_is", "waits", "looks", "waits", "looks"]


def test_other_ranks_see_a_claim_once_it_is_made_and_are_never_left_waiting(broker):
    b, epoch = with_ready_groups(broker)
    for peer, id in ((b"rank1", 11), (b"rank2", 12)):
        b.tell(peer, "see_claim", id=id, epoch=epoch, step=1)
    assert b.turn() == []
    b.now += 1
    assert [(op, f["id"], f["reason"]) for op, f, _ in b.turn()] == [
        ("waiting", 11, "step 1 is not claimed yet"), ("waiting", 12, "step 1 is not claimed yet"),
    ]  # fmt: skip
    b.tell(b"rank1", "see_claim", id=13, epoch=epoch, step=1)  # asked again after a silence: one answer
    claimed = b.ask("claim", epoch=epoch, step=1, version=0, num_groups=B)
    for peer, id in ((b"rank1", 13), (b"rank2", 12)):
        [(op, fields, payload)] = b.router.take(peer)
        assert (op, payload, fields | {"id": 0}) == ("claimed", claimed[2], claimed[1] | {"id": 0})
        assert fields["id"] == id
    assert b.ask("see_claim", epoch=epoch, step=1)[0] == "claimed"  # later, too
    b.tell(b"rank1", "see_claim", id=14, epoch=epoch, step=2)
    b.tell(b"rank2", "see_claim", id=15, epoch=epoch, step=1)
    b.turn()
    done = dict(applied=True, reason="", settings={}, digest="", optimizer_span=[0, 1])
    b.ask("ack_step", epoch=epoch, step=1, **done)
    assert b.router.take() == []
    op, fields, _ = b.ask("see_claim", epoch=epoch, step=1)
    assert (op, fields["detail"]) == ("error", "step 1 is over: the last one is 1")
    b.ask("attach", run="r", name="learner", incarnation="2")
    assert [(op, f["id"], f["kind"]) for op, f, _ in b.router.take(b"rank1")] == [("error", 14, "fenced")]
    assert b.ask("see_claim", epoch=epoch, step=2)[1]["kind"] == "fenced"


def test_status_says_since_when_a_step_is_at_the_learner(broker):
    b, epoch = with_ready_groups(broker)
    assert b.ask("claim", epoch=epoch, step=1, version=0, num_groups=B)[0] == "claimed"
    b.now += 7
    b.ask("claim", epoch=epoch, step=1, version=0, num_groups=B)  # asked again after a silence
    assert "broker waits: step 1 is at the learner, for 7.0 s" in b.ask("status")[1]["status"]["waits"]


BY_HAND = {"run": "r", "epoch": -1, "step": 0, "who": "me", "lr_factor": 1.0}


def test_a_rollback_of_a_run_that_goes_on_tells_everybody(broker):
    b, epoch = with_ready_groups(broker)
    b.ask("checkpoint", epoch=epoch, step=0, path="c")
    for step in (1, 2):
        b.beat("a")
        b.deliver("a", b.turn())
        assert b.ask("claim", epoch=epoch, step=step, version=step - 1, num_groups=B)[0] == "claimed"
        done = dict(applied=True, reason="", settings={}, digest="", optimizer_span=[0, 1])
        b.ask("ack_step", epoch=epoch, step=step, **done)
    b.beat("a", version=2)
    b.tell(b"learner", "claim", id=99, epoch=epoch, step=3, version=2, num_groups=1000)
    b.turn()
    assert b.ask("rollback", **{**BY_HAND, "run": "other"})[1]["detail"] == "this is the broker of run r, not of other"
    assert "not valid; valid are: 0" in b.ask("rollback", **{**BY_HAND, "step": 1})[1]["detail"]
    leased = b.service.ledger.leases_of("a")
    b.tell(b"verb", "rollback", id=7, **BY_HAND)
    messages = b.turn()
    told = [(op, f) for op, f, _ in messages if op in ("error", "rolled_back")]
    assert [op for op, _ in told] == ["error", "rolled_back"] and told[0][1]["id"] == 99
    assert told[0][1]["kind"] == "rolled_back" and (told[1][1]["step"], told[1][1]["version"]) == (3, 3)
    assert told[1][1]["dropped"] >= len(leased) > 0
    assert {(f["group"], f["reason"]) for op, f, _ in messages if op == "cancel"} == {
        (a.group, "rolled_back") for a in leased
    }
    assert "older than the rollback to 3" in next(f for op, f, _ in messages if op == "wait")["reason"]
    answer = b.ask("attach", run="r", name="learner", incarnation="2")[1]
    assert (answer["step"], answer["version"], answer["floor"], answer["abandoned"]) == (3, 3, 3, [[1, 2]])


def test_a_learner_that_rolls_its_run_back_is_asked_for_its_epoch(broker):
    """Repeated after a silence it is made once; a learner that was replaced meanwhile decides nothing."""
    b, first = with_ready_groups(broker)
    b.ask("checkpoint", epoch=first, step=0, path="c")
    epoch = b.ask("attach", run="r", name="learner", incarnation="2")[1]["epoch"]
    guard = {**BY_HAND, "who": "guard", "lr_factor": 0.5}
    assert b.ask("rollback", **{**guard, "epoch": first})[1]["kind"] == "fenced"
    for lr_factor in (0.0, 1.5, float("nan")):
        b.tell(b"learner", "rollback", id=1, **{**guard, "epoch": epoch, "lr_factor": lr_factor})
        assert b.router.take(b"learner") == [] and ops(b.turn()) == ["refused"]
    assert b.ask("rollback", **{**guard, "epoch": epoch})[0] == "rolled_back"
    assert b.ask("rollback", **{**guard, "epoch": epoch})[1]["kind"] == "rolled_back", "an error: it has lost its epoch"
    assert b.service.ledger.counters.step == 1
    epoch = b.ask("attach", run="r", name="learner", incarnation="3")[1]["epoch"]
    _, _, payload = b.ask("row", epoch=epoch, after=0)
    assert unpack(payload[0])["settings"] == {"lr_factor": 0.5} and unpack(payload[0])["restored"] == 0


def test_a_draining_run_trains_what_is_out_and_ends(broker):
    b = broker()
    b.hello("a")
    leases = [m for m in b.turn() if m[0] == "lease"]
    epoch = b.ask("attach", run="r", name="learner", incarnation="1")[1]["epoch"]
    b.deliver("a", leases[: B + 1])
    b.directory.state = "draining"
    assert ops(b.turn()) == ["acks", "wait"]  # nothing new
    assert b.ask("claim", epoch=epoch, step=1, version=0, num_groups=B)[0] == "claimed"
    acked = {"applied": True, "reason": "", "settings": {}, "digest": "", "optimizer_span": [0.0, 1.0]}
    b.ask("ack_step", epoch=epoch, step=1, **acked)
    waits, *_ = b.ask("claim", epoch=epoch, step=2, version=1, num_groups=B)
    assert waits == "waiting"  # for the leases under way
    for lease in leases[B + 1 :]:
        b.tell(b"a", "give_back", group=lease[1]["group"], attempt=0, reason="shutdown", retry=True)
    b.server.turn()
    op, claimed, _ = b.router.take(b"learner")[-1]
    assert (op, claimed["short"]) == ("claimed", True)  # one group is left
    b.ask("ack_step", epoch=epoch, step=2, **acked)
    assert b.ask("claim", epoch=epoch, step=3, version=2, num_groups=B)[0] == "ended"
