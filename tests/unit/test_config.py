"""Configuration: layers, verl's names, and every fault at once before anything heavy is imported."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import Config
from common.errors import ConfigError
from common.loading import config_paths, differences, load_config
from common.preflight import checked_config, occupy, run_dir_faults, staging_faults

ROOT = Path(__file__).resolve().parents[2]
GOOD = ["model.toy=true", "data.task=reverse_digits"]


def faults(*overrides, paths=(), check=load_config):
    with pytest.raises(ConfigError) as e:
        check(list(paths), [*GOOD, *overrides])
    return e.value.faults


def write(path, text):
    path.write_text(text)
    return str(path)


# ---------------------------------------------------------------- layers and names
def test_files_left_to_right_then_overrides(tmp_path):
    a = write(tmp_path / "a.yaml", "staleness: {max: 1}\nrollout: {n: 4, temperature: 0.5}\n")
    b = write(tmp_path / "b.yaml", "rollout: {n: 6}\n")
    config = load_config([a, b], [*GOOD, "rollout.temperature=0.7"])
    assert (config.staleness.max, config.rollout.n, config.rollout.temperature) == (1, 6, 0.7)


def test_verls_prefix_and_names_are_understood():
    config = load_config(
        [],
        [
            *GOOD, "actor_rollout_ref.rollout.n=3", "+actor_rollout_ref.actor.clip_ratio=0.3",
            "trainer.total_training_steps=7", "algorithm.rollout_correction.bypass_mode=true",
            "reward_model.overlong_buffer.len=4", "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=2",
            "algorithm.kl_ctrl.kl_coef=0.01",
        ],
    )  # fmt: skip
    assert (config.rollout.n, config.actor.clip_ratio, config.run.max_steps) == (3, 0.3, 7)
    assert (config.algorithm.proximal, config.reward.overlong_buffer.len) == ("bypass", 4)
    assert (config.algorithm.kl_ctrl.kl_coef, config.reward.overlong_buffer.penalty_factor) == (0.01, 2.0)


def test_verls_names_of_how_models_are_divided_are_understood():
    config = load_config(
        [],
        [
            *GOOD, "trainer.nproc_per_node=8", "actor_rollout_ref.model.use_remove_padding=false",
            "actor_rollout_ref.actor.fsdp_config.fsdp_size=4", "actor_rollout_ref.ref.fsdp_config.param_offload=true",
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
            "critic.model.fsdp_config.offload_policy=true",
            "critic.ulysses_sequence_parallel_size=2", "data.max_response_length=30000",
            "critic.model.lora_rank=8", "critic.model.lora_alpha=4", "critic.model.target_modules=[q_proj]",
        ],
    )  # fmt: skip
    assert (config.model.use_remove_padding, config.actor.ulysses_sequence_parallel_size) == (False, 2)
    assert config.actor.fsdp_config.model_dump() == {
        "param_offload": False, "optimizer_offload": True, "offload_policy": False, "fsdp_size": 4,
        "reduce_every_micro_step": False,
    }  # fmt: skip
    assert (config.critic.lora_rank, config.critic.lora_alpha, config.critic.target_modules) == (8, 4, ["q_proj"])
    assert (config.ref.fsdp_config.param_offload, config.critic.fsdp_config.offload_policy) == (True, True)


def test_run_id_is_the_configs_name_and_the_time_and_the_folder_follows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config([write(tmp_path / "mine.yaml", "model: {toy: true}\ndata: {task: reverse_digits}\n")], [])
    assert config.run.id.startswith("mine-20") and config.run.dir == str(tmp_path / "runs" / config.run.id)
    assert load_config([], [*GOOD, "run.id=x"]).run.dir == str(tmp_path / "runs" / "x")


def test_a_config_survives_being_stored_and_read():
    config = load_config([], [*GOOD, "run.id=x", "actor.optim.betas=[0.9, 0.95]", "critic.cliprange_value=null"])
    again = Config.model_validate(json.loads(json.dumps(config.model_dump(mode="json"))))
    assert differences(config, again) == []


def test_every_key_has_a_sentence():
    assert [k for k, (_, _, sentence) in config_paths().items() if not sentence.endswith((".", ")"))] == []


# ---------------------------------------------------------------- faults of the config
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor.clip_ration=0.1", "command line: actor.clip_ration: unknown key; did you mean actor.clip_ratio?"),
        ("actor_rollout_ref.rollout.top_pp=1", "command line: rollout.top_pp: unknown key; did you mean rollout.top_p"),
        ("stalenes.max=1", "command line: stalenes.max: unknown key; did you mean staleness.max?"),
        ("rollout.n=many", "command line: rollout.n='many': input should be a valid integer"),
        ("rollout.n=0", "command line: rollout.n=0: input should be greater than 0"),
        ("staleness.policy=keep", "command line: staleness.policy='keep': input should be 'drop'"),
        ("rollout=5", "command line: rollout=5: input should be a valid dictionary"),
        ("rollout.n.m=5", "command line: rollout.n={'m': 5}: input should be a valid integer"),
        ("nonsense", "'nonsense': an override has the form a.b=value"),
        ("weights.publish_every=4", "weights.publish_every=4: larger than staleness.max + 1 = 3"),
        ("rollout.top_p=0.9", "rollout.top_p=0.9, rollout.top_k=-1: the learner's log-probs"),
        ("rollout.top_k=50", "rollout.top_p=1.0, rollout.top_k=50: the learner's log-probs"),
        ("rollout.n=70000", "rollout.n=70000: a group has at most 65536 samples"),
        ("ledger.max_attempts=5000", "command line: ledger.max_attempts=5000: input should be less than or equal to"),
        ("model.path=/x", "model.path: give exactly one of"),
        ("data.train_files=x.jsonl", "data.train_files: give exactly one of"),
        ("actor.ppo_mini_batch_size=48", "actor.ppo_mini_batch_size=48: must divide data.train_batch_size=64"),
        ("data.max_response_length=20000", "actor.ppo_max_token_len_per_gpu=16384: one sequence can have"),
        ("actor.ulysses_sequence_parallel_size=2", "actor.ulysses_sequence_parallel_size=2: must divide trainer.nproc"),
        ("actor.fsdp_config.fsdp_size=3", "actor.fsdp_config.fsdp_size=3: must divide trainer.nproc_per_node=1"),
        ("actor.fsdp_config.fsdp_size=0", "actor.fsdp_config.fsdp_size=0: must divide trainer.nproc_per_node=1"),
        ("actor.fsdp_config={offload_policy: true, param_offload: true}", "actor.fsdp_config.offload_policy=true: "),
        ("ref.fsdp_config={offload_policy: true, param_offload: true}", "ref.fsdp_config.offload_policy=true: "),
        ("actor={use_torch_compile: true, ulysses_sequence_parallel_size: 2}", "actor.use_torch_compile=true: "),
        ("weights.adapters_only=true", "weights.adapters_only=true: there are no adapters; set model.lora_rank"),
        ("model={lora_rank: 4, target_modules: [q_proj, lm_head]}", "model.target_modules=['q_proj', 'lm_head']: lm"),
        ("critic={lora_rank: 4, target_modules: [wte]}", "critic.target_modules=['wte']: wte is at the model's end"),
        ("model={lora_rank: 4, target_modules: model.embed_tokens}", "model.target_modules=model.embed_tokens: emb"),
        ("model={attn_implementation: varlen, dtype: float32}", "model.attn_implementation=varlen: flash attention"),
        ("actor.log_prob_max_token_len_per_gpu=8", "actor.log_prob_max_token_len_per_gpu=8: one sequence can have"),
        ("algorithm={proximal: bypass, rollout_correction: {rollout_rs: token_k1, rollout_rs_threshold: 2}}",
         "algorithm.rollout_correction.rollout_rs: with algorithm.proximal=bypass"),
        ("rollout.n=1", "rollout.n=1: grpo compares samples of one prompt"),
        ("rollout={n: 1}", "rollout.n=1: grpo compares samples of one prompt"),
        ("run.bind_host=0.0.0.0", "run.bind_host=0.0.0.0: a public bind needs transport keys"),
        ("run.id='../x'", "run.id='../x': use letters"),
        ("rollout.temperature=0", "command line: rollout.temperature=0: input should be greater than 0"),
    ],
)  # fmt: skip
def test_one_fault_says_what_and_where(override, expected):
    found = faults(override)
    assert any(f.startswith(expected) for f in found), found


def test_the_rank_of_adapters_that_engines_compute_is_bounded():
    found = faults("model.lora_rank=513", "weights.adapters_only=true")
    assert [f for f in found if "model.lora_rank=513: engines compute adapters of rank 512 at most" in f]
    found = faults("model.lora_rank=512", "weights.adapters_only=true", "rollout.n=1")
    assert not [f for f in found if "lora_rank" in f or "adapters_only" in f]


def test_folders_of_whole_models_hold_no_adapters():
    found = faults("model.lora_rank=4", "weights.adapters_only=true", "weights.snapshot=file")
    assert [f for f in found if f.startswith("weights.snapshot=file: its folders hold whole models")]


def test_dynamic_sampling_needs_groups_and_remax_has_a_greedy_sample_more():
    assert any("has no signal" in f for f in faults("rollout.n=1", "algorithm.filter_groups.enable=true"))
    remax = ["rollout.n=1", "algorithm.adv_estimator=remax", "algorithm.filter_groups.enable=true"]
    config = load_config([], [*GOOD, *remax])
    assert (config.samples_per_group, config.greedy_index) == (2, 1)
    assert Config().greedy_index is None and Config().samples_per_group == 8


def test_a_fault_in_a_file_names_the_file(tmp_path):
    path = write(tmp_path / "c.yaml", "rollout:\n  n: 2\n  temprature: 1\n")
    assert faults(paths=[path]) == [f"{path}: rollout.temprature: unknown key; did you mean rollout.temperature?"]
    broken = write(tmp_path / "d.yaml", "rollout:\n  n: [2\nx: 1\n")
    assert faults(paths=[broken])[0].startswith(f"{broken}:3: not valid YAML")
    twice = write(tmp_path / "e.yaml", "data:\n  max_prompt_length: 4\n  max_prompt_length: 5\n")
    assert faults(paths=[twice]) == [f"{twice}:3: not valid YAML (max_prompt_length is there twice)"]
    assert faults(paths=["/nowhere.yaml"]) == ["/nowhere.yaml: cannot be read (No such file or directory)"]


def test_all_faults_at_once_those_of_the_world_too(tmp_path):
    rows = write(
        tmp_path / "rows.jsonl", '{"data_source": "d", "prompt": [], "reward_model": {"ground_truth": 1}}\n{\n'
    )
    reward = write(tmp_path / "reward.py", "def score(): ...\n")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as e:
        checked_config([], [
            "staleness.maxi=3", "rollout.n=x", "weights.publish_every=9", f"data.train_files=[{rows}]",
            f"model.path={tmp_path}", f"reward.custom_function.path={reward}", f"run.dir={tmp_path}/file/run",
            "run.redis_url=redis://127.0.0.1:1",
        ])  # fmt: skip
    text = "\n".join(e.value.faults)
    for expected in (
        "staleness.maxi: unknown key; did you mean staleness.max?", "rollout.n='x'", "weights.publish_every=9",
        f"{rows}:1: prompt is not a list", f"{rows}:2: not valid JSON", f"model.path={tmp_path}: has no config.json",
        f"reward.custom_function.name=compute_score: {reward} does not define it; it has score",
        f"run.dir={tmp_path}/file/run: {tmp_path}/file is not a folder", "run.redis_url: 127.0.0.1:1 does not answer",
    ):  # fmt: skip
        assert expected in text
    assert len(e.value.faults) == 9


# ---------------------------------------------------------------- faults of the world
def check(*overrides):
    return checked_config([], [*GOOD, *overrides])


def test_the_engines_of_a_host_have_room_for_what_they_stage_together(tmp_path, monkeypatch):
    import torch
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    save_file({"a": torch.zeros(1000, 70)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(30_000), "lm_head.weight": torch.zeros(1000, 70)},
              tmp_path / "model-00002-of-00002.safetensors")  # fmt: skip
    shards = {"a": 1, "b": 2, "lm_head.weight": 2}
    index = {"weight_map": {name: f"model-0000{i}-of-00002.safetensors" for name, i in shards.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(1000, 100)}, tmp_path / "consolidated.safetensors")  # as in Mistral's

    def refused(free, *overrides):
        monkeypatch.setattr("common.preflight.free_bytes", lambda: free)
        config = load_config([], [*GOOD, "model.toy=false", f"model.path={tmp_path}", *overrides])
        return list(staging_faults(config))

    assert refused(800_000, "generators.count=4") == refused(None, "generators.count=99") == []  # 100,000 in bfloat16
    [fault] = refused(799_999, "generators.count=4")
    assert fault.startswith("generators.count=4: with weights.staging=host") and "4 × 0.0002 GB" in fault
    assert refused(800_000, "generators.count=2", "model.dtype=float32") == []
    assert len(refused(799_999, "generators.count=2", "model.dtype=float32")) == 1
    assert refused(1, "weights.staging=device") == refused(1, "weights.staging=none") == []
    assert len(refused(1)) == 1
    monkeypatch.setattr("common.preflight.free_bytes", lambda: 1)
    with pytest.raises(ConfigError, match=r"generators\.count=2: with weights\.staging=host"):
        checked_config([], [*GOOD, "model.toy=false", f"model.path={tmp_path}"], engines=True)
    for file in tmp_path.glob("*2.safetensors"):
        file.write_bytes(b"torn")
    assert refused(1) == []  # not known; the engines look for themselves
    save_file({"a": torch.zeros(1000, 50)}, tmp_path / "model.safetensors")  # it comes first
    assert refused(200_000, "generators.count=2") == [] and len(refused(199_999, "generators.count=2")) == 1
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    assert refused(1) == []  # nothing that would be read


def test_unknown_task():
    assert faults("data.task=reverse_digit", check=checked_config) == [
        "data.task='reverse_digit': no such task; did you mean reverse_digits?"
    ]


@pytest.mark.parametrize(
    ("source", "expected"),
    [("def compute_score(ground_truth, solution_str, *, limit=3, **rest):\n  return 1\n", None),
     ("def compute_score(*a):\n  return 1\n", "does not take data_source, solution_str, ground_truth, extra_info"),
     ("def compute_score(answer, /, **rest):\n  return 1\n", "but also needs answer"),
     ("@wrapped\ndef compute_score(answer):\n  return 1\n", None), ("from json import loads as compute_score\n", None),
     ("compute_score = len\n", None), ("def f(:\n", "not valid Python"), ("x = 1\n", "does not define it")],
)  # fmt: skip
def test_the_reward_function_is_looked_for_without_running_it(tmp_path, source, expected):
    path = write(tmp_path / "r.py", f"raise_if_run = 1 / 1\n{source}")
    if expected is None:
        check(f"reward.custom_function.path={path}")
    else:
        assert expected in faults(f"reward.custom_function.path={path}", check=checked_config)[0]


def test_what_answers_must_be_redis(tmp_path):
    import socket
    import threading

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            peer, _ = listener.accept()
            peer.recv(64)
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\n")
            peer.close()

        thread = threading.Thread(target=answer)
        thread.start()
        port = listener.getsockname()[1]
        found = faults(f"run.redis_url=redis://127.0.0.1:{port}", check=checked_config)
        thread.join()
    assert found == [f"run.redis_url: what answers at 127.0.0.1:{port} is not Redis"]


def test_a_folder_with_a_run_is_continued_or_refused_never_overwritten(tmp_path):
    folder = f"run.dir={tmp_path}/run"
    config = check(folder)
    Path(config.run.dir).mkdir()
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    assert check(folder).run.id == config.run.id, "a run that is continued keeps its id"
    same_id = f"run.id={config.run.id}"
    assert run_dir_faults(check(folder, same_id)) == []
    assert run_dir_faults(check(folder, same_id, "run.max_steps=5")) == []
    other = faults(folder, same_id, "actor.optim.lr=0.5", check=checked_config)
    assert "has a run of another config" in other[0] and other[1:] == ["  actor.optim.lr: 0.5 != 1e-06"]
    assert "already has a run" in faults(folder, same_id, "trainer.resume_mode=off", check=checked_config)[0]
    (tmp_path / "run" / "config.yaml").unlink()
    (tmp_path / "run" / "ledger.sqlite").write_text("")
    assert "has ledger.sqlite but no config.yaml" in faults(folder, check=checked_config)[0]


def test_a_folder_of_something_else_is_refused(tmp_path):
    folder = f"run.dir={tmp_path}"
    (tmp_path / "logs").mkdir()
    (tmp_path / ".hidden").write_text("")
    assert run_dir_faults(check(folder)) == []  # a role started alone writes its log first
    (tmp_path / "thesis.tex").write_text("")
    assert "has thesis.tex but no config.yaml, so it is no run's" in faults(folder, check=checked_config)[0]


def test_a_folder_in_use_is_refused(tmp_path):
    lock = occupy(tmp_path / "run")
    assert "a run is going on in it" in faults(f"run.dir={tmp_path}/run", check=checked_config)[0]
    with pytest.raises(ConfigError, match="a run is going on"):
        occupy(tmp_path / "run")
    lock.close()
    check(f"run.dir={tmp_path}/run")


# ---------------------------------------------------------------- the command
def launch(*args):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "launch.py"), *args],
        capture_output=True, text=True, env=env, timeout=30,
    )  # fmt: skip
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    errors = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("import time"))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # as the wall clock shows on a quiet machine
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return done.returncode, done.stdout, errors, imported, seconds


def test_a_bad_config_ends_in_two_seconds_with_code_2_and_without_torch(tmp_path):
    rows = write(tmp_path / "rows.jsonl", "{}\n")
    code, out, errors, imported, seconds = launch(
        "run", "model.toy=true", f"data.train_files={rows}", "rollout.nn=3", f"run.dir={tmp_path}/run"
    )
    assert code == 2 and out == ""
    assert errors.splitlines() == [
        "launch.py: 2 errors:",
        "  command line: rollout.nn: unknown key; did you mean rollout.n?",
        f"  {rows}:1: data_source is missing or not a string; name the data set, it chooses the reward",
    ]
    assert seconds < 2.0
    assert not {"torch", "transformers", "vllm", "redis", "zmq"} & imported
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["quickstart.yaml", "quickstart_ppo_critic.yaml"])
def test_the_configs_that_come_along_are_good(name, tmp_path):
    code, out, errors, _, _ = launch("config", "--check", str(ROOT / "configs" / name), f"run.dir={tmp_path}/run")
    assert (code, errors) == (0, "") and out.startswith("the config is good")


def test_print_config_is_whole_and_can_be_used_again(tmp_path):
    _, out, _, _, _ = launch("config", *GOOD, "run.id=x", "--print-config", "staleness.max=1")
    path = write(tmp_path / "printed.yaml", out)
    assert differences(load_config([path], []), load_config([], [*GOOD, "run.id=x", "staleness.max=1"])) == []


def test_help_lists_each_key_with_its_sentence():
    code, out, _, _, _ = launch("run", "--help")
    assert code == 0
    for key, (_, _, sentence) in config_paths().items():
        assert f"  {key}=" in out and sentence in out


def test_an_unknown_option_is_refused():
    code, _, errors, _, _ = launch("run", *GOOD, "--fast")
    assert code == 2 and "unrecognized arguments: --fast" in errors


def test_an_unwritable_run_directory_is_refused_even_to_root():
    [fault] = faults("run.dir=/proc/nowhere", check=checked_config)
    assert fault.startswith("run.dir=/proc/nowhere: cannot write in /proc")


def test_validation_needs_held_out_prompts():
    own = ["data.task=null", "data.train_files=a.jsonl", "trainer.test_freq=5"]
    assert [f for f in faults(*own) if "no held-out prompts; give data.val_files" in f]
    assert load_config([], [*GOOD, *own, "data.val_files=b.jsonl"]).trainer.test_freq == 5
