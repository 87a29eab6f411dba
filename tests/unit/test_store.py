"""The ledger on disk: restored exactly, refused by name when it is damaged, foreign or taken."""

import os
import random
import sqlite3
import subprocess
import sys

import pytest

from broker.database import PAGE_BYTES
from broker.ledger import Ledger
from broker.records import Rules
from broker.store import MAX_ATTEMPT, MAX_INDEX, NewSample, Store, _payload_id
from common.config import MAX_ATTEMPTS, MAX_GROUP_SAMPLES
from common.errors import LedgerError, WireError
from common.wire import GENERATOR_OPS, decode, decode_sample, encode_sample
from tests.ledger_walk import comparable
from tests.simulated import make_sample

B, N = 2, 2
IDENTITY = {"run.seed": 0, "data.train_files": ["a"]}
RULES = Rules(group_size=N, batch_size=B, max_attempts=2, lease_timeout_s=10.0, lease_limit_s=100.0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "ledger.sqlite"


class Book:
    """A ledger with its store."""

    def __init__(self, path, *, keep_bytes=1 << 30):
        self.store = Store(path, identity=IDENTITY, keep_bytes=keep_bytes)
        self.ledger = Ledger(RULES, limit=1, snapshot=self.store.snapshot())
        self.samples = []

    def deliver(self, attempt, *, num_tokens=6, versions=None):
        for index in range(attempt.size):
            spans = versions or ((attempt.held, 0, num_tokens),)
            frames = encode_sample(
                make_sample(attempt.group, attempt.attempt, index, num_tokens=num_tokens, spans=spans)
            )
            _, header, (payload,) = decode(frames, GENERATOR_OPS)
            assert self.ledger.commit("g", header, 0.0, len(payload)) == "stored"
            self.samples.append(NewSample(header, payload, "g", spans))

    def commit(self):
        self.store.commit(self.ledger.take_changes(), self.samples)
        self.samples = []

    def lease(self):
        return self.ledger.lease("g", "1", self.ledger.counters.version, 0.0)

    def step(self, epoch, *, applied=True, num_tokens=6):
        for _ in range(B):
            self.deliver(self.lease(), num_tokens=num_tokens)
        c = self.ledger.counters
        claim = self.ledger.claim(epoch, c.step + 1, c.version, B)
        self.commit()
        self.ledger.acknowledge(
            epoch, claim.step, applied=applied, settings={"lr": 0.1}, digest=f"d{claim.step}", optimizer_span=(1.0, 2.5)
        )
        self.commit()
        return claim


def test_a_restored_ledger_is_the_same_in_every_state(path):
    book = Book(path)
    epoch = book.ledger.attach("learner", "1")
    book.step(epoch)
    book.step(epoch, applied=False)
    book.ledger.checkpoint_valid(epoch, 1, "checkpoints/step_1")
    book.ledger.validate(epoch, 1, 1, 2)
    attempts = [book.lease() for _ in range(6)]  # two of them evaluation
    assert [a.lane for a in attempts] == ["eval"] * 2 + ["train"] * 4
    book.deliver(attempts[0])
    book.deliver(attempts[2])
    book.deliver(attempts[3])
    book.ledger.claim(epoch, 3, 1, B)
    book.ledger.give_back("g", attempts[4].key, "prompt_too_long", retry=True)
    book.commit()
    before = book.ledger.snapshot()
    book.store.close()

    again = Book(path)
    assert comparable(again.ledger.snapshot()) == comparable(before)
    assert {a.state for a in before.live} == {"pending", "leased", "claimed"}
    assert again.ledger.attach("learner", "1") == epoch  # the same learner goes on …
    again.ledger.acknowledge(epoch, 3, applied=True)  # … with the claim it has
    again.commit()
    assert again.ledger.counters.version == 2
    retried, fresh = again.lease(), again.lease()
    assert (retried.group, retried.attempt) == (attempts[4].group, 1)
    assert fresh.prompt == before.counters.next_prompt  # the exact next prompt
    again.store.close()


def test_what_was_not_committed_is_gone_and_nothing_else(path):
    book = Book(path)
    book.ledger.attach("learner", "1")
    attempt = book.lease()
    book.commit()
    committed = comparable(book.ledger.snapshot())
    book.deliver(attempt)
    book.store.close()  # killed here
    assert comparable(Book(path).ledger.snapshot()) == committed


def test_which_versions_were_trained_at_which_step_is_plain_sql(path):
    book = Book(path)
    epoch = book.ledger.attach("learner", "1")
    book.step(epoch)
    for attempt in (book.lease(), book.lease()):
        book.deliver(attempt, versions=((0, 0, 2), (1, 2, 6)))
    book.ledger.claim(epoch, 2, 1, B)
    book.ledger.acknowledge(epoch, 2, applied=True)
    book.commit()
    rows = book.store._db.execute(
        "SELECT step, trained_at, sampled_at, SUM(num_tokens) FROM trained_tokens GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
    ).fetchall()
    assert rows == [(1, 0, 0, 24), (2, 1, 0, 8), (2, 1, 1, 16)]
    assert book.store._db.execute(
        "SELECT MAX(trained_at - sampled_at - staleness_limit) FROM trained_tokens"
    ).fetchone() == (0,)
    row, groups = book.store.step_after(1)
    assert (row["step"], row["version"], row["limit"], row["applied"], row["digest"]) == (2, 1, 1, True, "")
    assert [g["group"] for g in groups] == [2, 3] and groups[0]["samples"][1]["oldest"] == 0
    assert book.store.step_after(2) is None
    book.store.close()


def test_payloads_stay_until_a_checkpoint_and_then_up_to_the_bound(path):
    book = Book(path, keep_bytes=5_000)
    epoch = book.ledger.attach("learner", "1")
    claims = [book.step(epoch, num_tokens=64) for _ in range(4)]
    (size,) = {row[0] for row in book.store._db.execute("SELECT payload_bytes FROM steps")}
    assert book.store.redo_bytes == 4 * size and 5_000 / 2 < size < 5_000  # one step fits, two do not
    assert book.store.payloads([(*claims[0].keys[0], 0)]) != [None]
    book.ledger.checkpoint_valid(epoch, 3, "step_3")
    book.commit()
    kept = [None not in book.store.payloads([(*key, i) for key in c.keys for i in range(N)]) for c in claims]
    assert kept == [False, False, True, True] and book.store.redo_bytes == size
    assert book.store._db.execute("SELECT COUNT(*) FROM samples").fetchone() == (4 * B * N,)  # rows stay
    book.store.close()
    assert Book(path).store.redo_bytes == size


def test_payloads_of_dropped_groups_go_at_once(path):
    book = Book(path)
    attempt = book.lease()
    book.deliver(attempt)
    book.commit()
    assert book.store.is_sound(attempt)
    book.ledger.drop_damaged(attempt.key)
    book.commit()
    assert book.store.payloads([(*attempt.key, 0)]) == [None]
    assert book.store._db.execute("SELECT COUNT(*) FROM payloads").fetchone() == (0,)
    book.store.close()


def test_a_flipped_bit_in_a_payload_is_found(path):
    book = Book(path)
    sound, damaged = book.lease(), book.lease()
    for attempt in (sound, damaged):
        book.deliver(attempt)
    book.commit()
    (data,) = book.store.payloads([(*damaged.key, 1)])
    flipped = bytes([data[0] ^ 1]) + data[1:]
    book.store._db.execute("UPDATE payloads SET data = ? WHERE id = (SELECT MAX(id) FROM payloads)", (flipped,))
    assert book.store.is_sound(sound) and not book.store.is_sound(damaged)
    book.store._db.execute("DELETE FROM payloads WHERE data = ?", (flipped,))
    assert not book.store.is_sound(damaged)
    book.store.close()


def test_a_thousand_flipped_bytes_are_found_one_by_one(path):
    book, rng = Book(path), random.Random(0)
    attempt = book.lease()
    book.deliver(attempt, num_tokens=64)
    book.commit()
    keys = [(*attempt.key, index) for index in range(N)]
    payloads = book.store.payloads(keys)
    for _ in range(1_000):
        index = rng.randrange(N)
        place, bits = rng.randrange(len(payloads[index])), rng.randrange(1, 256)
        flipped = bytearray(payloads[index])
        flipped[place] ^= bits
        put = "UPDATE payloads SET data = ? WHERE id = ?"
        book.store._db.execute(put, (bytes(flipped), _payload_id(*keys[index])))
        assert not book.store.is_sound(attempt)  # so it is never claimed; and the learner looks again
        with pytest.raises(WireError, match="checksum"):
            decode_sample(attempt.samples[index], bytes(flipped))
        book.store._db.execute(put, (payloads[index], _payload_id(*keys[index])))
    assert book.store.is_sound(attempt)
    book.store.close()


def refusal(path, **options):
    with pytest.raises(LedgerError) as caught:
        store = Store(path, identity=options.pop("identity", IDENTITY), **options)
        try:
            store.snapshot()
        finally:
            store.close()
    return str(caught.value)


def test_a_ledger_that_is_open_elsewhere_is_refused(path):
    first = Store(path, identity=IDENTITY)
    assert f"another broker (pid {os.getpid()}) has this ledger" in refusal(path)
    first.close()
    Store(path, identity=IDENTITY).close()


def test_the_lock_ends_with_its_process(path):
    code = "import os, sys; from pathlib import Path; from broker.store import Store\n"
    code += "Store(Path(sys.argv[1]), identity={}); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == 9
    Store(path, identity={}).close()


def test_another_config_is_refused_with_the_difference(path):
    Store(path, identity=IDENTITY).close()
    text = refusal(path, identity={"run.seed": 1, "data.train_files": ["a"]})
    assert "the run began with another config (run.seed: 0 != 1)" in text


def filled(path):
    book = Book(path)
    epoch = book.ledger.attach("learner", "1")
    for _ in range(20):
        book.step(epoch, num_tokens=200)
    book.store.close()


@pytest.mark.parametrize("place", ["header", "schema", "middle", "truncated", "text"])
def test_a_damaged_file_is_refused_by_name(path, place):
    filled(path)
    size = path.stat().st_size
    with open(path, "r+b") as file:
        if place == "truncated":
            file.truncate(size - 3 * PAGE_BYTES)
        elif place == "text":
            file.truncate(0)
            file.write(b"not a database at all\n" * 500)
        else:
            file.seek({"header": 0, "schema": 100, "middle": 2 * PAGE_BYTES}[place])
            file.write(b"\xff" * 4096)
    text = refusal(path)
    assert text.startswith(f"{path}: the ledger is damaged (") and "Put back a copy of it, or move it away" in text


def test_contradictions_and_other_schemas_are_refused(path):
    filled(path)
    db = sqlite3.connect(path)
    db.execute("DELETE FROM steps WHERE step = 20")
    db.commit()
    assert "the steps make version 19, the last is 19" in refusal(path)
    db.execute("UPDATE meta SET value = '99' WHERE name = 'schema_version'")
    db.commit()
    db.close()
    assert "schema version 99, this Leeway writes 3" in refusal(path)


def test_an_unwritable_place_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written (Not a directory); choose another run.dir" in refusal(
        tmp_path / "file" / "x" / "l.sqlite"
    )


def test_a_full_disk_ends_the_process_by_name(path):
    book = Book(path)
    book.commit()
    book.store._db.execute("PRAGMA max_page_count = 1")
    with pytest.raises(LedgerError, match=r"cannot write the ledger \(database or disk is full\)"):
        for _ in range(4):
            book.deliver(book.lease(), num_tokens=5_000)
        book.commit()
    book.store.close()


def test_every_sample_that_the_config_allows_has_a_payload_of_its_own():
    groups, attempts, indices = (0, 1, 2**34), (0, 1, MAX_ATTEMPTS - 1), (0, 1, MAX_GROUP_SAMPLES - 1)
    corners = [(g, a, i) for g in groups for a in attempts for i in indices]
    ids = [_payload_id(*key) for key in corners]
    assert ids == sorted(set(ids)) and ids[-1] < 2**63
    assert (MAX_ATTEMPT, MAX_INDEX) == (MAX_ATTEMPTS - 1, MAX_GROUP_SAMPLES - 1)
