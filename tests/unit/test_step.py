"""The learner's step among simulated neighbours."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.config import Config
from common.errors import CheckpointError, FencedError, LedgerError, LeewayError, Stopped, TrainingError
from common.metric_table import declared
from common.metrics import MetricsWriter, read_metrics
from common.summary import Summary
from common.wire import Sample
from learner import ending, estimates, report, resume
from learner.ahead import Ahead, can_be_mended
from learner.batch import make_batch
from learner.estimates import StartOfStep, make_kl_controller, make_targets
from learner.initial import load_tokenizer
from learner.loop import Learner
from learner.lora import whole
from learner.models import load_models
from learner.served import PublishedWeights, weights_digest
from tests.learner_parts import (
    SimulatedFeed,
    SimulatedWriter,
    alone,
    make_config,
    make_groups,
    make_learner,
    make_sample,
)  # fmt: skip

CORRECTION = "algorithm.rollout_correction"


@pytest.fixture
def learner_of(weights: Path, tmp_path: Path) -> Callable[..., Learner]:
    """Make a learner that was attached and resumed; its feed makes groups at random unless given."""

    def make(config: Config, feed: SimulatedFeed | None = None, **changes: Any) -> Learner:
        feed = feed or SimulatedFeed(lambda step, version: make_groups(config, step, version=version))
        run_dir = tmp_path / changes.pop("folder", f"run-{id(feed)}")
        learner = make_learner(config, load_models(config, weights, alone()), feed, run_dir, **changes)
        resume.resume(learner, feed.attach())
        return learner

    return make


def _weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {n: p.clone() for n, p in PublishedWeights(learner.models.actor.module, dtype="float32")}


def _distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max((a[n] - b[n]).detach().abs().max().item() for n in a)


def _loss(
    logprobs: torch.Tensor, anchor: torch.Tensor, ref: torch.Tensor, advantage: float, weights: torch.Tensor
) -> torch.Tensor:
    """Clipped, weighted surrogate plus 0.001 · k3, summed over the tokens of one response."""
    ratio = (logprobs - anchor).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    difference = ref - logprobs
    return (-weights * surrogate + 0.001 * (difference.exp() - difference - 1)).sum()


def test_a_step_is_what_a_plain_loop_over_samples_computes(weights: Path, learner_of: Callable[..., Learner]) -> None:
    """Two mini-batches of two groups, one response at a time, no packing, no sharding.

    A large ε: Adam divides by the root of a square, which blows up the rounding of small gradients.
    """
    learner = learner_of(make_config("actor.optim.eps=1e-3"))
    samples = make_groups(learner.config, 1)
    assert learner.step()

    lm = AutoModelForCausalLM.from_pretrained(weights)

    def logprobs(s: Sample) -> torch.Tensor:
        ids = torch.from_numpy(np.concatenate([s.prompt_ids, s.response_ids]).astype(np.int64))
        logits = lm(input_ids=ids[None]).logits[0]
        return logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[len(s.prompt_ids) - 1 :, 0]

    with torch.no_grad():
        start = [logprobs(s) for s in samples]
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3, weight_decay=0.01, eps=1e-3)
    for rows in (range(8), range(8, 16)):
        loss = torch.zeros(())
        for i in rows:
            s = samples[i]
            scores = torch.tensor([x.reward for x in samples if x.group == s.group])
            advantage = (s.reward - scores.mean()) / (scores.std() + 1e-6)
            ratios = (start[i] - torch.from_numpy(s.behavior_logprobs)).exp().clamp(max=2)
            loss = loss + _loss(logprobs(s), start[i], start[i], float(advantage), ratios)
        (loss / sum(len(samples[i].response_ids) for i in rows)).backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert _distance(_weights(learner), dict(AutoModelForCausalLM.from_pretrained(weights).named_parameters())) > 0
    assert _distance(_weights(learner), dict(lm.named_parameters())) < 1e-7


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_how_rows_fall_on_micro_batches_changes_nothing(learner_of: Callable[..., Learner], mode: str) -> None:
    """One update; Adam's first moment is a tenth of its gradient."""
    results = []
    budget = "actor.ppo_max_token_len_per_gpu"
    for split in (f"{budget}=24", f"{budget}=4096", "actor.use_dynamic_bsz=false"):
        learner = learner_of(
            make_config(split, f"actor.loss_agg_mode={mode}", "actor.entropy_coeff=0.01", "actor.ppo_mini_batch_size=4")
        )
        learner.step()
        actor = learner.models.actor
        gradients = [whole(actor.optimizer.state[p]["exp_avg"]).clone() for p in actor.parameters]
        results.append((gradients, learner.writer.lines[1]))
    for gradients, line in results[1:]:
        for one, other in zip(gradients, results[0][0], strict=True):
            assert (one - other).abs().max() <= 1e-5 * other.abs().max()
        for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/ppo_kl", "actor/entropy"):
            assert line[name] == pytest.approx(results[0][1][name], abs=1e-5), name


