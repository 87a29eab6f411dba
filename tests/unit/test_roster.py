"""The roster alone, with a clock of the test's."""

from __future__ import annotations

import random
from typing import Any

from learner.roster import End, Note, Prepare, Roster, Send, Start, Swap

TIMEOUT_S = 2.0


def hello(name: str, version: int = -1, run: str = "run", incarnation: str = "1") -> dict[str, Any]:
    return {"run": run, "name": name, "incarnation": incarnation, "version": version, "num_workers": 1}


def roster(version: int = 0) -> Roster:
    r = Roster(run_id="run", epoch=3, timeout_s=TIMEOUT_S)
    publish(r, version, 0.0)
    return r


def publish(r: Roster, version: int, now: float) -> list[Any]:
    r.sealed(version, 100 + version)
    return r.published(version, now)


def join(r: Roster, name: str, version: int = -1, now: float = 0.0) -> list[Any]:
    return r.receive(name.encode(), "hello", hello(name, version), now)


def only(actions: list[Any], kind: type) -> Any:
    (found,) = [a for a in actions if isinstance(a, kind)]
    return found


def deliver(r: Roster, prepare: Prepare, now: float) -> list[Any]:
    """Play one transfer to its end as the engine would."""
    n, peer = prepare.number, prepare.peer
    r.receive(peer, "prepared", {"number": n}, now)
    r.sent(n, now)
    r.receive(peer, "staged", {"number": n, "digest": 100 + prepare.version}, now)
    return r.receive(peer, "held", {"number": n, "version": prepare.version, "pause_s": 0.01, "difference": 1e-6}, now)


def test_the_dialogue_of_one_transfer() -> None:
    r = roster()
    actions = join(r, "a")
    assert only(actions, Send) == Send(b"a", "welcome", {"epoch": 3, "timeout_s": TIMEOUT_S})
    prepare = only(actions, Prepare)
    assert (prepare.peer, prepare.version) == (b"a", 0)
    start = only(r.receive(b"a", "prepared", {"number": prepare.number}, 0.1), Start)
    assert (start.name, start.version) == ("a", 0)
    staged = r.receive(b"a", "staged", {"number": prepare.number, "digest": 100}, 0.2)
    assert staged == [Swap(b"a", prepare.number, 0, prove=False), End(prepare.number, staged=True)]
    assert (
        r.receive(b"a", "held", {"number": prepare.number, "version": 0, "pause_s": 0.05, "difference": -1.0}, 0.3)
        == []
    )
    assert (r.members["a"].version, r.members["a"].state) == (0, "idle")
    assert (r.figures.transfers, r.figures.transfer_s, r.figures.pause_s) == (1, 0.3, 0.05)


def test_only_those_that_hold_less_are_sent_anything() -> None:
    r = roster(4)
    assert not [a for a in join(r, "has", 4) if isinstance(a, Prepare)]
    assert only(join(r, "lacks", 3), Prepare).version == 4


def test_a_version_published_in_a_transfer_follows_it() -> None:
    r = roster()
    prepare = only(join(r, "a"), Prepare)
    assert publish(r, 1, 0.1) == [] and publish(r, 2, 0.1) == []
    after = only(deliver(r, prepare, 0.2), Prepare)
    assert (after.version, after.number > prepare.number) == (2, True)  # 1 was superseded


def test_each_silence_has_a_deadline_and_a_name() -> None:
    for state, word in (("preparing", "PREPARED"), ("sending", "STAGED"), ("swapping", "HELD")):
        r = roster()
        n = only(join(r, "a"), Prepare).number
        if state != "preparing":
            r.receive(b"a", "prepared", {"number": n}, 0.0)
            r.sent(n, 0.0)
        if state == "swapping":
            r.receive(b"a", "staged", {"number": n, "digest": 100}, 0.0)
        r.receive(b"a", "beat", {"version": -1, "state": ""}, 1.0)
        assert r.tick(1.9) == [] and r.next_due() == 2.0
        note, abort, *_ = r.tick(2.0)
        assert note == Note(f"a: version 0 not delivered: no {word} within 2 s", fault=True)
        assert abort.op == "abort"
        assert only(r.tick(2.5), Prepare).version == 0  # it beats, so it is tried again


def test_who_keeps_failing_rests_longer_each_time() -> None:
    r = roster()
    n, now, rests = only(join(r, "a"), Prepare).number, 0.0, []
    for _ in range(5):
        r.receive(b"a", "failed", {"number": n, "version": -1, "reason": "disk full"}, now)
        failed = now
        while not (
            again := [x for x in r.receive(b"a", "beat", {"version": -1, "state": ""}, now) if isinstance(x, Prepare)]
        ):
            now += 0.05
        rests.append(round(now - failed, 1))
        n = again[0].number
    assert rests == [0.2, 0.5, 1.0, 2.0, 2.0] or rests == [0.3, 0.5, 1.0, 2.0, 2.0]


