"""Combinations of values that cannot work, each with its remedy; what is wrong with one value alone says its type."""

from __future__ import annotations

from collections.abc import Iterator

from common.adapters import MAX_SERVED_RANK
from common.config import MAX_GROUP_SAMPLES, Config
from common.metric_table import declared
from common.thresholds import parse_rejection

MODEL_ENDS = {"lm_head", "embed_tokens", "embed_out", "embed_in", "wte"}  # names of heads and embeddings


def combination_faults(c: Config) -> list[str]:
    return [*_rollouts(c), *_models(c), *_weights(c), *_learner(c), *_algorithm(c), *_guard(c)]


def _rollouts(c: Config) -> Iterator[str]:
    if c.samples_per_group > MAX_GROUP_SAMPLES:
        yield f"rollout.n={c.rollout.n}: a group has at most {MAX_GROUP_SAMPLES} samples; lower it"
    if c.truncates_sampling and not c.rollout.allow_truncated_sampling:
        yield (
            f"rollout.top_p={c.rollout.top_p}, rollout.top_k={c.rollout.top_k}: the learner's log-probs "
            "would not be those of the distribution sampled. Use top_p=1, top_k=-1, or accept the bias with "
            "rollout.allow_truncated_sampling=true"
        )
    if (
        c.rollout.n == 1
        and c.algorithm.adv_estimator in ("grpo", "dr_grpo", "rloo")
        and not c.algorithm.allow_single_sample_groups
    ):
        yield (
            f"rollout.n=1: {c.algorithm.adv_estimator} compares samples of one prompt; set rollout.n ≥ 2 "
            "(or algorithm.allow_single_sample_groups=true)"
        )
    if c.algorithm.filter_groups.enable and c.samples_per_group == 1:
        yield (
            "algorithm.filter_groups.enable=true: a group of one sample has no signal; "
            "set rollout.n ≥ 2, or it to false"
        )
    if c.trainer.test_freq > 0 and bool(c.data.train_files) and not c.data.val_files and not c.replay.rollouts:
        yield (
            f"trainer.test_freq={c.trainer.test_freq}: there are no held-out prompts; "
            "give data.val_files, or set it to -1"
        )
    no_prompts = not c.data.train_files and not c.data.task
    if no_prompts and c.replay.rollouts is not None and c.model.warmup.steps > 0:
        yield (
            f"model.warmup.steps={c.model.warmup.steps}: a supervised start needs data.train_files or data.task; "
            "give them, or set it to 0"
        )
    if bool(c.data.train_files) == bool(c.data.task) and not (no_prompts and c.replay.rollouts):
        yield "data.train_files: give exactly one of data.train_files and data.task"


def _models(c: Config) -> Iterator[str]:
    if bool(c.model.path) == c.model.toy:
        yield "model.path: give exactly one of model.path=FOLDER and model.toy=true"
    if c.model.attn_implementation == "varlen" and c.model.dtype == "float32":
        yield (
            "model.attn_implementation=varlen: flash attention computes in bfloat16; "
            "set model.dtype=bfloat16, or use sdpa"
        )
    for whose, tuned in (("model", c.model), ("critic", c.critic)):
        targets = [tuned.target_modules] if isinstance(tuned.target_modules, str) else tuned.target_modules
        ends = sorted({t.rsplit(".", 1)[-1] for t in targets} & MODEL_ENDS)
        if bool(tuned.lora_rank and ends):
            yield (
                f"{whose}.target_modules={tuned.target_modules}: {', '.join(ends)} is at the model's end, where an "
                "adapter can neither be merged nor served; name linear layers between the embeddings and the head, "
                "or all-linear"
            )


def _weights(c: Config) -> Iterator[str]:
    if c.weights.publish_every > c.staleness.max + 1:
        yield (
            f"weights.publish_every={c.weights.publish_every}: larger than staleness.max + 1 = {c.staleness.max + 1}; "
            "the lease gate would close for ever. Lower weights.publish_every or raise staleness.max"
        )
    if c.weights.adapters_only and c.model.lora_rank == 0:
        yield "weights.adapters_only=true: there are no adapters; set model.lora_rank, or leave it out"
    if c.weights.adapters_only and c.weights.snapshot == "file":
        yield (
            "weights.snapshot=file: its folders hold whole models, but with weights.adapters_only=true a version is "
            "adapters alone; leave one of them out"
        )
    if c.weights.adapters_only and c.model.lora_rank > MAX_SERVED_RANK:
        yield (
            f"model.lora_rank={c.model.lora_rank}: engines compute adapters of rank {MAX_SERVED_RANK} at most; lower "
            "it, or set weights.adapters_only=false"
        )
    if c.run.bind_host not in ("127.0.0.1", "localhost"):
        yield (
            f"run.bind_host={c.run.bind_host}: a public bind needs transport keys, which are not there yet; "
            "use 127.0.0.1"
        )


