"""The user's reward function in its killable process: kinds of public fault reports W1 … W7 and the scorer."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import psutil
import pytest

from common.config import Config
from common.errors import ConfigError, DeadlineError
from generators.rewards import ERROR, INVALID, TIMEOUT, Score
from generators.rewards.pool import RewardProcess
from generators.rewards.scorer import Scorer
from learner.batch import make_batch
from learner.estimates import StartOfStep, estimate_advantages, make_kl_controller, token_rewards
from tests.learner_parts import make_sample

LOG = logging.getLogger("test")
FUNCTION = """
    import os, sys, time

    print("printed while loading")  # must not disturb the answers

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        print("printed while scoring")
        if solution_str == "hang":
            while True:
                pass
        if solution_str == "die":
            os._exit(3)
        if solution_str == "leave":
            sys.exit(0)
        if solution_str == "raise":
            raise KeyError("first line\\nsecond line")
        if solution_str == "nothing":
            return None
        if solution_str in ("nan", "inf"):
            return float(solution_str)
        if solution_str == "text":
            return "1.0"
        if solution_str == "parts":
            return {"score": 0.5, "format": True, "length": 3, "note": "a text", "odd": float("nan")}
        if solution_str == "no score":
            return {"format": 1.0}
        return float(solution_str == ground_truth) + (extra_info or {}).get("bonus", 0)

    async def score_later(data_source, solution_str, ground_truth, extra_info):
        return 0.25

    def wrong_signature(prompt, answer):
        return 1.0

    not_a_function = 3