def test_a_step_makes_a_version_publishes_it_and_writes_declared_metrics(learner_of: Callable[..., Learner]) -> None:
    learner = learner_of(make_config("weights.publish_every=2", "trainer.save_freq=2"))
    learner.publish(always=True)
    for _ in range(4):
        assert learner.step()
    assert learner.progress.version == 4
    assert learner.publisher.versions == [0, 2, 4]
    assert learner.feed.checkpoints == [0, 2, 4]
    assert [r.digest for r in learner.feed.step_rows][-1] == weights_digest(learner.models.actor.module)
    assert learner.feed.step_rows[0].settings["actor.optim.lr"] == 1e-3
    line = learner.writer.lines[4]
    assert [name for name in line if declared(name) is None] == []
    assert line["training/global_step"] == 4
    assert (line["actor/lr"], line["actor/kl_coef"]) == (pytest.approx(1e-3), pytest.approx(0.001))
    assert line["staleness/max"] == 0
    assert line["rollout_corr/num_same_version_tokens"] == line["perf/num_response_tokens"]
    for phase in ("claim", "fetch", "old_log_prob", "ref", "adv", "update_actor", "ack", "publish", "save", "step"):
        assert line[f"timing_s/{phase}"] >= 0


@pytest.mark.parametrize(
    "options",
    [
        ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-3"),
        ("algorithm.adv_estimator=dr_grpo",),
        ("algorithm.adv_estimator=rloo", "actor.policy_loss.loss_mode=gspo"),
        ("algorithm.adv_estimator=reinforce_plus_plus", "actor.policy_loss.loss_mode=cispo"),
        ("algorithm.proximal=bypass", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"),
        ("algorithm.proximal=loglinear", "actor.use_kl_loss=false"),
        (f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=1.2"),
        (f"{CORRECTION}.rollout_is=null", "reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=4"),
    ],
    ids=lambda o: o[0].rpartition(".")[2],
)  # fmt: skip
def test_every_estimator_and_proximal_policy_makes_a_finite_step(
    learner_of: Callable[..., Learner], options: tuple[str, ...]
) -> None:
    config = make_config(*options)
    learner = learner_of(config, SimulatedFeed(lambda step, version: make_groups(config, step, version=0)))
    before = _weights(learner)
    for _ in range(2):
        learner.step()
    assert learner.progress.version == 2
    assert 0 < _distance(before, _weights(learner)) < 0.1
    assert [n for n, v in learner.writer.lines[2].items() if not np.isfinite(v) or declared(n) is None] == []


def test_the_critic_learns_alone_in_its_warm_up(learner_of: Callable[..., Learner]) -> None:
    learner = learner_of(make_config("algorithm.adv_estimator=gae", "critic.warmup_steps=1", "critic.optim.lr=1e-3"))
    before = weights_digest(learner.models.actor.module), weights_digest(learner.models.critic.module)
    learner.step()
    assert learner.progress.version == 1
    assert weights_digest(learner.models.actor.module) == before[0]
    assert weights_digest(learner.models.critic.module) != before[1]
    learner.step()
    assert weights_digest(learner.models.actor.module) != before[0]


def test_remax_trains_against_the_greedy_sample(learner_of: Callable[..., Learner]) -> None:
    config = make_config("algorithm.adv_estimator=remax", "run.max_steps=2")
    greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}

    def samples(step: int, version: int) -> list[Sample]:
        groups = make_groups(config, step, version=version)
        size = config.samples_per_group
        return [dataclasses.replace(s, sampling=greedy) if i % size == size - 1 else s for i, s in enumerate(groups)]

    learner = learner_of(config, SimulatedFeed(samples))
    before = _weights(learner)
    assert learner.run() == "max_steps reached"
    rows = config.data.train_batch_size * config.rollout.n
    assert learner.progress.samples_trained == 2 * rows and _distance(before, _weights(learner)) > 0
    batch = make_batch(samples(1, 0))
    assert batch.baselines is not None
    zeros = torch.zeros_like(batch.behavior_logprobs)
    targets = _targets(config, samples(1, 0), zeros)
    assert torch.equal(targets.advantages[:, 0], batch.scores - batch.baselines)


# ---------------------------------------------------------------- masks
def _targets(config: Config, samples: list[Sample], proximal: torch.Tensor) -> estimates.Targets:
    batch = make_batch(samples)
    start = StartOfStep(proximal, None, None, torch.zeros_like(proximal))
    return make_targets(config, batch, start, kl_controller=make_kl_controller(config), step=1, young=batch.mask)[0]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_a_rejected_last_token_does_not_take_the_score_with_it(estimator: str) -> None:
    config = make_config(
        f"algorithm.adv_estimator={estimator}", "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=2",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, 0, i, response_tokens=4, reward=float(i == 0)) for i in range(3)]
    behavior = make_batch(samples).behavior_logprobs
    plain = _targets(config, samples, behavior.clone())
    drifted = behavior.clone()
    drifted[0, 3] += 3  # e³ is outside
    rejected = _targets(config, samples, drifted)
    assert rejected.live.tolist() == [[True, True, True, False], [True] * 4, [True] * 4]
    assert torch.equal(rejected.advantages[rejected.live], plain.advantages[rejected.live])
    assert rejected.advantages[0, 3] == 0