def test_where_snapshots_are_files_the_one_after_a_file_goes_over_the_socket() -> None:
    r = roster()
    r.snapshot = "file"
    ways, now = [], 0.0
    prepare = only(join(r, "a"), Prepare)
    for _ in range(4):
        ways.append(prepare.transport)
        r.receive(b"a", "failed", {"number": prepare.number, "version": -1, "reason": "no"}, now)
        now = r.members["a"].deadline
        r.members["a"].heard = now
        prepare = only(r.tick(now), Prepare)
    assert ways == ["file", "snapshot", "file", "snapshot"]
    deliver(r, prepare, now)
    assert only(publish(r, 1, now), Prepare).transport == "gloo"


def test_who_never_sees_the_files_gets_everything_over_the_socket() -> None:
    r = roster()
    r.transport = r.snapshot = "file"
    ways, now, actions = [], 0.0, join(r, "a")
    for version in range(1, 6):
        while (prepare := only(actions, Prepare)).transport == "file":
            ways.append("file")
            r.receive(b"a", "failed", {"number": prepare.number, "version": version - 2, "reason": "no"}, now)
            now = r.members["a"].deadline
            r.members["a"].heard = now
            actions = r.tick(now)
        ways.append("socket")
        deliver(r, prepare, now)
        actions = publish(r, version, now)
    assert ways == [*["file", "socket"] * 3, "socket", "socket"]


def test_a_silent_member_is_left_out_and_greeted_again() -> None:
    r = roster()
    n = only(join(r, "a"), Prepare).number
    r.receive(b"a", "prepared", {"number": n}, 0.0)
    actions = r.tick(2.1)
    assert End(n, staged=False) in actions and "silent for 2.1 s" in actions[-1].text
    assert not r.members and r.tick(9.0) == []
    assert only(r.receive(b"a", "beat", {"version": -1, "state": ""}, 9.1), Send).op == "refused"
    assert only(join(r, "a", now=9.2), Prepare).number > n


def test_a_new_incarnation_replaces_the_old_one() -> None:
    r = roster()
    n = only(join(r, "a"), Prepare).number
    actions = r.receive(b"a2", "hello", hello("a", incarnation="2"), 0.1)
    assert End(n, staged=False) in actions
    assert [m.peer for m in r.members.values()] == [b"a2"]
    assert only(actions, Prepare).peer == b"a2"


def test_late_and_foreign_messages_change_nothing() -> None:
    r = roster()
    n = only(join(r, "a"), Prepare).number
    before = repr(r)
    for op, fields in (
        ("prepared", {"number": n + 7}),
        ("staged", {"number": n, "digest": 100}),  # not asked for yet
        ("held", {"number": n, "version": -1, "pause_s": 0.0, "difference": -1.0}),
        ("failed", {"number": n - 1, "version": -1, "reason": ""}),
    ):
        assert r.receive(b"a", op, fields, 0.0) == []
    assert repr(r) == before
    refused = only(r.receive(b"x", "hello", hello("x", run="other"), 0.0), Send)
    assert (refused.op, refused.fields["reason"]) == ("refused", "other_run")


def test_an_engine_whose_load_was_torn_holds_nothing_and_is_sent_the_version_again() -> None:
    r = roster(4)
    n = only(join(r, "a", 3), Prepare).number
    r.receive(b"a", "prepared", {"number": n}, 0.0)
    r.torn(n, "bucket 3: broke", 0.1)  # seen here first
    assert r.members["a"].version == 3
    r.receive(b"a", "failed", {"number": n, "version": -1, "reason": "torn"}, 0.2)
    assert r.members["a"].version == -1
    assert only(r.tick(1.0), Prepare).version == 4


def test_a_wrong_digest_is_not_swapped_in() -> None:
    r = roster()
    n = only(join(r, "a"), Prepare).number
    r.receive(b"a", "prepared", {"number": n}, 0.0)
    actions = r.receive(b"a", "staged", {"number": n, "digest": 5}, 0.1)
    assert [a.op for a in actions if isinstance(a, Send)] == ["abort"]


def test_when_a_load_is_to_be_proven() -> None:
    r = roster()
    r.proves, r.canary_every = True, 3
    prepare, seen = only(join(r, "a"), Prepare), []
    for version in range(1, 9):
        n = prepare.number
        start = only(r.receive(b"a", "prepared", {"number": n}, 0.0), Start)
        swap = only(r.receive(b"a", "staged", {"number": n, "digest": 100 + version - 1}, 0.0), Swap)
        assert start.prove == swap.prove
        seen.append(swap.prove)
        if version == 6:  # a fault: the load after it is proven
            r.receive(b"a", "failed", {"number": n, "version": r.members["a"].version, "reason": "broke"}, 0.0)
            publish(r, version, 0.0)
            prepare = only(r.tick(1.0 + 0.3), Prepare)
            continue
        held = {"number": n, "version": version - 1, "pause_s": 0.0, "difference": 1e-6}
        r.receive(b"a", "held", held, 0.0)
        prepare = only(publish(r, version, 0.0), Prepare)
    assert seen == [True, False, False, True, False, False, True, False]


