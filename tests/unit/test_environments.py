"""From rows to prompt tokens, from sampled tokens to text."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from common.config import Config
from common.errors import ConfigError
from common.wire import GENERATOR_OPS, decode, decode_sample
from generators.activity import Activity
from generators.environments import RowError, SingleTurn, Trajectory, load_environment
from generators.leases import Lease
from generators.rewards.scorer import Scorer
from generators.sampling import SampleMaker
from tests.simulated_engine import CharTokenizer, SimulatedEngine

CONFIG = Config.model_validate({"data": {"max_prompt_length": 12, "max_response_length": 6}})
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def text_of(ids):
    return "".join(map(chr, ids))


def test_without_a_chat_template_the_contents_follow_one_another():
    assert text_of(SingleTurn(CharTokenizer(), CONFIG).prompt_ids({"prompt": MESSAGES})) == "be briefhi"


def test_a_chat_template_is_used_with_the_generation_prompt():
    config = Config.model_validate({"data": {"max_prompt_length": 100}})
    environment = SingleTurn(CharTokenizer(chat_template="yes"), config)
    assert text_of(environment.prompt_ids({"prompt": MESSAGES})) == "<system>be brief<user>hi<assistant>"


@pytest.mark.parametrize(("content", "reason"), [("x" * 12, None), ("x" * 13, "prompt_too_long"), ("", "bad_prompt")])
def test_prompts_of_a_wrong_length_are_refused_by_name(content, reason):
    environment = SingleTurn(CharTokenizer(), CONFIG)
    row = {"prompt": [{"role": "user", "content": content}]}
    if reason is None:
        assert len(environment.prompt_ids(row)) == 12
    else:
        with pytest.raises(RowError) as error:
            environment.prompt_ids(row)
        assert error.value.reason == reason


def test_a_template_that_refuses_a_row_is_the_rows_fault():
    environment = SingleTurn(CharTokenizer(chat_template="yes"), CONFIG)
    with pytest.raises(RowError, match="bad_prompt: ValueError: this template knows no tools"):
        environment.prompt_ids({"prompt": [{"role": "tool", "content": "x"}]})


def test_the_reward_sees_the_response_only_without_its_end_token():
    environment = SingleTurn(CharTokenizer(), CONFIG)
    trajectory = Trajectory([*map(ord, "ok"), 1], [-0.1] * 3, [(0, 0, 3)], "stop")
    assert environment.text(trajectory) == "ok"


def test_a_single_turn_asks_for_the_longest_response_and_keeps_the_tokens():
    asked = []

    async def generate(prompt_ids, max_tokens):
        asked.append((prompt_ids, max_tokens))
        return SimpleNamespace(response_ids=[5, 1], logprobs=[-1.0, -2.0], spans=[(3, 0, 2)], finish_reason="stop")

    trajectory = asyncio.run(SingleTurn(CharTokenizer(), CONFIG).play([7, 8], {}, generate))
    assert asked == [([7, 8], 6)]
    assert trajectory == Trajectory([5, 1], [-1.0, -2.0], [(3, 0, 2)], "stop")


class ToolTurns:
    """An environment of two turns: what the tool says in between carries no loss."""

    def prompt_ids(self, row):
        return [9]

    async def play(self, prompt_ids, row, generate):
        first = await generate(prompt_ids, 6)
        tool = [50, 51]
        last = await generate([*prompt_ids, *first.response_ids, *tool], 6 - len(first.response_ids) - len(tool))
        n = len(first.response_ids)
        return Trajectory(
            [*first.response_ids, *tool, *last.response_ids], [*first.logprobs, 0.0, 0.0, *last.logprobs],
            [(3, 0, n + 2 + len(last.response_ids))], last.finish_reason, (n, 2, len(last.response_ids)),
        )  # fmt: skip

    def text(self, trajectory):
        return "12"


def test_the_seam_carries_several_turns_with_a_loss_mask():
    row = {"data_source": "reverse_digits", "reward_model": {"ground_truth": "12"}}

    async def main():
        engine = SimulatedEngine(lambda prompt, max_tokens: [7, 1], version=3)
        scorer = Scorer(CONFIG, logging.root)
        maker = SampleMaker("g", CONFIG, engine, ToolTurns(), scorer, activity := Activity(0.0))
        lease = Lease(1, 0, "train", row, [9])
        return await maker.make(lease, 0), engine, activity, lease

    frames, engine, activity, lease = asyncio.run(main())
    _, header, payload = decode(frames, GENERATOR_OPS)
    sample = decode_sample(header, payload[0])
    assert sample.response_ids.tolist() == [7, 1, 50, 51, 7, 1]
    assert sample.loss_mask.tolist() == [True, True, False, False, True, True]
    assert header["num_live_tokens"] == 4 and sample.reward == 1.0
    assert [r["prompt_ids"] for r in engine.requests] == [[9], [9, 7, 1, 50, 51]]
    assert engine.requests[1]["max_tokens"] == 2 and engine.requests[0]["id"] != engine.requests[1]["id"]
    assert (activity.tokens, lease.tokens) == (4, {0: 4})


def test_the_baseline_of_remax_is_sampled_greedily():
    config = Config.model_validate({"rollout": {"n": 2}, "algorithm": {"adv_estimator": "remax"}})
    row = {"data_source": "reverse_digits", "reward_model": {"ground_truth": "12"}}

    async def main():
        engine = SimulatedEngine(lambda prompt, max_tokens: [7, 1], version=3)
        maker = SampleMaker("g", config, engine, ToolTurns(), Scorer(config, logging.root), Activity(0.0))
        return [await maker.make(Lease(1, 0, "train", row, [9]), index) for index in range(3)]

    samples = [decode_sample(header, p[0]) for _, header, p in (decode(f, GENERATOR_OPS) for f in asyncio.run(main()))]
    assert [s.sampling["temperature"] for s in samples] == [1.0, 1.0, 0.0]


def test_a_folder_without_a_tokenizer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_environment(str(tmp_path), CONFIG)


def test_the_toy_models_own_tokenizer(tmp_path):
    from learner.toy import EOS_ID, write_toy_folder

    write_toy_folder(tmp_path)
    environment = load_environment(str(tmp_path), Config())
    ids = environment.prompt_ids({"prompt": [{"role": "user", "content": "reverse 48213="}]})
    assert len(ids) == len("reverse 48213=")
    response = environment.prompt_ids({"prompt": [{"role": "user", "content": "31284"}]})
    assert environment.text(Trajectory([*response, EOS_ID], [], [], "stop")) == "31284"