def test_a_row_that_is_rejected_whole_leaves_its_group() -> None:
    config = make_config(
        "algorithm.rollout_correction.rollout_rs=seq_mean_k1", "algorithm.rollout_correction.rollout_rs_threshold=2"
    )
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, 0, i, response_tokens=3, reward=r) for i, r in enumerate((1.0, 0.0, 100.0))]
    proximal = make_batch(samples).behavior_logprobs.clone()
    proximal[2] += 5
    advantages = _targets(config, samples, proximal).advantages
    two = _targets(config, samples[:2], proximal[:2]).advantages
    assert torch.equal(advantages[:2], two)
    assert advantages[2].tolist() == [0, 0, 0]


def test_scores_and_the_recursion_see_all_sampled_tokens() -> None:
    """GAE: the score sits on the last sampled token although that one is rejected; whitening is over the live ones."""
    config = make_config(
        "algorithm.adv_estimator=gae", "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=2",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, i, 0, response_tokens=3, reward=float(i)) for i in range(2)]
    proximal = make_batch(samples).behavior_logprobs.clone()
    proximal[1, 2] += 5
    t = _targets(config, samples, proximal)
    assert t.returns.tolist() == [[0, 0, 0], [1, 1, 1]]
    live = t.advantages[t.live]
    assert live.mean().item() == pytest.approx(0, abs=1e-6)
    assert live.var().item() == pytest.approx(1, abs=1e-5)
    assert t.advantages[1, 2] == 0


def test_no_kl_in_the_first_share_of_steps() -> None:
    config = make_config("algorithm.kl_warmup_ratio=0.1", "run.max_steps=100")
    assert [estimates.kl_is_on(config, s) for s in (1, 10, 11, 100)] == [False, False, True, True]


def test_truncated_sampling_is_reported(learner_of: Callable[..., Learner]) -> None:
    options = ("rollout.top_p=0.9", "rollout.allow_truncated_sampling=true")
    lines = []
    for config in (make_config(), make_config(*options)):
        learner = learner_of(config)
        learner.step()
        lines.append(learner.writer.lines[1])
    assert [line.get("rollout_corr/truncated_sampling") for line in lines] == [None, 1]
    assert declared("rollout_corr/truncated_sampling")


