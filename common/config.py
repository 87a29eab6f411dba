"""The configuration: one tree of models, verl's names where verl has the key.

The sentence under each field is its documentation (``docs/config.md`` and ``--help`` are made
from it). Reading files, overrides and errors is in ``common/loading.py``; no heavy import here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from common.thresholds import parse_threshold

MAX_ATTEMPTS, MAX_GROUP_SAMPLES = 1 << 12, 1 << 16  # what the ledger can number, see broker/store.py


def _threshold(value: object) -> object:
    if value is not None:
        parse_threshold(value)  # type: ignore[arg-type] # raises ValueError with the remedy
    return value


Threshold = Annotated[float | str | None, BeforeValidator(_threshold)]
ResumeMode = Annotated[  # YAML reads a bare `off` as false; verl says `disable`
    Literal["auto", "off", "resume_path"], BeforeValidator(lambda v: "off" if v is False or v == "disable" else v)
]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLKind = Literal[
    "kl",
    "k1",
    "abs",
    "mse",
    "k2",
    "low_var_kl",
    "k3",
    "kl+",
    "k1+",
    "abs+",
    "mse+",
    "k2+",
    "low_var_kl+",
    "k3+",
    "full",
]


# Keys that make a host run code: they come from its own command line, never from Redis.
# (A checkpoint is unpickled.)
HOST_KEYS = ("reward.custom_function.path", "model.trust_remote_code", "trainer.resume_from_path")



class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_default=False, protected_namespaces=()
    )


class Run(Section):
    id: str | None = None
    """Name of the run; letters, digits, `.`, `_`, `-`. Default: that of the run in `run.dir`, else the config's name
    and the time."""
    dir: str | None = None
    """Folder of the run. Default: `runs/<run.id>`."""
    seed: NonNegativeInt = 0
    """Seeds prompt order, model initialisation, sampling and shuffling."""
    max_steps: PositiveInt = 1000
    """Number of optimizer steps (rows of `steps`) after which the run ends."""
    redis_url: str | None = None
    """Redis to use for run control. Default: a server of the run's own on loopback."""
    goal_score: float | None = None
    """End the run once `critic/score/mean`, averaged over `run.goal_window` steps, exceeds this."""
    goal_window: PositiveInt = 20
    """Steps over which `run.goal_score` is averaged."""
    stop_timeout_s: PositiveFloat = 12.0
    """Seconds a role gets to end cleanly after a stop, before it is killed."""
    start_timeout_s: PositiveFloat = 600.0
    """Seconds a role waits for the roles it needs (config, broker, learner, model) before it gives up by name."""
    max_restarts: NonNegativeInt = 10
    """How often the supervisor restarts one role that died, before the run ends with its error."""
    bind_host: str = "127.0.0.1"
    """Address on which broker and learner listen. Anything but loopback is refused for now."""


class Warmup(Section):
    steps: NonNegativeInt = 0
    """Largest number of supervised steps on prompt/answer pairs before RL; 0 switches the warm-up off."""
    batch_size: PositiveInt = 64
    """Pairs per supervised step."""
    lr: PositiveFloat = 1e-3
    """AdamW learning rate of the warm-up."""
    target_score: float = 0.12
    """The warm-up ends when the sampled score of the model reaches this."""
    check_every: PositiveInt = 5
    """Supervised steps between two checks of the sampled score."""