"""


@pytest.fixture
def function_file(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(textwrap.dedent(FUNCTION))
    return str(file)


def process(target: str, name: str = "compute_score", timeout_s: float = 0.5, start_timeout_s: float = 20.0):
    return RewardProcess(target, name, timeout_s=timeout_s, start_timeout_s=start_timeout_s, log=LOG)


def scores(target: str, responses: list[str], name: str = "compute_score", **limits: float) -> list[Score]:
    """All responses scored at once by one process."""

    async def main() -> list[Score]:
        reward = process(target, name, **limits)
        try:
            await reward.ready()
            return await asyncio.gather(*(reward.score("source", r, "right", {"bonus": 2}) for r in responses))
        finally:
            reward.close()

    return asyncio.run(main())


def test_numbers_dicts_and_coroutines(function_file):
    good, bad, parts = scores(function_file, ["right", "wrong", "parts"])
    assert (good, bad) == (Score(3.0), Score(2.0))
    assert parts == Score(0.5, {"format": 1.0, "length": 3.0})
    assert scores(function_file, ["x"], name="score_later") == [Score(0.25)]


def test_w1_a_hang_is_killed_at_the_limit_and_costs_only_its_sample(function_file):
    responses = ["right"] * 32
    responses[7] = "hang"
    start = time.monotonic()
    results = scores(function_file, responses, timeout_s=0.5)
    assert 0.5 <= time.monotonic() - start < 10
    assert (results[7].value, results[7].fault) == (None, TIMEOUT)
    assert [r for i, r in enumerate(results) if i != 7] == [Score(3.0)] * 31


def test_two_hangs_cost_two_samples(function_file):
    results = scores(function_file, ["hang", "right", "hang"], timeout_s=0.3)
    assert [r.fault for r in results] == [TIMEOUT, None, TIMEOUT]


def test_w3_c_code_that_holds_the_interpreter_is_bounded_too(tmp_path):
    file = tmp_path / "reward.py"
    # One call of C code: no signal handler of Python's can end it, in whatever thread it runs.
    file.write_text(
        "import threading\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if solution_str != 'nested': return 1.0\n"
        "    t = threading.Thread(target=lambda: 7 ** (7 ** 11)); t.start(); t.join()\n"
    )
    results = scores(str(file), ["x", "nested", "x"], timeout_s=0.5)
    assert [r.fault for r in results] == [None, TIMEOUT, None]


def test_w3_a_pathological_answer_is_bounded_by_a_kill():
    pytest.importorskip("math_verify")  # an extra
    config = Config.model_validate({"reward": {"timeout_s": 1.5}})
    row = {"data_source": "math", "reward_model": {"ground_truth": "x+1"}}

    async def main() -> list[Score]:
        scorer = Scorer(config, LOG)
        try:
            answers = ("1+x", "9^{9^{9^{9^9}}}", "1+x")
            return await asyncio.gather(*(scorer.score(row, rf"\boxed{{{a}}}") for a in answers))
        finally:
            scorer.close()

    assert [s.fault or s.value for s in asyncio.run(main())] == [1.0, TIMEOUT, 1.0]


@pytest.mark.parametrize("rounds", [8, pytest.param(200, marks=pytest.mark.soak)])
def test_w5_no_hang_however_many_threads_hold_locks_at_the_start(function_file, rounds):
    locks = [threading.Lock() for _ in range(8)]
    end = threading.Event()

    def hold(lock: threading.Lock) -> None:
        with lock:
            while not end.wait(0.001):
                LOG.debug("takes the locks of logging too, again and again")

    threads = [threading.Thread(target=hold, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    try:
        for _ in range(rounds):
            assert scores(function_file, ["right"], timeout_s=20) == [Score(3.0)]
    finally:
        end.set()
        for thread in threads:
            thread.join()


def test_w7_what_is_not_a_finite_number_is_a_fault_not_a_zero(function_file):
    results = scores(function_file, ["right", "nothing", "nan", "inf", "text", "no score"])
    assert [r.value for r in results] == [3.0, None, None, None, None, None]
    assert [r.fault for r in results] == [None] + [INVALID] * 5


def test_exceptions_and_exits_are_faults_of_their_sample(function_file, caplog):
    results = scores(function_file, ["raise", "right", "die", "leave", "raise", "right"], timeout_s=20)
    assert [r.fault for r in results] == [ERROR, None, ERROR, ERROR, ERROR, None]
    assert results[0].detail.startswith("KeyError: 'first line\\nsecond line'") and "reward.py" in results[0].detail
    assert "exit code 3" in results[2].detail
    assert sum("KeyError" in r.message for r in caplog.records) == 1  # logged once


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing", "has no such function"),
        ("not_a_function", "is a int"),
        ("wrong_signature", "is called as wrong_signature(data_source="),
    ],
)
def test_a_bad_function_is_a_config_error_at_the_start(function_file, name, says):
    with pytest.raises(ConfigError, match=r"reward\.py") as error:
        scores(function_file, [], name=name)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "no such file"), ("def broken(:", "SyntaxError"), ("import nonesuch", "nonesuch"), ("1/0", "ZeroDivision")],
)
def test_a_bad_file_is_a_config_error_at_the_start(tmp_path, content, says):
    file = tmp_path / "reward.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as error:
        scores(str(file), [])
    assert str(file) in str(error.value) and says in str(error.value)


def test_loading_has_a_deadline(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("while True: pass")
    with pytest.raises(DeadlineError, match=r"compute_score of .*reward\.py to load"):
        scores(str(file), [], start_timeout_s=1.0)


def test_a_function_that_can_no_longer_be_loaded_fails_all_calls(function_file):
    async def main() -> None:
        reward = process(function_file, timeout_s=0.3)
        await reward.ready()
        os.remove(function_file)
        calls = [reward.score("source", r, "right", None) for r in ("hang", "right")]
        assert (await calls[0]).fault == TIMEOUT
        for call in (calls[1], reward.score("source", "right", "right", None)):
            with pytest.raises(ConfigError, match="no such file"):
                await call
        reward.close()

    asyncio.run(main())


def test_a_file_can_import_its_neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 0.75")
    (tmp_path / "reward.py").write_text("from neighbour import VALUE\ndef compute_score(**call): return VALUE")
    assert scores(str(tmp_path / "reward.py"), ["x"]) == [Score(0.75)]


def test_the_process_dies_with_its_parent_even_while_it_hangs(function_file):
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent("""
            import asyncio, logging, sys
            from generators.rewards.pool import RewardProcess
            async def main():
                r = RewardProcess(sys.argv[1], "compute_score", timeout_s=60, start_timeout_s=60, log=logging.root)
                await r.ready()
                call = r.score("source", "hang", "", None)
                await asyncio.sleep(0)  # sent
                print(r.pid, flush=True)
                await call
            asyncio.run(main())
        """), function_file], stdout=subprocess.PIPE,
    )  # fmt: skip
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    child.wait(10)
    assert not child.is_running()


def test_close_leaves_no_process(function_file):
    async def main() -> psutil.Process:
        reward = process(function_file, timeout_s=60)
        await reward.ready()
        call = reward.score("source", "hang", "", None)
        child = psutil.Process(reward.pid)
        reward.close()
        assert call.cancelled()
        return child

    assert not asyncio.run(main()).is_running()


# ---------------------------------------------------------------- the scorer
def test_the_users_function_comes_before_the_built_in_ones(function_file):
    config = Config.model_validate({"reward": {"custom_function": {"path": function_file}}})
    row = {"data_source": "reverse_digits", "reward_model": {"ground_truth": "12"}, "extra_info": {"bonus": 3}}

    async def main() -> tuple[Score, Score]:
        ours, builtin = await Scorer.start(config, LOG), await Scorer.start(Config(), LOG)
        try:
            return await ours.score(row, "12"), await builtin.score(row, "12")
        finally:
            ours.close()

    assert asyncio.run(main()) == (Score(4.0), Score(1.0))


def test_rows_that_cannot_be_scored_are_named():
    scorer = Scorer(Config(), LOG)
    row = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "none"}}
    assert scorer.row_fault(row | {"reward_model": {"ground_truth": 7}}) is None
    reason, sentence = scorer.row_fault(row) or ("", "")
    assert reason == "bad_reference" and "'none'" in sentence
    reason, sentence = scorer.row_fault(row | {"data_source": "acme/secret"}) or ("", "")
    assert reason == "unknown_data_source" and "reward.custom_function.path" in sentence


def test_the_overlong_penalty_is_taken_once_and_is_no_part_of_the_score():
    """From the response to the reward of its last token: a right answer of 8 of 10 tokens, in a buffer of 4."""
    options = {"data": {"max_response_length": 10}, "reward": {"overlong_buffer": {"enable": True, "len": 4}}}
    config = Config.model_validate(options | {"algorithm": {"adv_estimator": "remax"}})
    row = {"data_source": "reverse_digits", "reward_model": {"ground_truth": "12"}}
    score = asyncio.run(Scorer(config, LOG).score(row, "12"))
    assert score == Score(1.0)
    rng, greedy = np.random.default_rng(0), {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
    batch = make_batch(
        [
            make_sample(rng, 0, 0, response_tokens=8, reward=score.value),
            make_sample(rng, 0, 1, response_tokens=10, reward=score.value, sampling=greedy),
        ]
    )
    assert batch.scores.tolist() == [1.0]
    rewards, _ = token_rewards(config, batch, StartOfStep(None, None, None, None), make_kl_controller(config), 1)
    assert rewards.tolist() == [[0.0] * 7 + [0.5]]
    advantages, _ = estimate_advantages(config, batch, rewards, batch.mask, None)
    assert advantages.tolist() == [[0.5] * 8], "the greedy response pays for its own length: 1 − 1"
