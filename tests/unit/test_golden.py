"""Our numbers against those of a widely used peer, recorded in float64 (`tests/golden/`)."""

import json
from pathlib import Path

import pytest
import torch

from learner.advantages import gae, grpo, reinforce_plus_plus, remax, rloo
from learner.correction import importance_weights, offpolicy_metrics, rejection_mask
from learner.kl import AdaptiveKLController, kl_penalty
from learner.losses import policy_loss, value_loss

GOLDEN = Path(__file__).parent.parent / "golden"


def cases(file, **having):
    found = [
        case
        for case in json.loads((GOLDEN / file).read_text())
        if all(case[key] == value for key, value in having.items())
    ]
    assert found, f"no case with {having} in {file}"
    return found


def tensor(numbers, requires_grad=False):
    return torch.tensor(numbers, dtype=torch.float64, requires_grad=requires_grad)


def tensors(case, *names):
    return [tensor(case[name]) for name in names]


def same(ours, theirs):
    torch.testing.assert_close(ours, tensor(theirs), rtol=1e-6, atol=1e-12)


def same_gradient(loss, trained, theirs):
    loss.backward()
    same(trained.grad, theirs)


def same_metrics(ours, theirs):
    assert {name: float(value) for name, value in ours.items()} == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("case", cases("kl.json"), ids=lambda c: f"{c['kind']}-{c['seed']}")
def test_kl(case):
    logprobs = tensor(case["logprobs"], requires_grad=True)
    ref_logprobs, mask = tensors(case, "ref_logprobs", "response_mask")
    kl = kl_penalty(logprobs, ref_logprobs, kind=case["kind"])
    same(kl.detach(), case["kl"])
    same_gradient((kl * mask).sum(), logprobs, case["grad_of_masked_sum"])


@pytest.mark.parametrize("case", cases("kl_controller.json"), ids=lambda c: c["seed"])
def test_kl_controller(case):
    names = ("init_kl_coef", "target_kl", "horizon")
    controller = AdaptiveKLController(**{name: case[name] for name in names})
    for update in case["updates"]:
        controller.update(update["current_kl"], update["n_steps"])
        assert controller.value == pytest.approx(update["coef"], rel=1e-9)


@pytest.mark.parametrize(
    "case",
    cases("advantages.json", estimator="gae"),
    ids=lambda c: f"gamma{c['gamma']}-lam{c['lam']}-{c['seed']}",
)
def test_gae(case):
    inputs = tensors(case, "token_level_rewards", "values", "response_mask")
    advantages, returns = gae(*inputs, gamma=case["gamma"], lam=case["lam"])
    same(advantages, case["advantages_whitened"])
    same(returns, case["returns"])


@pytest.mark.parametrize(
    "case",
    cases("advantages.json", estimator="grpo"),
    ids=lambda c: f"std{c['norm_adv_by_std']}-{c['seed']}",
)
def test_grpo(case):
    rewards, mask = tensors(case, "token_level_rewards", "response_mask")
    groups = torch.tensor(case["group"])
    same(grpo(rewards, mask, groups, norm_by_std=case["norm_adv_by_std"]), case["advantages"])


@pytest.mark.parametrize("case", cases("advantages.json", estimator="rloo"), ids=lambda c: c["seed"])
def test_rloo(case):
    rewards, mask = tensors(case, "token_level_rewards", "response_mask")
    same(rloo(rewards, mask, torch.tensor(case["group"])), case["advantages"])


@pytest.mark.parametrize("case", cases("advantages.json", estimator="reinforce_plus_plus"), ids=lambda c: c["seed"])
def test_reinforce_plus_plus(case):
    rewards, mask = tensors(case, "token_level_rewards", "response_mask")
    advantages, returns = reinforce_plus_plus(rewards, mask, gamma=case["gamma"])
    same(advantages, case["advantages"])
    same(returns, case["returns"])


@pytest.mark.parametrize("case", cases("advantages.json", estimator="remax"), ids=lambda c: c["seed"])
def test_remax(case):
    inputs = tensors(case, "token_level_rewards", "reward_baselines", "response_mask")
    same(remax(*inputs), case["advantages"])


@pytest.mark.parametrize("mode", ["vanilla", "gspo", "cispo"])
@pytest.mark.parametrize("seed", [0, 1])
def test_policy_loss(mode, seed):
    for case in cases("policy_loss.json", loss_mode=mode, seed=seed):
        logprobs = tensor(case["logprobs"], requires_grad=True)
        loss, metrics = policy_loss(
            logprobs,
            *tensors(case, "proximal_logprobs", "advantages", "response_mask"),
            mode=mode,
            **{k: case[k] for k in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")},
            loss_agg_mode=case["loss_agg_mode"],
            is_weights=None if case["is_weights"] is None else tensor(case["is_weights"]),
        )
        same(loss.detach(), case["loss"])
        same_gradient(loss, logprobs, case["grad"])
        same_metrics(metrics, case["metrics"])


@pytest.mark.parametrize("case", cases("value_loss.json"), ids=lambda c: f"{c['cliprange_value']}-{c['seed']}")
def test_value_loss(case):
    vpreds = tensor(case["vpreds"], requires_grad=True)
    loss, metrics = value_loss(
        vpreds,
        *tensors(case, "values", "returns", "response_mask"),
        cliprange_value=case["cliprange_value"],
    )
    same(loss.detach(), case["loss"])
    same_gradient(loss, vpreds, case["grad"])
    assert float(metrics["critic/vf_clipfrac"]) == pytest.approx(case["clipfrac"], rel=1e-6)


PAIR = ("proximal_logprobs", "behavior_logprobs", "response_mask")


@pytest.mark.parametrize(
    "case",
    cases("rollout_correction.json", kind="is_weights"),
    ids=lambda c: f"{c['level']}-{c['threshold']}-{c['seed']}",
)
def test_importance_weights(case):
    weights = importance_weights(*tensors(case, *PAIR), level=case["level"], threshold=case["threshold"])
    same(weights, case["weights"])


@pytest.mark.parametrize(
    "case",
    cases("rollout_correction.json", kind="rejection_mask"),
    ids=lambda c: f"{c['mode']}-{c['seed']}",
)
def test_rejection_mask(case):
    mask = rejection_mask(*tensors(case, *PAIR), mode=case["mode"], threshold=case["threshold"])
    assert torch.equal(mask, tensor(case["mask"]))


@pytest.mark.parametrize("case", cases("rollout_correction.json", kind="metrics"), ids=lambda c: c["seed"])
def test_offpolicy_metrics(case):
    same_metrics(offpolicy_metrics(*tensors(case, *PAIR)), case["metrics"])