class Model(Section):
    path: str | None = None
    """Folder (or hub name) of a Hugging Face causal LM with its tokenizer. Give this or `model.toy`."""
    toy: bool = False
    """Make a small random Qwen2 with a character tokenizer instead of loading one."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the weights as trained and as served."""
    enable_gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again: less memory, 1/3 more work."""
    lora_rank: NonNegativeInt = 0
    """Rank of the actor's LoRA adapters, which alone are trained; the reference is then the model without them, and
    generators get the merged weights (in bfloat16 these lose most of a small update), or the adapters
    (`weights.adapters_only`). 0: all weights are trained."""
    lora_alpha: PositiveInt = 16
    """Adapters count `lora_alpha / lora_rank` times."""
    target_modules: str | list[str] = "all-linear"
    """Linear layers that get an adapter: the ends of their names, a pattern, or `all-linear` (all but the head)."""
    attn_implementation: Literal["sdpa", "varlen"] = "sdpa"
    """sdpa: PyTorch's attention with a mask where rows are packed. varlen: flash attention over each sequence of a row,
    without a mask (GPU, bfloat16; prompts are not shared); written, but not yet run on a GPU."""
    use_remove_padding: bool = True
    """Pack sequences end to end into rows; false: one padded sequence a row (slower, the same numbers)."""
    warmup: Warmup = Field(default_factory=Warmup)
    trust_remote_code: bool = False
    """Run code that comes with the model. Taken only from this host's own command line."""


class OverlongBuffer(Section):
    enable: bool = False
    """Penalise responses that come close to `data.max_response_length` (DAPO)."""
    len: NonNegativeInt = 0
    """Length in tokens of the zone before `data.max_response_length` in which the penalty grows."""
    penalty_factor: NonNegativeFloat = 1.0
    """Penalty at full length."""


class CustomFunction(Section):
    path: str | None = None
    """Python file with the reward function."""
    name: str = "compute_score"
    """Its name: `compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict`."""


class Reward(Section):
    custom_function: CustomFunction = Field(default_factory=CustomFunction)
    timeout_s: PositiveFloat = 10.0
    """Seconds one call of the reward function may take; then its process is killed and the sample dropped."""
    overlong_buffer: OverlongBuffer = Field(default_factory=OverlongBuffer)


class Data(Section):
    train_files: list[str] | str | None = None
    """JSONL or parquet files in verl's columns (`data_source`, `prompt`, `reward_model.ground_truth`, `extra_info`)."""
    val_files: list[str] | str | None = None
    """Held-out files, same columns."""
    task: str | None = None
    """A procedural task of `common/tasks.py` (e.g. `reverse_digits`) instead of files."""
    train_batch_size: PositiveInt = 64
    """B: prompts (groups) per step."""
    max_prompt_length: PositiveInt = 512
    """Prompts longer than this many tokens are dropped by name (`prompt_too_long`)."""
    max_response_length: PositiveInt = 512
    """Largest number of response tokens."""
    shuffle: bool = True
    """Shuffle the prompts (seeded) in each epoch."""
    val_size: PositiveInt = 128
    """Number of held-out prompts taken from a procedural task, or at most from `data.val_files`."""


class KLCtrl(Section):
    type: Literal["fixed", "adaptive"] = "fixed"
    """Controller of the coefficient of the KL in the reward."""
    kl_coef: NonNegativeFloat = 0.001
    """(Initial) coefficient of the KL in the reward."""
    horizon: PositiveInt = 10000
    """Horizon of the adaptive controller, in samples."""
    target_kl: PositiveFloat = 0.1
    """Target of the adaptive controller."""


class RolloutCorrection(Section):
    rollout_is: Literal["token", "sequence", "geometric"] | None = "token"
    """Level of the truncated importance weights proximal/behavior; null: none."""
    rollout_is_threshold: Threshold = 2.0
    """Truncation of the importance weights: a number C, or `lo_hi`."""
    rollout_rs: str | None = None
    """Rejection modes, joined by commas (`docs/algorithms.md`): what is outside gets weight 0; null: none."""
    rollout_rs_threshold: float | str | None = None
    """Threshold of each mode, joined by commas: a number or `lo_hi`."""


class FilterGroups(Section):
    enable: bool = False
    """Dynamic sampling (DAPO): a group whose rewards are all equal is dropped as it comes, another takes its place."""
    max_num_gen_batches: NonNegativeInt = 10
    """The run ends after so many batches' worth of groups dropped so without a batch to train; 0: no limit."""