def test_weights_and_entropy_are_reported_over_live_tokens_and_rejection_over_young_ones() -> None:
    """Four tokens each: a row too old but for one token, one rejected whole, one that stays."""
    config = make_config(f"{CORRECTION}.rollout_rs=seq_mean_k1", f"{CORRECTION}.rollout_rs_threshold=2")
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, i, i, version=5, response_tokens=4) for i in range(3)]
    samples[0] = dataclasses.replace(samples[0], spans=((0, 0, 3), (5, 3, 4)))
    batch = make_batch(samples)
    proximal, young = batch.behavior_logprobs.clone(), batch.young(5, 2)
    proximal[1] += 3
    start = StartOfStep(proximal, torch.arange(12.0).reshape(3, 4), None, None)
    targets, _ = make_targets(
        config, batch, start, kl_controller=make_kl_controller(config), step=1, young=young
    )  # fmt: skip
    m = report.numbers(report.drift_metrics(batch, start, targets, version=5, young=young))
    assert int(targets.live.sum()) == 5
    assert m["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(4 / 9)
    assert m["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 3)
    assert (m["rollout_corr/rollout_is_max"], m["rollout_corr/rollout_is_mean"]) == pytest.approx((1, 1))
    assert m["actor/entropy"] == pytest.approx((3 + 8 + 9 + 10 + 11) / 5)
    assert m["rollout_corr/logprob_diff_mean"] == pytest.approx(4 * 3 / 9, rel=1e-5)
    ages = report.numbers(report.batch_metrics(batch, version=6, limit=2, config=config))
    assert ages["staleness/group_age_mean"] == 1


# ---------------------------------------------------------------- what must not be trained
def test_a_batch_with_a_token_older_than_the_limit_is_given_back_whole(learner_of: Callable[..., Learner]) -> None:
    config = make_config()

    def samples(step: int, version: int) -> list[Sample]:
        groups = make_groups(config, step, version=version)
        if len(feed.returned) == 0 and version == 3:
            n = len(groups[5].response_ids)
            spans = ((0, 0, 1), (3, 1, n)) if n > 1 else ((0, 0, 1),)
            groups[5] = dataclasses.replace(groups[5], spans=spans)
        return groups

    feed = SimulatedFeed(samples, limit=2)
    learner = learner_of(config, feed)
    for _ in range(3):
        learner.step()
    before = _weights(learner)
    assert learner.step()
    assert feed.returned == [(4, "stale")]
    assert (learner.progress.step, learner.progress.version, len(feed.step_rows)) == (3, 3, 3)
    assert _distance(before, _weights(learner)) == 0
    learner.step()
    assert learner.progress.version == 4


def test_a_batch_that_comes_back_too_old_ends_the_learner(learner_of: Callable[..., Learner]) -> None:
    """The broker takes it for young enough and hands it out again."""
    config = make_config()
    groups = make_groups(config, 1, version=1)
    feed = SimulatedFeed(lambda step, version: groups)
    learner = learner_of(config, feed)
    assert learner.step()
    with pytest.raises(LeewayError, match="step 1: two batches in a row"):
        learner.step()
    assert feed.returned == [(1, "stale")] * 2 and feed.step_rows == []


def test_under_mask_older_tokens_get_weight_0_and_what_they_say_does_not_matter(
    learner_of: Callable[..., Learner],
) -> None:
    config = make_config("staleness.policy=mask", "algorithm.rollout_correction.rollout_is=null", "run.max_steps=4")
    weights, lines = [], []
    for shift in (0.0, 5.0):

        def samples(step: int, version: int, shift: float = shift) -> list[Sample]:
            groups = make_groups(config, step, version=version)
            for i, s in enumerate(groups if version == 3 else ()):
                n = len(s.response_ids)
                logprobs = s.behavior_logprobs.copy()
                logprobs[: n // 2] -= shift  # of the tokens of version 0
                spans = ((0, 0, n // 2), (3, n // 2, n)) if n > 1 else ((3, 0, n),)
                groups[i] = dataclasses.replace(s, spans=spans, behavior_logprobs=logprobs)
            return groups

        learner = learner_of(config, SimulatedFeed(samples, limit=2), folder=f"shift-{shift}")
        assert learner.run() == "max_steps reached" and learner.progress.staleness_max == 0
        weights.append(_weights(learner))
        lines.append(learner.writer.lines[4])
    assert lines[0]["staleness/masked_fraction"] > 0.3 and lines[0]["staleness/max"] == 0
    assert lines[0]["actor/grad_norm"] > 0 and _distance(*weights) == 0


def test_under_mask_a_batch_without_a_young_token_is_given_back(learner_of: Callable[..., Learner]) -> None:
    config = make_config("staleness.policy=mask")
    feed = SimulatedFeed(lambda step, version: make_groups(config, step, version=0), limit=1)
    learner = learner_of(config, feed)
    for _ in range(3):
        learner.step()
    assert feed.returned == [(3, "stale")] and learner.progress.version == 2


def test_tokens_from_a_version_that_is_not_there_yet_are_given_back(learner_of: Callable[..., Learner]) -> None:
    config = make_config()
    feed = SimulatedFeed(lambda step, version: make_groups(config, step, version=version + 1))
    learner = learner_of(config, feed)
    learner.step()
    assert feed.returned == [(1, "stale")]


def _nan_at(config: Config, *, group: int, step: int | None = None) -> Callable[[int, int], list[Sample]]:
    """Batches whose `group` has a score that is not a number, in `step` or in every step."""

    def samples(now: int, version: int) -> list[Sample]:
        groups = make_groups(config, now, version=version)
        if step in (None, now):
            bad = group * config.rollout.n
            groups[bad] = dataclasses.replace(groups[bad], reward=float("nan"))
        return groups

    return samples


@pytest.mark.parametrize("group", [0, 3], ids=["first mini-batch", "second mini-batch"])
def test_a_step_that_is_not_finite_changes_nothing_and_makes_no_version(
    learner_of: Callable[..., Learner], group: int
) -> None:
    config = make_config("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive")
    feed = SimulatedFeed(_nan_at(config, step=3, group=group))
    learner = learner_of(config, feed)
    for _ in range(2):
        learner.step()
    before, published = _weights(learner), list(learner.publisher.versions)
    coefficient = learner.models.kl_controller.value
    optimizer_steps = {float(s["step"]) for s in learner.models.actor.optimizer.state.values()}
    learner.step()
    assert [(r.applied, r.digest != "") for r in feed.step_rows] == [(True, True), (True, True), (False, False)]
    assert (learner.progress.step, learner.progress.version) == (3, 2)
    assert _distance(before, _weights(learner)) < 1e-6
    assert {float(s["step"]) for s in learner.models.actor.optimizer.state.values()} == optimizer_steps
    assert learner.models.kl_controller.value == pytest.approx(coefficient)
    assert learner.publisher.versions == published
    assert learner.writer.lines[3]["training/skipped"] == 1
    learner.step()
    assert (learner.progress.step, learner.progress.version, learner.progress.skipped_in_a_row) == (4, 3, 0)


@pytest.mark.parametrize("skipped", [None, 3], ids=["all applied", "one skipped"])
def test_batches_fetched_ahead_change_nothing_but_the_wait(learner_of: Callable[..., Learner], skipped: int) -> None:
    config = make_config("run.max_steps=5", "trainer.save_freq=-1")
    rows = []
    for ahead in (False, True):
        feed = SimulatedFeed(_nan_at(config, step=skipped or 99, group=0), limit=3)
        learner = learner_of(config, feed, **({"ahead": Ahead(feed, alone())} if ahead else {}))
        assert learner.run() == "max_steps reached"
        assert feed.num_ahead == 4 * ahead  # the first is claimed in step, and none beyond the end
        rows.append([(r.applied, int(r.claim.samples[0].behavior_versions.max())) for r in feed.step_rows])
        assert learner.progress.version == 5 - (skipped is not None)
    applied = [step != skipped for step in range(1, 6)]
    versions = ([0, 1, 2, 3, 4], [0, 0, 1, 2, 3]) if skipped is None else ([0, 1, 2, 2, 3], [0, 0, 1, 2, 2])
    assert rows == [list(zip(applied, sampled, strict=True)) for sampled in versions]


def test_a_stop_ends_the_wait_for_a_batch_asked_for_ahead_and_errors_are_those_of_the_step() -> None:
    class Broker(SimulatedFeed):
        error: Exception | None = None

        def claim(self, *, step: int, version: int, num_groups: int, on_wait: Any = None) -> Any:
            on_wait("0 of 4 groups are ready")
            if self.error:
                raise self.error
            self.stop.wait(10)
            raise Stopped("the broker")

    feed, stop, reasons = Broker(lambda step, version: None), threading.Event(), []
    ahead = Ahead(feed, alone())
    ahead.order(step=2, version=1, num_groups=4)
    threading.Timer(1.5, stop.set).start()
    with pytest.raises(Stopped):
        ahead.claim(stop=stop, on_wait=reasons.append)
    assert reasons == ["0 of 4 groups are ready"] and ahead.step is None
    for error in (LedgerError("refused"), FencedError("epoch 1 is over")):
        feed.error = error
        ahead.order(step=2, version=1, num_groups=4)
        with pytest.raises(type(error)):
            ahead.claim(stop=threading.Event(), on_wait=reasons.append)
        assert ahead.step is None and can_be_mended(error) == isinstance(error, LedgerError)


def test_too_many_skipped_steps_in_a_row_end_the_run(learner_of: Callable[..., Learner]) -> None:
    config = make_config("trainer.max_nonfinite_steps=2")
    learner = learner_of(config, SimulatedFeed(_nan_at(config, group=0)))
    learner.step()
    with pytest.raises(TrainingError, match=r"2 steps in a row .* not finite"):
        learner.step()


# ---------------------------------------------------------------- stop and resume
CRITIC = (
    "algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive", "actor.optim.lr_warmup_steps=4", "actor.optim.lr_scheduler_type=cosine",
    "critic.optim.lr_scheduler_type=linear", "run.max_steps=10", "algorithm.kl_warmup_ratio=0.2",
)  # fmt: skip


@pytest.mark.parametrize("options", [(), CRITIC], ids=["grpo", "critic, KL controller, schedules"])
def test_resumed_equals_unbroken_on_recorded_rollouts(
    learner_of: Callable[..., Learner], options: tuple[str, ...]
) -> None:
    """Checkpoints at steps 3 and 6. Stopped after step 5, steps 4 and 5 redone with the settings of their rows."""
    config = make_config("trainer.save_freq=3", *options)
    feed, whole_feed = (
        SimulatedFeed(lambda step, version: make_groups(config, step, version=max(0, version - 1))) for _ in range(2)
    )

    def go_on(learner: Learner, until: int) -> None:
        while learner.progress.step < until:
            learner.control.limits = {"actor.optim.lr": 5e-4} if learner.progress.step in (3, 4) else {}
            learner.step()

    unbroken = learner_of(config, whole_feed, folder="unbroken")
    go_on(unbroken, 8)

    first = learner_of(config, feed)
    go_on(first, 5)
    writer = SimulatedWriter()
    writer.lines = {step: line for step, line in first.writer.lines.items() if step != 5}
    second = learner_of(config, feed, writer=writer)
    assert (second.progress.step, second.progress.version, second.saved) == (5, 5, 3)
    assert _distance(_weights(first), _weights(second)) < 1e-6
    assert second.publisher.versions == []
    assert (len(feed.step_rows), sorted(writer.lines)) == (5, [1, 2, 3, 4, 5])
    assert first.progress.publications == 5
    assert dataclasses.replace(second.progress, seconds=0.0) == first.progress
    second.publish(always=True)
    assert second.progress.publications == 5, "the same version again"
    go_on(second, 8)
    assert _distance(_weights(unbroken), _weights(second)) < 1e-6
    assert second.models.kl_controller.value == pytest.approx(unbroken.models.kl_controller.value)


def test_skipped_rows_are_passed_over_when_redone(learner_of: Callable[..., Learner]) -> None:
    config = make_config()
    feed = SimulatedFeed(_nan_at(config, step=2, group=0))
    first = learner_of(config, feed)
    for _ in range(3):
        first.step()
    second = learner_of(config, feed)
    assert (second.progress.step, second.progress.version, second.progress.skipped) == (3, 2, 1)
    assert _distance(_weights(first), _weights(second)) < 1e-6


def test_a_rollback_goes_on_with_the_weights_of_its_checkpoint_under_a_new_version(
    learner_of: Callable[..., Learner], weights: Path
) -> None:
    """Checkpoints of steps 2 and 4; after step 5 somebody goes back to step 2: row 6 is the rollback."""
    config = make_config("trainer.save_freq=2", "trainer.max_ckpt_to_keep=9")
    feed = SimulatedFeed(lambda step, version: make_groups(config, step, version=version))
    first = learner_of(config, feed)
    for _ in range(2):
        first.step()
    restored = _weights(first)
    for _ in range(3):
        first.step()
    feed.roll_back(step=2)
    second = learner_of(config, feed, writer=first.writer)
    assert (second.progress.step, second.progress.version, second.saved) == (6, 6, 6)
    assert _distance(restored, _weights(second)) == 0 and feed.checkpoints[-1] == 6
    assert first.writer.lines[6]["training/rolled_back_to"] == 2
    assert all(declared(name) for name in first.writer.lines[6])
    assert second.progress.samples_trained == 2 * config.data.train_batch_size * config.samples_per_group
    second.step()
    third = learner_of(config, feed)  # after a crash: from the checkpoint of the rollback
    assert (third.progress.step, third.progress.version, third.saved) == (7, 7, 6)
    assert _distance(_weights(second), _weights(third)) < 1e-6
    shutil.rmtree(third.checkpoints.folder / "step_6")
    fourth = learner_of(config, feed)  # that one is lost: from the one gone back to; step 4 stays given up
    assert (fourth.progress.step, fourth.progress.version, fourth.saved) == (7, 7, 7)
    assert _distance(_weights(second), _weights(fourth)) < 1e-6
    summary = fourth.progress.summary(ended="", window=2, dropped={}, seconds=0)
    assert "Rollbacks gave up 4 of the steps." in summary.paragraph(weights)


def test_steps_without_any_checkpoint_are_an_error_that_says_so(weights: Path, tmp_path: Path) -> None:
    config = make_config()
    feed = SimulatedFeed(lambda step, version: make_groups(config, step, version=version))
    feed.step_rows = [None]  # type: ignore[list-item]
    learner = make_learner(config, load_models(config, weights, alone()), feed, tmp_path)
    with pytest.raises(CheckpointError, match="no valid checkpoint, but the ledger has 1 steps"):
        resume.resume(learner, feed.attach())


def test_checkpoints_without_a_ledger_are_not_overwritten(learner_of: Callable[..., Learner]) -> None:
    config = make_config("trainer.save_freq=1", "trainer.max_ckpt_to_keep=1")
    first = learner_of(config, folder="kept")
    for _ in range(3):
        first.step()
    with pytest.raises(CheckpointError, match="step_3: is there, but the ledger has no steps"):
        learner_of(config, SimulatedFeed(lambda step, version: None), folder="kept")


def test_the_end_leaves_a_loadable_folder_a_checkpoint_and_a_summary(
    weights: Path, learner_of: Callable[..., Learner]
) -> None:
    config = make_config("run.max_steps=3", "weights.publish_every=2", "staleness.max=2")
    learner = learner_of(config)
    learner.publish(always=True)
    ending.finish(learner, learner.run(), tokenizer=load_tokenizer(weights, config))
    loaded = AutoModelForCausalLM.from_pretrained(learner.run_dir / "hf")
    assert _distance(_weights(learner), dict(loaded.named_parameters())) == 0
    assert learner.checkpoints.steps() == [0, 3]
    assert learner.publisher.versions == [0, 2, 3]
    assert learner.control.state == "stopped"
    summary = Summary.read(learner.run_dir)
    assert (summary.ended, summary.step, summary.version) == ("max_steps reached", 3, 3)
    assert (summary.samples_trained, summary.staleness_max, summary.publications) == (48, 0, 3)
    assert summary.hf_dir == str(learner.run_dir / "hf")
    scores = [line["critic/score/mean"] for line in learner.writer.lines.values()]
    assert (summary.score_first, summary.score_last, summary.score_window) == (scores[0], scores[-1], 1)


def test_the_last_version_is_validated_and_waited_for(weights: Path, learner_of: Callable[..., Learner]) -> None:
    class ValidatingFeed(SimulatedFeed):
        """Answers the second time it is asked."""

        def validate(self, *, step: int, version: int) -> None:
            asked.append((step, version))

        def validations(self) -> list[dict[str, Any]]:
            ready, polls[0] = asked if polls[0] % 2 else asked[:-1], polls[0] + 1
            return [{"step": s, "version": v, "score": s / 10, "num_samples": 128, "num_dropped": 0} for s, v in ready]

    asked: list[tuple[int, int]] = []
    polls = [0]
    config = make_config("run.max_steps=5", "trainer.test_freq=2", "trainer.val_before_train=true")
    learner = learner_of(config, ValidatingFeed(lambda step, version: make_groups(config, step, version=version)))
    learner.control.entries = lambda role: ["a generator"]
    learner.publish(always=True)
    ending.finish(learner, learner.run(), tokenizer=load_tokenizer(weights, config))
    assert asked == [(0, 0), (2, 2), (4, 4), (5, 5)]
    reported = {line["val/step"] for line in learner.writer.lines.values() if "val/step" in line}
    assert reported <= {0, 2, 4}
    assert len(reported) > 0
    summary = Summary.read(learner.run_dir)
    assert (summary.val_score, summary.val_version) == (0.5, 5)


class Validating(SimulatedFeed):
    """Remembers what it is asked for, also for the next learner; `score` is that of every validation."""

    def __init__(self, config: Config, score: float | None = 0.5) -> None:
        super().__init__(lambda step, version: make_groups(config, step, version=version))
        self.asked: list[int] = []
        self.score = score

    def validate(self, *, step: int, version: int) -> None:
        assert step not in self.asked
        self.asked.append(step)

    def validations_asked(self) -> list[int]:
        return list(self.asked)

    def validations(self) -> list[dict[str, Any]]:
        return [{"step": s, "version": s, "score": self.score, "num_samples": 0, "num_dropped": 1} for s in self.asked]


def test_validations_come_with_the_publication_after_they_are_due(learner_of: Callable[..., Learner]) -> None:
    """Versions 0, 3, 6, … are published, every fourth step is to be validated; a second learner knows of it."""
    config = make_config("trainer.test_freq=4", "weights.publish_every=3", "staleness.max=2")
    feed = Validating(config)
    learner = learner_of(config, feed)
    learner.publish(always=True)
    while learner.progress.step < 7:
        learner.step()
    assert feed.asked == [6]
    feed.asked.append(7)  # by a learner that died thereafter
    second = learner_of(config, feed)
    second.publish(always=True)
    while second.progress.step < 13:
        second.step()
    assert feed.asked == [6, 7, 10, 13]
    reported = {line["val/step"] for line in second.writer.lines.values() if "val/step" in line}
    assert reported >= {7, 10}


def test_held_out_prompts_that_nobody_can_score_do_not_end_the_learner(
    weights: Path, learner_of: Callable[..., Learner], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config("run.max_steps=2", "trainer.test_freq=1")
    writer = MetricsWriter(tmp_path, config)
    learner = learner_of(config, Validating(config, score=None), writer=writer)
    learner.control.entries = lambda role: ["a generator"]
    ending.finish(learner, learner.run(), tokenizer=load_tokenizer(weights, config))
    writer.close()
    rows, _ = read_metrics(tmp_path / "metrics.jsonl")
    assert rows[-1]["val/step"] == 2 and not any("val-core" in name for name in rows[-1])
    assert "no held-out prompt could be scored" in caplog.text
    assert Summary.read(learner.run_dir).val_score is None


def test_a_stop_ends_in_a_checkpoint_and_a_folder_too(weights: Path, learner_of: Callable[..., Learner]) -> None:
    config = make_config()
    learner = learner_of(config)
    learner.step()
    learner.stop.set()
    ending.finish(learner, learner.run(), tokenizer=load_tokenizer(weights, config))
    assert learner.checkpoints.steps() == [0, 1]
    assert (learner.run_dir / "hf" / "model.safetensors").exists()
    assert Summary.read(learner.run_dir).ended == "stopped"
    assert learner.control.state == "running"  # the others were not told: they may wait for another learner


def test_the_run_ends_at_its_goal_its_steps_its_data_or_a_stop(learner_of: Callable[..., Learner]) -> None:
    def perfect(config: Config) -> Callable[[int, int], list[Sample]]:
        return lambda step, version: [
            dataclasses.replace(s, reward=1.0) for s in make_groups(config, step, version=version)
        ]

    goal = make_config("run.goal_score=0.9", "run.goal_window=3", "run.max_steps=10")
    learner = learner_of(goal, SimulatedFeed(perfect(goal)))
    assert (learner.run(), learner.progress.step) == ("goal reached", 3)

    few = make_config("run.max_steps=2")
    learner = make_learner(few, learner.models, SimulatedFeed(perfect(few)), learner.run_dir)
    assert (learner.run(), learner.progress.step) == ("max_steps reached", 2)

    learner = make_learner(few, learner.models, SimulatedFeed(lambda step, version: None), learner.run_dir)
    assert (learner.run(), learner.progress.step) == ("the data ended", 0)

    learner.stop.set()
    assert learner.run() == "stopped"


def test_restoring_says_so(learner_of: Callable[..., Learner], caplog: pytest.LogCaptureFixture) -> None:
    config = make_config()
    learner = learner_of(config, SimulatedFeed(_nan_at(config, group=3)))
    with caplog.at_level(logging.INFO):
        learner.step()
    assert "step 1 skipped: actor is not finite" in caplog.text
    assert "restores the weights of version 0" in caplog.text


def test_a_folder_that_cannot_be_written_costs_no_step(
    weights: Path, learner_of: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("run.max_steps=3")
    learner = learner_of(config)
    monkeypatch.setattr("learner.files.replace_folder", _disk_full)
    with pytest.raises(LeewayError, match="the last step is in a checkpoint"):
        ending.finish(learner, learner.run(), tokenizer=load_tokenizer(weights, config))
    assert learner.checkpoints.steps()[-1] == 3 and learner.feed.checkpoints[-1] == 3


def _disk_full(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_adaptive_coefficient_rests_while_there_is_no_kl() -> None:
    config = make_config(
        "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.01, target_kl: 0.1}",
        "algorithm.kl_warmup_ratio=0.5", "run.max_steps=10",
    )  # fmt: skip
    batch = make_batch(make_groups(config, 0))
    start = StartOfStep(batch.behavior_logprobs, None, batch.behavior_logprobs, None)
    controller = make_kl_controller(config)
    estimates.token_rewards(config, batch, start, controller, step=5)
    assert controller.value == 0.01
    estimates.token_rewards(config, batch, start, controller, step=6)
    assert controller.value < 0.01