def test_who_computes_something_else_gets_it_again_and_is_then_sent_away() -> None:
    r, now = roster(), 0.0
    r.proves = True
    prepare = only(join(r, "a"), Prepare)
    for disproofs in (1, 2, 3):
        n = prepare.number
        r.receive(b"a", "prepared", {"number": n}, now)
        assert only(r.receive(b"a", "staged", {"number": n, "digest": 100}, now), Swap).prove
        fault = {"number": n, "version": 0, "difference": 0.7, "reason": "canary: 0.7"}
        actions = r.receive(b"a", "disproved", fault, now)
        if disproofs < 3:
            assert r.members["a"].version == -1 and "canary: 0.7" in only(actions, Note).text
            now += 1.0
            prepare = only(r.receive(b"a", "beat", {"version": -1, "state": ""}, now), Prepare)
    assert not r.members
    refused = next(a for a in actions if isinstance(a, Send) and a.op == "refused")
    assert refused.fields == {"re": "held", "reason": "disproved", "detail": "after 3 loads: canary: 0.7"}


def test_a_fenced_learner_sends_nothing_more() -> None:
    r = roster()
    join(r, "a", 0)
    r.receive(b"a", "fenced", {"epoch": 4}, 0.1)
    assert r.fenced_by == 4
    assert publish(r, 1, 0.2) == []


def test_whatever_happens_everybody_who_lives_holds_the_newest_in_the_end() -> None:
    """Random messages, faults and publications, then quiet: nobody is left behind, nothing leaks."""
    for seed in range(200):
        rng = random.Random(seed)
        r, now, open_transfers = roster(), 0.0, set()
        r.proves = bool(seed % 2)
        names = ["a", "b", "c"]

        def note(actions: list[Any], opened: set[int] = open_transfers) -> list[Prepare]:
            opened |= {a.number for a in actions if isinstance(a, Prepare)}
            opened -= {a.number for a in actions if isinstance(a, End)}
            return [a for a in actions if isinstance(a, Prepare)]

        for _ in range(60):
            now += rng.random() * 0.5
            name = rng.choice(names)
            m = r.members.get(name)
            number = m.number if m and rng.random() < 0.8 else rng.randrange(9)
            event = rng.choice(
                [
                    "hello",
                    "beat",
                    "prepared",
                    "sent",
                    "staged",
                    "held",
                    "failed",
                    "torn",
                    "publish",
                    "tick",
                    "leave",
                    "disproved",
                ]
            )
            if event == "hello":
                note(join(r, name, m.version if m else -1, now))
            elif event == "publish":
                note(publish(r, r.version + 1, now))
            elif event == "tick":
                note(r.tick(now))
            elif event in ("sent", "torn"):
                note(r.sent(number, now) if event == "sent" else r.torn(number, "broke", now))
            else:
                fields = {
                    "number": number,
                    "version": -1,
                    "pause_s": 0.0,
                    "reason": "x",
                    "state": "",
                    "difference": 0.5,
                }
                fields["digest"] = r.digests.get(m.sending, 0) if m else 0
                note(r.receive(name.encode(), event, fields, now))
        for m in list(r.members.values()):  # each stream of ours ends one way or the other
            note(r.torn(m.number, "broke", now))
        for _ in range(40):  # quiet: everybody says hello and does as told
            now += 0.3
            for name in names:
                todo = note(join(r, name, r.members[name].version if name in r.members else -1, now)) + note(
                    r.tick(now)
                )
                while todo:
                    prepare = todo.pop()
                    number, peer = prepare.number, prepare.peer
                    note(r.receive(peer, "prepared", {"number": number}, now))
                    note(r.receive(peer, "staged", {"number": number, "digest": 100 + prepare.version}, now))
                    held = {"number": number, "version": prepare.version, "pause_s": 0.0, "difference": 0.0}
                    todo += note(r.receive(peer, "held", held, now))
        assert [m.version for m in r.members.values()] == [r.version] * 3, seed
        assert not open_transfers, seed


def test_a_member_that_trickles_is_given_up_as_a_whole() -> None:
    r = roster()
    n = only(join(r, "a"), Prepare).number
    r.receive(b"a", "prepared", {"number": n}, 0.0)
    for i in range(1, 10):  # each bucket comes in time, and it is heard of
        r.receive(b"a", "beat", {"version": -1, "state": ""}, TIMEOUT_S * i)
        assert not [a for a in r.tick(TIMEOUT_S * i) if isinstance(a, End)]
    assert r.next_due() <= 10 * TIMEOUT_S
    r.receive(b"a", "beat", {"version": -1, "state": ""}, 10 * TIMEOUT_S)
    assert only(r.tick(10 * TIMEOUT_S), End) == End(n, staged=False) and r.members["a"].state == "resting"


def test_the_slowest_gives_way_when_memory_is_needed_but_never_the_newest_version() -> None:
    r = roster(0)
    numbers = {"slow": only(join(r, "slow"), Prepare).number}
    publish(r, 1, 1.0)
    numbers["later"] = only(join(r, "later"), Prepare).number
    publish(r, 2, 2.0)
    join(r, "latest")
    assert only(r.make_room(2.5), End) == End(numbers["slow"], staged=False)
    assert only(r.make_room(2.5), End) == End(numbers["later"], staged=False)
    assert r.make_room(2.5) == []