class Algorithm(Section):
    adv_estimator: Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "remax"] = "grpo"
    """Advantage estimator."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount."""
    lam: float = Field(1.0, ge=0, le=1)
    """λ of GAE."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide GRPO's advantages by the group's standard deviation."""
    allow_single_sample_groups: bool = False
    """Allow `rollout.n=1` with a group estimator (the advantage is then the score itself)."""
    proximal: Literal["recompute", "bypass", "loglinear"] = "recompute"
    """The clip anchor π_prox: recomputed by the learner, := behavior (bypass), or interpolated (A-3PO)."""
    rollout_correction: RolloutCorrection = Field(default_factory=RolloutCorrection)
    filter_groups: FilterGroups = Field(default_factory=FilterGroups)
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference from the token rewards."""
    kl_penalty: KLKind = "kl"
    """Estimator of the KL in the reward."""
    kl_ctrl: KLCtrl = Field(default_factory=KLCtrl)
    kl_warmup_ratio: float = Field(0.0, ge=0, lt=1)
    """First share of `run.max_steps` without any KL term."""


class Optim(Section):
    lr: PositiveFloat = 1e-6
    """AdamW learning rate."""
    lr_warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Schedule after the warm-up, over `run.max_steps`."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Floor of the schedule as a share of `lr`."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's β."""
    eps: PositiveFloat = 1e-8
    """AdamW's ε."""


class FSDPConfig(Section):
    """Where a trained model lives."""

    param_offload: bool = False
    """Keep the weights in host memory while the model is not in use."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in host memory except during updates."""
    offload_policy: bool = False
    """FSDP2's CPU offload: weights, gradients and optimizer stay in host memory, layers come and go; slow, smallest."""
    reduce_every_micro_step: bool = False
    """Sum gradients over ranks in each micro-step instead of once an update: more traffic, but no rank holds a whole
    gradient (4 bytes per parameter)."""


class ActorFSDPConfig(FSDPConfig):
    fsdp_size: int = Field(-1, ge=-1)
    """Ranks that share one copy of each model; the copies' gradients are averaged (HSDP). -1: all ranks share one."""


class RefFSDPConfig(Section):
    param_offload: bool = False
    """Keep the reference's weights in host memory while it is not in use."""
    offload_policy: bool = False
    """FSDP2's CPU offload of the reference: layers come and go."""


class PolicyLoss(Section):
    loss_mode: Literal["vanilla", "gspo", "cispo"] = "vanilla"
    """Form of the policy loss."""


class Trained(Section):
    """What actor and critic have in common."""

    optim: Optim = Field(default_factory=Optim)
    grad_clip: PositiveFloat = 1.0
    """Largest norm of the gradient."""
    ppo_mini_batch_size: PositiveInt | None = None
    """Prompts per optimizer update. Default: `data.train_batch_size`."""
    ppo_epochs: PositiveInt = 1
    """Passes over each batch."""
    use_dynamic_bsz: bool = True
    """Micro-batches by token budget instead of by row count."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Token budget of one micro-batch with gradients, padding included."""
    ppo_micro_batch_size_per_gpu: PositiveInt = 8
    """Sequences per micro-batch when `use_dynamic_bsz` is false."""
    share_prompts: bool = True
    """Compute a prompt once for the samples of its group, where that is less work and the model allows it."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one number."""
    use_torch_compile: bool = False
    """Compile each layer (torch.compile); the first steps are slow."""
    fsdp_config: FSDPConfig = Field(default_factory=FSDPConfig)


