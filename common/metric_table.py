"""Every metric: ``name pattern: (unit, meaning)``. ``docs/metrics.md`` is made from it.

verl's names where verl has the metric. In a pattern ``{a,b}`` is one of several words and ``<x>``
any one part of a name. Unit ``1``: a plain number or a share.
"""

from __future__ import annotations

import re

_STATS = "{mean,max,min}"
_SPREAD = "{mean,std,max,min}"

METRICS: dict[str, tuple[str, str]] = {
    # ---------------------------------------------------------------- progress
    "training/global_step": ("steps", "Rows of `steps` so far, skipped ones included."),
    "training/epoch": ("1", "Passes over the prompts that were begun (by leases, ahead of training)."),
    "training/version": ("versions", "v: training steps applied, plus one per rollback."),
    "training/skipped_steps": ("steps", "Steps skipped so far because a loss or gradient was not finite."),
    "training/rolled_back_to": ("steps", "On the line of a rollback: step of the checkpoint that it went back to."),
    "training/skipped": ("1", "1 if this step was skipped."),
    "training/samples_trained": ("samples", "Samples trained so far."),
    "training/tokens_trained": ("tokens", "Response tokens with loss weight so far."),
    "training/goal_mean": ("1", "Mean of `critic/score/mean` over the last `run.goal_window` steps."),
    "replay/num_equal_steps": ("steps", "Replayed steps whose weights had the recorded digest (`replay.mode=exact`)."),
    # ---------------------------------------------------------------- scores, advantages
    f"critic/score/{_STATS}": ("1", "Score of the samples as the reward function gave it."),
    f"critic/rewards/{_STATS}": ("1", "Score after overlong penalty and KL in the reward."),
    f"critic/advantages/{_STATS}": ("1", "Advantage of the live tokens."),
    f"critic/returns/{_STATS}": ("1", "Return of the live tokens (GAE)."),
    f"critic/values/{_STATS}": ("1", "Value predicted at the live tokens (GAE)."),
    "critic/vf_explained_var": ("1", "1 − Var(return − value) / Var(return)."),
    "critic/vf_loss": ("1", "Value loss, mean over the updates of the step."),
    "critic/vf_clipfrac": ("1", "Share of tokens whose value update was clipped."),
    "critic/vpred_mean": ("1", "Mean predicted value during the updates."),
    "critic/grad_norm": ("1", "Norm of the critic's gradient before clipping, mean over the updates."),
    "critic/lr": ("1", "The critic's learning rate."),
    "critic/groups_without_signal": ("1", "Share of groups whose samples all scored the same."),
    f"reward_parts/<part>/{_STATS}": ("1", "A part of the score, as the reward function named it."),
    # ---------------------------------------------------------------- lengths
    f"response_length/{_STATS}": ("tokens", "Response length, before any mask."),
    "response_length/clip_ratio": ("1", "Share of responses that reached `data.max_response_length`."),
    f"prompt_length/{_STATS}": ("tokens", "Prompt length."),
    "prompt_length/clip_ratio": ("1", "Share of prompts of `data.max_prompt_length`."),
    # ---------------------------------------------------------------- policy updates
    "actor/loss": ("1", "Whole loss of the policy, mean over the updates of the step."),
    "actor/pg_loss": ("1", "Policy loss, mean over the updates of the step."),
    "actor/pg_clipfrac": ("1", "Share of live tokens where PPO's clip acted."),
    "actor/pg_clipfrac_lower": ("1", "Share of live tokens where the dual clip acted."),
    "actor/ppo_kl": ("nats", "Mean of log π_prox − log π_θ over the live tokens."),
    "actor/entropy": ("nats", "Mean entropy of the policy at the live tokens."),
    "actor/entropy_loss": ("nats", "The same as it entered the loss."),
    "actor/kl_loss": ("nats", "KL to the reference in the loss."),
    "actor/kl_coef": ("1", "Coefficient of the KL in the loss."),
    "actor/reward_kl_penalty": ("nats", "KL to the reference in the reward."),
    "actor/reward_kl_penalty_coeff": ("1", "Coefficient of the KL in the reward."),
    "actor/grad_norm": ("1", "Norm of the policy's gradient before clipping, mean over the updates."),
    "actor/grad_norm_max": ("1", "The largest of them in this step."),
    "actor/lr": ("1", "The policy's learning rate."),
    "actor/num_updates": ("1", "Optimizer updates of this step."),
    # ---------------------------------------------------------------- off-policy correction
    "rollout_corr/logprob_diff_max": (
        "nats",
        "Largest |learner − engine| log-prob over tokens sampled by exactly the step's version, before its first "
        "mini-batch.",
    ),
    "rollout_corr/logprob_diff_mean": ("nats", "Mean of the same."),
    "rollout_corr/num_same_version_tokens": ("tokens", "Number of tokens these two are over."),
    f"rollout_corr/rollout_is_{_SPREAD}": ("1", "Importance weight π_prox/μ of the live tokens, after truncation."),
    "rollout_corr/rollout_is_eff_sample_size": ("1", "(Σw)² / (N Σw²)."),
    "rollout_corr/rollout_rs_masked_fraction": (
        "1",
        "Share of tokens, of those that are young enough, that rejection masked.",
    ),
    "rollout_corr/rollout_rs_seq_masked_fraction": ("1", "Share of rows that rejection left without a live token."),
    "rollout_corr/truncated_sampling": (
        "1",
        "1 if `rollout.top_p` or `rollout.top_k` cut the distribution that was sampled: log-probs are those of the "
        "whole one, so weights and gradients are biased.",
    ),
    "rollout_corr/kl": ("nats", "Mean of log μ − log π_prox: KL(μ ‖ π_prox)."),
    "rollout_corr/k3_kl": ("nats", "The same by the estimator of less variance."),
    "rollout_corr/{training,rollout}_ppl": ("1", "Perplexity of the responses under π_prox / under μ."),
    "rollout_corr/{training,rollout}_log_ppl": ("nats", "Mean over rows of the log of it."),
    "rollout_corr/log_ppl_{diff,abs_diff,diff_max,diff_min}": ("nats", "Log-perplexity under π_prox minus under μ."),
    "rollout_corr/ppl_ratio": ("1", "Mean over rows of exp of that difference."),
    "rollout_corr/chi2_{token,seq}": ("1", "Mean of ρ² − 1, ρ = π_prox/μ of a token / of a row."),
    # ---------------------------------------------------------------- staleness
    "staleness/mean": ("versions", "Mean staleness of the trained tokens: version trained at − version that sampled."),
    "staleness/max": ("versions", "Largest staleness of a trained token."),
    "staleness/min": ("versions", "Smallest staleness of a trained token."),
    "staleness/limit": ("versions", "The limit in force at the claim."),
    "staleness/fresh_fraction": ("1", "Share of trained tokens with staleness 0."),
    "staleness/masked_fraction": ("1", "Share of sampled tokens that were too old and got weight 0 (policy `mask`)."),
    "staleness/mixed_samples": ("1", "Share of trained samples with two or more version spans."),
    "staleness/num_multi_version_samples": ("samples", "Their number."),
    "staleness/group_age_mean": ("versions", "Mean over groups of the staleness of their oldest trained token."),
    # ---------------------------------------------------------------- broker
    "queue/{pending,leased,ready,claimed,trained,dropped}": ("groups", "Group attempts in this state after the step."),
    "queue/dropped/<reason>": ("groups", "Group attempts dropped so far for this reason."),
    "queue/dropped_samples": ("samples", "Samples of dropped groups so far."),
    "queue/refused_samples": ("samples", "Samples refused at the door so far."),
    "queue/duplicate_samples": ("samples", "Samples that came twice so far."),
    "queue/late_samples": ("samples", "Samples that came after their lease had ended, so far."),
    "queue/faulty_samples": ("samples", "Samples with a fault (`reward_timeout`, …): their groups go on without them."),
    "queue/leased_again": ("groups", "Groups that kept samples when their lease ended early, so far."),
    "queue/exhausted_prompts": ("prompts", "Prompts given up after their last attempt, so far."),
    "queue/ready_samples": ("samples", "Samples in ready groups after the step."),
    "queue/issued": ("groups", "Group attempts issued so far."),
    "queue/untrained_bytes": ("bytes", "Payloads of the groups that are not trained yet."),
    "queue/redo_bytes": ("bytes", "Payloads of the steps since the newest checkpoint."),
    "queue/ledger_bytes": ("bytes", "Size of the ledger on disk."),
    "queue/wait_s": ("s", "Seconds the learner waited for this batch."),
    # ---------------------------------------------------------------- generators, weights
    "generator/overlap_ratio": ("1", "Share of optimizer-step seconds in which some generator sampled."),
    "generator/idle_ratio": ("1", "Share of time in which a generator had no request running, mean over generators."),
    "generator/count": ("1", "Generators in the registry."),
    "generator/tokens_per_s": ("tokens/s", "Response tokens sampled per second, all generators."),
    "generator/num_running": ("samples", "Requests running on all engines."),
    "generator/version_{min,max}": ("versions", "Lowest / highest version held by a generator."),
    "weights/version": ("versions", "Newest version that is complete in the learner's host memory."),
    "weights/stored_version": ("versions", "Newest version in RUN_DIR/weights (`weights.snapshot=file`); -1: none."),
    "weights/transfers": ("1", "Transfers to one engine completed so far."),
    "weights/failures": ("1", "Transfers to one engine that failed so far."),
    "weights/copy_out_s": ("s", "The learner's stall: copy of the weights into host buffers."),
    "weights/held_version_min": ("versions", "Lowest version held by a connected engine."),
    "weights/transfer_s": ("s", "Duration of the latest finished transfer, first byte to last."),
    "weights/pause_s": ("s", "Longest pause of an engine in the latest finished publication."),
    "weights/canary_difference": ("nats", "Difference of log-probs between engine and learner in the latest proof."),
    "weights/members": ("1", "Engines connected to the learner."),
    # ---------------------------------------------------------------- time
    "trainer/idle_ratio": ("1", "Share of the step in which the learner waited for its batch."),
    "timing_s/step": ("s", "Wall-clock time of the step, the checkpoint before it included."),
    "timing_s/{claim,fetch,old_log_prob,ref,values,adv,update_actor,update_critic,ack,publish,save}": (
        "s",
        "Part of it; `old_log_prob` is the proximal forward pass.",
    ),
    "perf/total_num_tokens": ("tokens", "Prompt and response tokens of the batch."),
    "perf/num_response_tokens": ("tokens", "Response tokens of the batch."),
    "perf/time_per_step": ("s", "As `timing_s/step`."),
    "perf/throughput": ("tokens/s", "Tokens of the batch per second of the step, per rank."),
    "perf/padding_ratio": ("1", "Tokens processed in packed rows per useful token."),
    "perf/num_micro_batches": ("1", "Forward-backward passes of this step, policy."),
    "perf/cpu_memory_used_gb": ("GB", "Resident memory of the learner."),
    "perf/max_memory_{allocated,reserved}_gb": ("GB", "Peak GPU memory of the learner."),
    # ---------------------------------------------------------------- validation, warm-up
    "val-core/<task>/reward/mean@1": (
        "1",
        "Mean score of the held-out prompts, one greedy sample each; the task is `held_out` for data files.",
    ),
    "val/version": ("versions", "Version that the latest validation was sampled with."),
    "val/step": ("steps", "Step after which it was asked for."),
    "val/num_samples": ("samples", "Held-out samples scored."),
    "warmup/steps": ("steps", "Supervised steps made before RL."),
    "warmup/score": ("1", "Sampled score at the end of the warm-up."),
    "warmup/loss": ("nats", "Supervised loss at the end of the warm-up."),
    "warmup/time_s": ("s", "Duration of the warm-up."),
}


def _compile(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\{[^}]*\}|<[^>]*>)", pattern)
    text = ""
    for part in parts:
        if part.startswith("{"):
            text += "(?:" + "|".join(re.escape(word) for word in part[1:-1].split(",")) + ")"
        elif part.startswith("<"):
            text += "[^/]+"
        else:
            text += re.escape(part)
    return re.compile(text)


_PATTERNS = [(_compile(pattern), pattern) for pattern in METRICS]


def declared(name: str) -> str | None:
    """The pattern of ``METRICS`` that declares ``name``, or None."""
    return next((pattern for regex, pattern in _PATTERNS if regex.fullmatch(name)), None)
