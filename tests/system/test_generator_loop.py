"""A generator with a simulated engine against a simulated broker, over real sockets."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common.config import Config
from common.errors import ControlError, DeadlineError, EngineError
from common.tasks import get_task
from generators import generator as generator_module
from generators import link as link_module
from generators.environments import SingleTurn
from generators.generator import Generator
from generators.rewards.scorer import Scorer
from tests.simulated_engine import CharTokenizer, SimulatedBroker, SimulatedEngine

LOG = logging.getLogger("test")
EOS = 1
CONFIG = {
    "rollout": {"n": 4, "max_num_seqs": 16, "heartbeat_s": 0.05, "temperature": 0.7},
    "data": {"max_prompt_length": 20, "max_response_length": 8},
    "run": {"start_timeout_s": 30.0},
}


def row(digits: str = "12345") -> dict[str, Any]:
    made = get_task("reverse_digits").row("train", 0, seed=0)
    return made | {
        "prompt": [{"role": "user", "content": f"reverse {digits}="}],
        "reward_model": {"style": "rule", "ground_truth": digits[::-1]},
    }


def reversed_digits(prompt_ids: list[int], _max_tokens: int) -> list[int]:
    return [*prompt_ids[-2:7:-1], EOS]


class Running:
    """A generator in a thread of its own, so that the test itself is the broker."""

    def __init__(self, address: str | None, config: dict[str, Any], respond: Any, version: int) -> None:
        self.address = address
        self.desired = "running"
        self.limits: dict[str, Any] = {}
        self.states: list[tuple[str, int]] = []
        self.error: BaseException | None = None
        self._config = Config.model_validate(config)
        self._started = threading.Event()
        self._respond, self._version = respond, version
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._started.wait(10)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.stop = asyncio.Event()
        self.engine = SimulatedEngine(self._respond, version=self._version)
        self.generator = Generator(
            config=self._config, run_id="r", name="generator-x", incarnation="1", engine=self.engine,
            environment=SingleTurn(CharTokenizer(), self._config), scorer=Scorer(self._config, LOG),
            lookup_broker=lambda: self.address, log=LOG, desired=lambda: self.desired, limit=self.limits.get,
            on_state=lambda state, version: self.states.append((state, version)),
        )  # fmt: skip
        self._started.set()
        try:
            await self.generator.run(self.stop)
        except BaseException as e:
            self.error = e

    def call(self, function: Callable[[], Any]) -> None:
        """Run ``function`` in the generator's loop."""
        self.loop.call_soon_threadsafe(function)

    def set_version(self, version: int) -> None:
        def change() -> None:
            self.engine.version = version
            self.generator.version_changed(version)

        self.call(change)

    def end(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.call(self.stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def wait_for_error(self) -> BaseException:
        self._thread.join(10)
        assert self.error is not None
        return self.error


Start = Callable[..., Running]


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    simulated = SimulatedBroker()
    yield simulated
    simulated.close()


@pytest.fixture
def start(broker: SimulatedBroker) -> Iterator[Start]:
    started: list[Running] = []

    def begin(*, address: str | None = broker.address, config: Any = CONFIG, respond: Any = reversed_digits,
              version: int = 3) -> Running:  # fmt: skip
        started.append(Running(address, config, respond, version))
        return started[-1]

    yield begin
    for running in started:
        running.end()


# ---------------------------------------------------------------- leases, samples, acknowledgements
def test_a_lease_becomes_samples(broker, start):
    running = start()
    hello = broker.welcome()
    assert hello == {"run": "r", "name": "generator-x", "incarnation": "1", "version": 3}
    broker.lease(row(), 7, [0, 1, 2, 3])
    samples = broker.samples(4)
    assert [s.index for s in samples] == [0, 1, 2, 3]
    s = samples[0]
    assert s.prompt_ids.tolist() == [ord(c) for c in "reverse 12345="]
    assert s.response_ids.tolist() == [ord(c) for c in "54321"] + [EOS]
    assert s.behavior_logprobs.tolist() == [-0.5] * 6
    assert (s.reward, s.fault, s.finish_reason, s.spans) == (1.0, None, "stop", ((3, 0, 6),))
    assert s.sampling == {"temperature": 0.7, "top_p": 1.0, "top_k": -1}
    assert s.generator == "generator-x" and s.timing.keys() == {"generate_s", "reward_s"}
    requests = running.engine.requests
    assert len({r["id"] for r in requests}) == 4 and {r["max_tokens"] for r in requests} == {8}
    broker.expect("heartbeat", lambda f: f["progress"] == [] and f["stats"]["samples"] == 4)
    assert running.generator.holdings.num_unacked == 0


def test_held_out_prompts_are_answered_greedily_and_say_so(broker, start):
    running = start()
    broker.welcome()
    broker.lease(row(), 7, [0], lane="eval")
    (s,) = broker.samples(1)
    assert s.sampling == {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
    assert running.engine.requests[0]["temperature"] == 0.0


def test_samples_are_sent_again_until_they_are_acknowledged(broker, start, monkeypatch):
    monkeypatch.setattr(generator_module, "RESEND_S", 0.2)
    start()
    broker.welcome()
    broker.lease(row(), 7, [0, 1])
    first = broker.samples(2, ack=False)
    again = broker.samples(2, ack=True)  # the acknowledgement of the first was "lost"
    assert [(s.group, s.attempt, s.index, s.response_ids.tolist()) for s in first] == [
        (s.group, s.attempt, s.index, s.response_ids.tolist()) for s in again
    ]
    broker.nothing_but({"heartbeat"}, for_s=0.5)


def test_a_repeated_lease_is_worked_on_once(broker, start):
    running = start()
    broker.welcome()
    running.call(running.engine.hold)
    broker.lease(row(), 7, [0, 1])
    broker.lease(row(), 7, [0, 1, 2])  # one more sample of it
    running.call(running.engine.go_on)
    assert [s.index for s in broker.samples(3, ack=False)] == [0, 1, 2]
    broker.lease(row(), 7, [1, 2])  # made, but not acknowledged: sent again, not made again
    assert [s.index for s in broker.samples(2)] == [1, 2]
    assert len(running.engine.requests) == 3
    broker.send("acks", keys=[[7, 0, 0]])


def test_cancel_ends_the_requests_of_that_lease_only(broker, start):
    running = start()
    broker.welcome()
    running.call(running.engine.hold)
    broker.lease(row("11111"), 7, [0, 1])
    broker.lease(row("22222"), 8, [0])
    broker.expect("heartbeat", lambda f: len(f["progress"]) == 2 and f["stats"]["running"] == 3)
    broker.send("cancel", group=7, attempt=0, reason="too old")
    broker.expect("heartbeat", lambda f: f["progress"] == [[8, 0, 0]] and f["stats"]["running"] == 1)
    assert sorted(running.engine.cancelled) == ["7.0.0-1", "7.0.1-2"]
    running.call(running.engine.go_on)
    assert [s.group for s in broker.samples(1)] == [8]
    broker.nothing_but({"heartbeat"}, for_s=0.2)


def test_rows_that_cannot_be_worked_on_are_given_back_by_name(broker, start):
    start()
    broker.welcome()
    for group, bad, reason in (
        (1, row("1" * 30), "prompt_too_long"),
        (2, row() | {"data_source": "acme/secret"}, "unknown_data_source"),
        (3, row() | {"data_source": "gsm8k", "reward_model": {"ground_truth": "three"}}, "bad_reference"),
        (4, {"no": "prompt"}, "bad_row"),
    ):
        broker.lease(bad, group, [0, 1])
        returned, _ = broker.expect("give_back")
        assert returned == {"group": group, "attempt": 0, "reason": reason, "retry": False}
    broker.lease(row(), 5, [0])
    assert broker.samples(1)[0].reward == 1.0  # and it works on


def test_a_reward_that_fails_is_a_fault_of_its_sample(broker, start, monkeypatch):
    task = type(get_task("reverse_digits"))
    monkeypatch.setattr(task, "score", lambda self, text, truth, extra: 1 / 0)
    start()
    broker.welcome()
    broker.lease(row(), 7, [0])
    (s,) = broker.samples(1)
    assert (s.reward, s.fault) == (None, "reward_error")


# ---------------------------------------------------------------- masks and ends (public fault reports M1, M3)
def test_without_an_end_token_lengths_come_from_the_tokens(broker, start):
    start(respond=lambda prompt, max_tokens: [53, 52, 0])  # the last one is the padding id, sampled
    broker.welcome()
    broker.lease(row(), 7, [0])
    (s,) = broker.samples(1)
    assert s.finish_reason == "length"
    assert s.response_ids.tolist() == [53, 52, 0] and s.loss_mask.tolist() == [True] * 3


def test_the_end_token_is_trained_once_even_if_it_is_the_padding(broker, start):
    start(respond=lambda prompt, max_tokens: [53, EOS])
    broker.welcome()
    broker.lease(row(), 7, [0])
    (s,) = broker.samples(1)
    assert s.finish_reason == "stop"
    assert s.response_ids.tolist() == [53, EOS] and s.loss_mask.tolist() == [True, True]


def test_a_swap_in_mid_request_gives_two_spans(broker, start):
    running = start()
    running.engine.hold_at = 2
    broker.welcome()
    broker.lease(row(), 7, [0])
    broker.expect("heartbeat", lambda f: f["progress"] == [[7, 0, 2]])
    running.set_version(4)
    broker.expect("heartbeat", lambda f: f["version"] == 4)
    running.call(running.engine.go_on)
    (s,) = broker.samples(1)
    assert s.spans == ((3, 0, 2), (4, 2, 6))
    assert s.behavior_versions.tolist() == [3, 3, 4, 4, 4, 4]


# ---------------------------------------------------------------- heartbeats and waits
def test_without_weights_it_asks_for_nothing(broker, start):
    running = start(version=-1)
    assert broker.welcome()["version"] == -1
    beat, _ = broker.expect("heartbeat")
    assert (beat["version"], beat["capacity"]) == (-1, 0)
    _until(lambda: ("waits for the first weights of the learner", -1) in running.states)
    running.set_version(0)
    beat, _ = broker.expect("heartbeat", lambda f: f["version"] == 0)
    assert beat["capacity"] == 16 + 4  # a quarter to go on with, at least one group


def test_a_new_version_is_told_at_once(broker, start):
    running = start(config=CONFIG | {"rollout": CONFIG["rollout"] | {"heartbeat_s": 60.0}})
    broker.welcome()
    broker.expect("heartbeat", lambda f: f["version"] == 3)
    running.set_version(4)
    broker.expect("heartbeat", lambda f: f["version"] == 4, deadline_s=5)


def test_a_paused_run_asks_for_nothing_and_goes_on_later(broker, start):
    running = start()
    broker.welcome()
    broker.expect("heartbeat", lambda f: f["capacity"] == 20)
    running.desired = "paused"
    broker.expect("heartbeat", lambda f: f["capacity"] == 0)
    _until(lambda: running.states[-1][0] == "waits for the run, which is paused")
    running.desired = "running"
    broker.expect("heartbeat", lambda f: f["capacity"] == 20)


def test_the_brokers_reason_for_giving_nothing_is_named(broker, start):
    running = start()
    broker.welcome()
    broker.send("wait", reason="generator generator-x has no registry entry")
    _until(
        lambda: running.states[-1] == ("waits for leases of the broker: generator generator-x has no registry entry", 3)
    )
    broker.lease(row(), 7, [0])
    broker.samples(1)
    _until(lambda: running.states[-1] == ("waits for leases of the broker: none sent yet", 3))


def test_sampling_spans_cover_exactly_the_time_in_which_requests_ran(broker, start):
    running = start()
    broker.welcome()
    before = time.time()
    idle, _ = broker.expect("heartbeat")
    assert idle["sampling"] == [] and idle["stats"]["idle_ratio"] == 1.0
    running.call(running.engine.hold)
    broker.lease(row(), 7, [0, 1])
    beats = [broker.expect("heartbeat", lambda f: f["stats"]["running"] == 2)[0] for _ in range(4)]
    running.call(running.engine.go_on)
    broker.samples(2)
    last, _ = broker.expect("heartbeat", lambda f: f["stats"]["running"] == 0)
    spans = [span for beat in [*beats, last] for span in beat["sampling"]]
    # one span, cut at each report, without gap or overlap
    assert [a for a, _ in spans[1:]] == [b for _, b in spans[:-1]]
    assert spans[0][0] >= before and spans[-1][1] <= last["stats"]["until"]
    assert [b for _, b in spans[:4]] == [beat["stats"]["until"] for beat in beats]
    assert beats[2]["stats"]["idle_ratio"] == 0.0
    assert (last["stats"]["tokens"], last["stats"]["samples"]) == (12, 2)


# ---------------------------------------------------------------- a broker that goes and comes
def test_a_restarted_broker_at_another_address_gets_everything_again(broker, start):
    running = start()
    broker.welcome()
    broker.lease(row(), 7, [0])
    broker.samples(1, ack=False)  # stored or not: the old broker took it to its grave
    running.call(running.engine.hold)
    broker.lease(row(), 8, [0, 1])
    broker.expect("heartbeat", lambda f: f["stats"]["running"] == 2)
    other = SimulatedBroker()
    try:
        running.address = other.address
        assert other.welcome()["incarnation"] == "1"
        assert [s.group for s in other.samples(1)] == [7]
        other.expect("heartbeat", lambda f: f["progress"] == [[8, 0, 0]])  # the same lease still runs
        running.call(running.engine.go_on)
        assert [(s.group, s.index) for s in other.samples(2)] == [(8, 0), (8, 1)]
        assert len(running.engine.requests) == 3
    finally:
        other.close()


def test_a_broker_restarted_at_the_same_address_says_it_knows_us_not(broker, start):
    start()
    broker.welcome()
    broker.lease(row(), 7, [0])
    broker.samples(1, ack=False)
    broker.send("refused", re="heartbeat", reason="unknown_generator", detail="say hello")
    broker.welcome()
    assert [s.group for s in broker.samples(1)] == [7]


def test_a_silent_broker_is_asked_then_dialled_anew(broker, start, monkeypatch):
    monkeypatch.setattr(link_module, "SILENCE_S", 0.4)
    monkeypatch.setattr(link_module, "HELLO_S", 0.2)
    start()
    broker.welcome()
    first = broker.peer
    broker.expect("hello", lambda _: broker.peer == first)  # "are you there?"
    broker.expect("hello", lambda _: broker.peer != first)  # another connection: the old one may be dead
    broker.send("welcome", version=0, floor=0)
    broker.lease(row(), 7, [0])
    broker.samples(1)


def test_no_broker_in_time_is_an_error_that_names_the_address(start, broker):
    config = CONFIG | {"run": {"start_timeout_s": 0.5}}
    running = start(address="tcp://127.0.0.1:9", config=config)
    error = running.wait_for_error()
    assert isinstance(error, DeadlineError) and "the broker at tcp://127.0.0.1:9" in str(error)
    running = start(address=None, config=config)
    assert "a broker in the registry" in str(running.wait_for_error())


def test_a_broker_of_another_run_is_refused(broker, start):
    running = start()
    broker.expect("hello")
    broker.send("refused", re="hello", reason="other_run", detail="this is run q")
    error = running.wait_for_error()
    assert isinstance(error, ControlError) and "this is run q" in str(error)


# ---------------------------------------------------------------- ends
def test_a_stop_gives_leases_back_and_says_goodbye(broker, start):
    running = start()
    broker.welcome()
    broker.lease(row(), 7, [0])
    broker.samples(1, ack=False)
    running.call(running.engine.hold)
    broker.lease(row(), 8, [0, 1])
    broker.expect("heartbeat", lambda f: f["stats"]["running"] == 2)
    running.call(running.stop.set)
    returned, _ = broker.expect("give_back")
    assert returned == {"group": 8, "attempt": 0, "reason": "shutdown", "retry": True}
    beat, _ = broker.expect("heartbeat")
    assert beat["capacity"] == 0
    broker.send("acks", keys=[[7, 0, 0]])  # it waits for this, a moment
    broker.expect("bye", deadline_s=0.9)
    assert len(running.engine.cancelled) == 2


def test_a_stop_without_a_broker_is_quick(start, broker):
    running = start(address="tcp://127.0.0.1:9")
    before = time.monotonic()
    running.end()
    assert time.monotonic() - before < 0.9 and running.error is None


def test_a_dead_engine_ends_the_generator_with_its_error(broker, start):
    running = start()
    broker.welcome()
    running.call(lambda: setattr(running.engine, "error", EngineError("the engine died")))
    broker.lease(row(), 7, [0])
    assert str(running.wait_for_error()) == "the engine died"
    broker.expect("give_back", lambda f: f["reason"] == "shutdown" and f["retry"])
    broker.expect("bye")


def _until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_engine_that_makes_no_token_ends_the_generator_instead_of_using_up_leases(broker, start):
    running = start(config=CONFIG | {"ledger": {"lease_timeout_s": 0.5, "lease_limit_s": 9.0}})
    broker.welcome()
    time.sleep(0.7)  # without requests nothing is missing
    running.call(running.engine.hold)
    broker.lease(row(), 7, [0, 1])
    broker.expect("heartbeat", lambda f: f["stats"]["running"] == 2)
    broker.send("cancel", group=7, attempt=0, reason="lease_expired")
    broker.lease(row(), 8, [0, 1])
    error = running.wait_for_error()
    assert isinstance(error, EngineError) and "s, with 2 requests running; it hangs" in str(error)


def test_another_temperature_while_running_acts_from_the_next_sample_and_travels_with_it(broker, start):
    running = start()
    broker.welcome()
    running.limits["rollout.temperature"] = 0.4
    running.call(running.engine.hold)
    broker.lease(row(), 7, [0])
    broker.expect("heartbeat", lambda f: f["stats"]["running"] == 1)
    running.limits["rollout.temperature"] = 1.3  # not in the middle of a sample
    running.call(running.engine.go_on)
    assert [s.sampling["temperature"] for s in broker.samples(1)] == [0.4]
    broker.lease(row(), 8, [0])
    broker.lease(row(), 9, [0], lane="eval")
    assert sorted(s.sampling["temperature"] for s in broker.samples(2)) == [0.0, 1.3]
    assert [r["temperature"] for r in running.engine.requests] == [0.4, 1.3, 0.0]


def test_a_drained_generator_finishes_its_leases_and_ends(broker, start):
    running = start()
    broker.welcome()
    running.call(running.engine.hold)
    broker.lease(row(), 7, [0, 1])
    broker.expect("heartbeat", lambda f: f["stats"]["running"] == 2 and f["capacity"] > 0)
    running.limits["generators.drain@generator-x"] = True
    broker.expect("heartbeat", lambda f: f["capacity"] == 0)
    running.call(running.engine.go_on)
    assert len(broker.samples(2)) == 2  # acknowledged, and only then it goes
    broker.expect("bye")
    running.end()
    assert running.error is None