class Actor(Trained):
    fsdp_config: ActorFSDPConfig = Field(default_factory=ActorFSDPConfig)
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ranks that divide the tokens of each row among them, of all models: longer sequences than one rank can hold."""
    policy_loss: PolicyLoss = Field(default_factory=PolicyLoss)
    clip_ratio: float = Field(0.2, gt=0, lt=1)
    """PPO's ε, both sides."""
    clip_ratio_low: float | None = Field(None, gt=0, lt=1)
    """ε below 1. Default: `clip_ratio`."""
    clip_ratio_high: PositiveFloat | None = None
    """ε above 1 (DAPO's clip-higher). Default: `clip_ratio`."""
    clip_ratio_c: float = Field(3.0, gt=1)
    """Dual clip: bound on the loss of tokens with negative advantage."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL to the reference to the loss."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of the KL in the loss."""
    kl_loss_type: KLKind = "low_var_kl"
    """Estimator of the KL in the loss. full: the exact KL, over the whole vocabulary, for which the reference runs with
    each update."""
    log_prob_max_token_len_per_gpu: PositiveInt | None = None
    """Token budget of forward-only passes. Default: `ppo_max_token_len_per_gpu`."""


class Critic(Trained):
    optim: Optim = Field(default_factory=lambda: Optim(lr=1e-5))
    model_path: str | None = None
    """Backbone of the critic. Default: the actor's initial weights."""
    lora_rank: NonNegativeInt = 0
    """Rank of LoRA adapters on the critic's backbone, which alone are trained, and the value head, which is trained
    whole. 0: all of the critic's weights are trained."""
    lora_alpha: PositiveInt = 16
    """As `model.lora_alpha`."""
    target_modules: str | list[str] = "all-linear"
    """As `model.target_modules`."""
    cliprange_value: PositiveFloat | None = 0.5
    """Clip of the value update; null: none."""
    warmup_steps: NonNegativeInt = 0
    """First steps in which only the critic is trained."""


class Ref(Section):
    fsdp_config: RefFSDPConfig = Field(default_factory=RefFSDPConfig)


class Rollout(Section):
    n: PositiveInt = 8
    """Samples per prompt (the group)."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of training rollouts."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus; below 1 only with `allow_truncated_sampling`."""
    top_k: int = -1
    """Top-k; above 0 only with `allow_truncated_sampling`."""
    allow_truncated_sampling: bool = False
    """Accept the bias of top-p/top-k sampling; a warning and `rollout_corr/truncated_sampling` report it."""
    max_num_seqs: PositiveInt = 256
    """Requests one engine runs at once; also its credit for leases."""
    tensor_model_parallel_size: PositiveInt = 1
    """GPUs per engine."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of GPU memory for one engine."""
    cpu_kv_cache_bytes: PositiveInt = 64 << 20
    """KV cache of one engine on CPU."""
    enable_prefix_caching: bool = True
    """vLLM's prefix cache (reset at each weight swap)."""
    recompute_kv: bool = True
    """Recompute running requests' KV after a swap (exact); false lowers later spans to the oldest KV's version."""
    heartbeat_s: PositiveFloat = 0.5
    """Seconds between a generator's progress reports."""


class Guard(Section):
    limits: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Largest value of a step's metrics by name, e.g. `{rollout_corr/k3_kl: 0.1, actor/grad_norm: 50}`; `{}`: none."""
    patience: PositiveInt = 3
    """Steps in a row with one of them beyond its limit (or not a number) after which `action` is taken; steps without
    the metric (skipped ones, those without a validation) do not count."""
    action: Literal["rollback", "pause", "stop"] = "rollback"
    """rollback: the run goes on from the newest checkpoint before these steps, as after `launch.py rollback`; pause:
    it waits for a person; stop: it ends with an error."""
    lr_factor: float = Field(0.5, gt=0, le=1)
    """The learning rates of actor and critic are multiplied by this at each rollback of the guard, and stay so; also
    those that `launch.py set` gives."""
    max_rollbacks: NonNegativeInt = 2
    """Rollbacks in the history that stands, those made by hand included, after which the guard ends the run instead."""