def _learner(c: Config) -> Iterator[str]:
    split, shard = c.actor.ulysses_sequence_parallel_size, c.actor.fsdp_config.fsdp_size
    for key, size in (("ulysses_sequence_parallel_size", split), ("fsdp_config.fsdp_size", shard)):
        if size == 0 or (size != -1 and c.trainer.nproc_per_node % size != 0):
            yield f"actor.{key}={size}: must divide trainer.nproc_per_node={c.trainer.nproc_per_node}"
    if c.ref.fsdp_config.offload_policy and c.ref.fsdp_config.param_offload:
        yield (
            "ref.fsdp_config.offload_policy=true: keeps the weights in host memory all the time; "
            "leave out param_offload"
        )
    B = c.data.train_batch_size
    for name, part in (("actor", c.actor), ("critic", c.critic)):
        mini = part.ppo_mini_batch_size
        if mini is not None and B % mini != 0:
            yield f"{name}.ppo_mini_batch_size={mini}: must divide data.train_batch_size={B}"
        if part.use_torch_compile and split > 1:
            yield (
                f"{name}.use_torch_compile=true: layers that exchange rows with other ranks are not compiled; set it "
                "to false, or actor.ulysses_sequence_parallel_size=1"
            )
        if part.fsdp_config.offload_policy and (part.fsdp_config.param_offload or part.fsdp_config.optimizer_offload):
            yield (
                f"{name}.fsdp_config.offload_policy=true: keeps weights and optimizer in host memory all the time; "
                "leave out param_offload and optimizer_offload"
            )
    for key, dynamic, budget in (
        ("actor.ppo_max_token_len_per_gpu", c.actor.use_dynamic_bsz, c.actor.ppo_max_token_len_per_gpu),
        ("actor.log_prob_max_token_len_per_gpu", c.actor.use_dynamic_bsz, c.actor.log_prob_max_token_len_per_gpu),
        ("critic.ppo_max_token_len_per_gpu", c.critic.use_dynamic_bsz, c.critic.ppo_max_token_len_per_gpu),
    ):
        if dynamic and budget is not None and budget * split < c.max_sequence_tokens:
            yield (
                f"{key}={budget}: one sequence can have data.max_prompt_length + data.max_response_length = "
                f"{c.max_sequence_tokens} tokens; "
                + (f"with actor.ulysses_sequence_parallel_size={split} " if split > 1 else "")
                + f"raise it to at least {-(-c.max_sequence_tokens // split)}"
            )


def _algorithm(c: Config) -> Iterator[str]:
    correction = c.algorithm.rollout_correction
    if correction.rollout_rs is not None:
        try:
            parse_rejection(correction.rollout_rs, correction.rollout_rs_threshold or "none given")
        except ValueError as e:
            yield (f"algorithm.rollout_correction.rollout_rs={correction.rollout_rs}: {e}")
    if c.algorithm.proximal == "bypass" and c.algorithm.rollout_correction.rollout_rs is not None:
        yield (
            "algorithm.rollout_correction.rollout_rs: with algorithm.proximal=bypass the ratio it looks at is always "
            "1, so nothing would be rejected; use algorithm.proximal=recompute, or no rejection"
        )
    if c.algorithm.proximal == "loglinear" and c.algorithm.rollout_correction.rollout_rs is not None:
        yield (
            "algorithm.rollout_correction.rollout_rs: loglinear has no proximal log-probs before the update, on which "
            "denominators and advantages of a rejection depend; use algorithm.proximal=recompute, or no rejection"
        )
    if c.algorithm.kl_penalty == "full" and c.algorithm.use_kl_in_reward:
        yield (
            "algorithm.kl_penalty=full: only the loss can have the exact KL (actor.kl_loss_type=full); in the reward "
            "use kl, which is unbiased there"
        )
    if c.reward.overlong_buffer.enable and not 0 < c.reward.overlong_buffer.len <= c.data.max_response_length:
        yield (
            f"reward.overlong_buffer.len={c.reward.overlong_buffer.len}: must be in "
            f"1..data.max_response_length={c.data.max_response_length}"
        )


def _guard(c: Config) -> Iterator[str]:
    guard = c.trainer.guard
    for name in guard.limits:
        if declared(name) is None:
            yield f"trainer.guard.limits.{name}: no such metric; docs/metrics.md lists them"
    if "actor/kl_loss" in guard.limits and not c.actor.use_kl_loss:
        yield "trainer.guard.limits.actor/kl_loss: there is none with actor.use_kl_loss=false; leave it out"
    kept_steps = (c.trainer.max_ckpt_to_keep - 1) * c.trainer.save_freq
    if bool(guard.limits) and guard.action == "rollback" and not 0 < guard.patience <= kept_steps:
        yield (
            f"trainer.guard.action=rollback: a checkpoint from before its {guard.patience} steps "
            "(trainer.guard.patience) has to be there still; have (trainer.max_ckpt_to_keep - 1) * trainer.save_freq "
            "at least as large"
        )