class Trainer(Section):
    total_epochs: PositiveInt | None = None
    """Passes over the training prompts after which the run ends; null: as many as `run.max_steps` needs."""
    save_freq: int = 50
    """Steps between checkpoints; -1: only the first and the last."""
    test_freq: int = -1
    """Steps between held-out validations on the generators, each with the next publication; -1: never."""
    val_before_train: bool = False
    """Validate version 0 before the first step."""
    resume_mode: ResumeMode = "auto"
    """auto: a run directory that has a run of this config is continued; off: it is refused, unless that run is still
    in its Redis (one of its processes was started again); resume_path: from `trainer.resume_from_path`."""
    resume_from_path: str | None = None
    """With `resume_mode=resume_path`: a checkpoint, `…/checkpoints/step_N`. One of this run: later steps are redone
    from the ledger. Another run's, in a new `run.dir`: models, optimizers, KL controller are taken over, all counts
    begin at 0. It is unpickled, so trust it; taken only from this host's own command line."""
    max_ckpt_to_keep: PositiveInt = 2
    """Checkpoints kept (the newest valid one always)."""
    async_save: bool = True
    """Copy a checkpoint's tensors to host memory (12 bytes per trained parameter, kept) and write them while training
    goes on; false: training waits until it is written."""
    max_nonfinite_steps: PositiveInt = 3
    """Skipped steps in a row after which the run ends with an error."""
    guard: Guard = Field(default_factory=Guard)
    nproc_per_node: PositiveInt = 1
    """Learner ranks on this host."""
    logger: list[Literal["console", "wandb", "tensorboard", "prometheus"]] = ["console", "wandb"]
    """Sinks beside `metrics.jsonl`, which is always written."""
    prometheus_port: int = Field(0, ge=0, lt=1 << 16)
    """Where sink `prometheus` is asked, on `run.bind_host`; 0: any free port, which the log says."""
    project_name: str = "leeway"
    """wandb project."""
    experiment_name: str | None = None
    """wandb run name. Default: `run.id`."""
    deterministic: bool = False
    """Ask torch for deterministic kernels."""


class Staleness(Section):
    max: NonNegativeInt = 2
    """η: no token older than this many versions carries loss weight. 0 is synchronous on-policy training."""
    policy: Literal["drop", "mask", "wait"] = "drop"
    """What becomes of a group that is, or is bound to become, too old: it is dropped and its prompt tried again; its
    older tokens get weight 0 (mask); or the learner waits for slow groups rather than leave them behind (wait)."""
    wait_s: PositiveFloat = 60.0
    """Policy `wait`: longest time that one batch waits for slow groups; then as `drop`."""


class Weights(Section):
    publish_every: PositiveInt = 1
    """Steps between two publications of weights."""
    transport: Literal["auto", "gloo", "nccl", "snapshot"] = "auto"
    """How weights travel; auto: gloo. A newcomer, and a member whose transfer failed, pulls a snapshot in any case.
    nccl is written, but was not yet run on two GPUs."""
    adapters_only: bool = False
    """With `model.lora_rank`: send the adapters alone, which engines compute beside the base. They read the base from
    the learner's model folder, which must be on their host. A smaller version, and more work for each token."""
    snapshot: Literal["zmq", "file"] = "zmq"
    """How snapshots are pulled: over a socket of the learner, or from RUN_DIR/weights, which generators must see under
    the same path. There the learner keeps the newest one or two versions as folders that `from_pretrained` loads."""
    bucket_bytes: PositiveInt = 16 << 20
    """Size of one transfer bucket."""
    staging: Literal["host", "device", "none"] = "host"
    """Where an engine keeps a version until it is whole: in host memory (once for all workers of an engine), in the
    device memory of each worker, or nowhere: it is loaded as it comes, the engine pauses for the whole transfer, and
    after a torn one holds nothing until the next."""
    timeout_s: PositiveFloat = 30.0
    """Longest time one member can hold up a publication; then it is left out."""
    canary_every: NonNegativeInt = 50
    """Versions between two proofs that an engine computes what the learner does; 0: at a first load, after faults."""


class Ledger(Section):
    max_attempts: int = Field(3, ge=1, le=MAX_ATTEMPTS)
    """Attempts per prompt before it is dropped."""
    lease_timeout_s: PositiveFloat = 60.0
    """A lease without progress for this long expires."""
    lease_limit_s: PositiveFloat = 1800.0
    """Absolute limit of one lease."""
    fsync: bool = False
    """Also survive power loss (SQLite synchronous=FULL)."""
    keep_bytes: NonNegativeInt = 1 << 30
    """Trained payloads kept beyond what redo needs."""
    untrained_bytes: PositiveInt = 4 << 30
    """Payloads that wait for the learner; above this, and with a batch ready, generators get nothing more."""
    redo_bytes: PositiveInt = 4 << 30
    """Trained payloads beyond the last checkpoint; above this the broker asks the learner for one."""


class Replay(Section):
    rollouts: str | None = None
    """Train on recorded rollouts, without broker and generators: a run's folder or ledger, or a parquet file
    (`docs/replay.md`). `launch.py replay` sets it."""
    mode: Literal["exact", "offline"] = "exact"
    """exact: the record's own steps, whose weights must come out to the bit. offline: train on its rollouts."""


class Generators(Section):
    count: NonNegativeInt = 2
    """Generators that `launch.py run` and `launch.py generators` start on this host."""


class Config(Section):
    """Leeway's configuration."""

    run: Run = Field(default_factory=Run)
    model: Model = Field(default_factory=Model)
    data: Data = Field(default_factory=Data)
    reward: Reward = Field(default_factory=Reward)
    algorithm: Algorithm = Field(default_factory=Algorithm)
    actor: Actor = Field(default_factory=Actor)
    critic: Critic = Field(default_factory=Critic)
    ref: Ref = Field(default_factory=Ref)
    rollout: Rollout = Field(default_factory=Rollout)
    trainer: Trainer = Field(default_factory=Trainer)
    staleness: Staleness = Field(default_factory=Staleness)
    weights: Weights = Field(default_factory=Weights)
    ledger: Ledger = Field(default_factory=Ledger)
    generators: Generators = Field(default_factory=Generators)
    replay: Replay = Field(default_factory=Replay)

    @property
    def needs_critic(self) -> bool:
        return self.algorithm.adv_estimator == "gae"

    @property
    def greedy_index(self) -> int | None:
        """Which sample of a training group is sampled greedily, as the baseline of `remax`; None: none is."""
        return self.rollout.n if self.algorithm.adv_estimator == "remax" else None

    @property
    def samples_per_group(self) -> int:
        return self.rollout.n + (self.greedy_index is not None)

    @property
    def truncates_sampling(self) -> bool:
        """Whether samples come from less than the whole distribution, so that gradients are biased."""
        return self.rollout.top_p < 1 or self.rollout.top_k > 0

    @property
    def rounds_adapters_away(self) -> bool:
        """Whether engines get W + Δ in bfloat16, which is W wherever |Δ| is less than half a unit in its last place."""
        merged = self.model.lora_rank > 0 and not self.weights.adapters_only
        return merged and self.model.dtype == "bfloat16" and not self.replay.rollouts

    @property
    def needs_reference(self) -> bool:
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def needs_exact_kl(self) -> bool:
        """Whether the loss has the KL over the whole vocabulary."""
        return self.actor.use_kl_loss and self.actor.kl_loss_type == "full"

    @property
    def needs_ref_logprobs(self) -> bool:
        """Whether the reference is asked for the sampled tokens."""
        return self.algorithm.use_kl_in_reward or (self.actor.use_kl_loss and not self.needs_exact_kl)

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_prompt_length + self.data.max_response_length
