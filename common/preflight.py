"""Checks that touch the world, before anything heavy is imported or written.

Each function yields faults; ``checked_config`` runs them all so that a user sees everything at once.
"""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import yaml

from common.archive import LEDGER, is_ledger, ledger_path
from common.config import HOST_KEYS, Config
from common.data import open_rows
from common.errors import ConfigError
from common.loading import differences, examine_config, load_config
from common.memory import free_bytes
from common.rollouts import check_columns, config_in
from common.tasks import REWARD_CALL
from common.tensor_files import num_elements

CONFIG_FILE = "config.yaml"
LOCK_FILE = "run.lock"
# What may differ when a run directory is continued, as prefixes.
MAY_CHANGE = (
    "run.max_steps:", "run.goal_score:", "run.goal_window:", "run.redis_url:", "run.stop_timeout_s:",
    "run.start_timeout_s:", "run.max_restarts:", "generators.count:", "trainer.guard.", "trainer.save_freq:",
    "trainer.test_freq:", "trainer.max_ckpt_to_keep:", "trainer.async_save:", "trainer.logger:",
    "trainer.prometheus_port:", "trainer.resume_mode:", "trainer.resume_from_path:", "trainer.project_name:",
    "trainer.experiment_name:", "ledger.fsync:", "ledger.keep_bytes:", "ledger.redo_bytes:", "ledger.untrained_bytes:",
    "weights.transport:", "weights.snapshot:", "weights.staging:", "weights.bucket_bytes:", "weights.timeout_s:",
    "weights.canary_every:",
)  # fmt: skip
# What the weights of a step depend on, beside its rollouts. A folder may lie elsewhere: the digests tell.
REPLAY_MATTERS = (
    "model.", "algorithm.", "actor.", "critic.", "reward.overlong_buffer.", "run.seed:", "data.max_prompt_length:",
    "data.max_response_length:", "data.train_batch_size:", "staleness.policy:", "trainer.deterministic:",
    "trainer.nproc_per_node:",
)  # fmt: skip
REPLAY_MAY_CHANGE = ("model.path:", "critic.model_path:", "model.trust_remote_code:")
_BEFORE_CONFIG = (LOCK_FILE, "logs")  # what a run's folder may have before it has a config
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_ANSWER_S = 1.0


def checked_config(
    paths: list[str], overrides: list[str], *, folder: bool = True, engines: bool = False
) -> Config:
    """Read the config and check it against this machine.

    Args:
        folder: also check the run directory (a role that joins a run finds it in use).
        engines: generators are to run here: also check the memory of this host.

    Raises:
        ConfigError: every fault of the config and of the world, at once.
    """
    config, faults = examine_config(paths, overrides)
    faults += world_faults(config)
    if folder:
        faults += run_dir_faults(config)
    if engines:
        faults += staging_faults(config)
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))
    return config


def world_faults(config: Config) -> list[str]:
    """What the config names and this machine does not have."""
    return [*_data(config), *_model(config), *_reward(config), *_redis(config.run.redis_url),
            *_replay(config), *_resume_path(config), *_sinks(config)]  # fmt: skip


def _data(config: Config) -> Iterator[str]:
    scored = not config.reward.custom_function.path
    for split in ("train", "val"):
        if split == "train" and not config.data.task and not config.data.train_files:
            continue  # already a fault of the config
        try:
            open_rows(config, "train" if split == "train" else "val", scored=scored)
        except ConfigError as e:
            yield from e.faults


def _model(config: Config) -> Iterator[str]:
    for key, path in (("model.path", config.model.path), ("critic.model_path", config.critic.model_path)):
        if not path:
            continue
        folder = Path(path).expanduser()
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                yield f"{key}={path}: has no config.json; give a Hugging Face model folder"
        elif folder.exists():
            yield f"{key}={path}: is a file; give a Hugging Face model folder"
        elif not _HUB_NAME.fullmatch(path):
            yield f"{key}={path}: no such folder"
    for key, rank in (("model", config.model.lora_rank), ("critic", config.critic.lora_rank)):
        if rank and importlib.util.find_spec("peft") is None:
            yield f"{key}.lora_rank={rank}: needs peft; install it (the extra `lora`), or set it to 0"


def staging_faults(config: Config) -> Iterator[str]:
    """The engines of this host have room for a staged version each. (Each looks for itself, too, when it starts.)"""
    count, dtype = config.generators.count, config.model.dtype
    weights = config.weights
    if weights.staging != "host" or weights.adapters_only or config.replay.rollouts or not config.model.path:
        return
    numel = num_elements(Path(config.model.path).expanduser())
    if numel is None:
        return  # it is not here
    size, free = numel * {"float32": 4, "bfloat16": 2}[dtype], free_bytes()
    if free is not None and count * size > free:
        yield (
            f"generators.count={count}: with weights.staging=host the engines of this host stage a version each, "
            f"{count} × {size / 1e9:.3g} GB, and {free / 1e9:.3g} GB of its memory are free; start fewer, free some, "
            "or set weights.staging=device or none"
        )


def _reward(config: Config) -> Iterator[str]:
    path, name = config.reward.custom_function.path, config.reward.custom_function.name
    if not path:
        return
    try:
        tree = ast.parse(Path(path).expanduser().read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as e:
        yield f"reward.custom_function.path={path}: cannot be read ({getattr(e, 'strerror', None) or e})"
        return
    except (SyntaxError, ValueError) as e:
        yield f"reward.custom_function.path={path}:{getattr(e, 'lineno', 0)}: not valid Python ({e.args[0]})"
        return
    functions = {n.name: n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
    if name not in set(_top_level_names(tree)):
        there = ", ".join(sorted(functions)) or "none"
        yield f"reward.custom_function.name={name}: {path} does not define it; it has {there}"
    elif name in functions and not functions[name].decorator_list:
        for fault in _call_faults(functions[name].args):
            yield f"reward.custom_function.path={path}:{functions[name].lineno}: {name} {fault}"


def _call_faults(args: ast.arguments) -> Iterator[str]:
    """Why a function cannot be called with the keywords of `REWARD_CALL`."""
    call = f"is called with the keywords {', '.join(REWARD_CALL)}"
    taken = {a.arg for a in (*args.args, *args.kwonlyargs)}
    if missing := [name for name in REWARD_CALL if name not in taken and args.kwarg is None]:
        yield f"{call}, but does not take {', '.join(missing)}"
    positional = [*args.posonlyargs, *args.args]
    needed = positional[: len(positional) - len(args.defaults)]
    needed += [a for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None]
    if others := [a.arg for a in needed if a in args.posonlyargs or a.arg not in REWARD_CALL]:
        yield f"{call}, but also needs {', '.join(others)}"


def _top_level_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (a.asname or a.name for a in node.names)
        else:
            yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _replay(config: Config) -> Iterator[str]:
    """The record is there; an exact replay has the config that recorded it, as far as training depends on it."""
    if not config.replay.rollouts:
        return
    path = Path(config.replay.rollouts).expanduser()
    name = f"replay.rollouts={path}"
    if not ledger_path(path).is_file():
        yield f"{name}: " + (f"has no {LEDGER}" if path.is_dir() else "no such file or folder")
        return
    if config.run.dir and Path(config.run.dir).resolve() in (path.resolve(), path.resolve().parent):
        yield f"{name}: is in run.dir={config.run.dir}; choose another run.dir for the replay"
    try:
        if not is_ledger(path):
            check_columns(path, exact=config.replay.mode == "exact")
    except ConfigError as e:
        yield from e.faults
        return
    if config.replay.mode != "exact":
        return
    try:
        text = recorded_config(path)
        recorded = None if text is None else Config.model_validate(yaml.safe_load(text))
    except ConfigError as e:
        yield from e.faults
    except (ValueError, yaml.YAMLError) as e:
        yield f"{name}: its config cannot be read ({str(e).splitlines()[0]})"
    else:
        changed = replay_differences(config, recorded) if recorded else []
        if changed:
            yield (f"{name}: recorded with another config (here != there); use that config, or replay.mode=offline "
                   "to train on its rollouts with this one")  # fmt: skip
            yield from (f"  {d}" for d in changed)


def _resume_path(config: Config) -> Iterator[str]:
    """The checkpoint to resume from is there, and is asked for."""
    path, mode = config.trainer.resume_from_path, config.trainer.resume_mode
    if path is None and mode == "resume_path":
        yield "trainer.resume_mode=resume_path: give the checkpoint with trainer.resume_from_path=…/checkpoints/step_N"
    elif path is not None and mode != "resume_path":
        yield f"trainer.resume_from_path={path}: is not used with trainer.resume_mode={mode}; set that to resume_path"
    elif path is not None and not re.fullmatch(r"step_\d+", Path(path).name):
        yield f"trainer.resume_from_path={path}: is no checkpoint of a run; give …/checkpoints/step_N"
    elif path is not None and not (Path(path).expanduser() / "manifest.json").is_file():
        yield f"trainer.resume_from_path={path}: is no finished checkpoint (no manifest.json in it)"


def _sinks(config: Config) -> Iterator[str]:
    for name, package in (("tensorboard", "tensorboard"), ("prometheus", "prometheus_client")):
        if name in config.trainer.logger and importlib.util.find_spec(package) is None:
            yield f"trainer.logger: {name} needs the package {package}; install it (the extra `sinks`), or leave it out"


def recorded_config(path: Path) -> str | None:
    """YAML of the config that a record was made with, if the record has it."""
    if not is_ledger(path):
        return config_in(path)
    file = (path if path.is_dir() else path.parent) / CONFIG_FILE
    return file.read_text(encoding="utf-8") if file.is_file() else None


def replay_differences(config: Config, recorded: Config) -> list[str]:
    """Differences on which the weights depend."""
    schedules = {part.optim.lr_scheduler_type for c in (config, recorded) for part in (c.actor, c.critic)}
    scheduled = schedules != {"constant"} or max(c.algorithm.kl_warmup_ratio for c in (config, recorded)) > 0
    matters = (*REPLAY_MATTERS, *(["run.max_steps"] if scheduled else []))
    found = [d for d in differences(config, recorded) if d.startswith(matters)]
    return [d for d in found if not d.startswith(REPLAY_MAY_CHANGE)]


def _redis(url: str | None) -> Iterator[str]:
    if url is None:
        return
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 6379
    except ValueError as e:
        yield f"run.redis_url: {e}; use redis://[:password@]host:port"
        return
    if parts.scheme not in ("redis", "rediss", "unix") or not (host or parts.scheme == "unix"):
        yield "run.redis_url: use redis://[:password@]host:port"
    elif parts.scheme == "redis":
        try:
            with socket.create_connection((str(host), port), timeout=_ANSWER_S) as s:
                s.sendall(b"PING\r\n")
                if s.recv(64)[:1] not in (b"+", b"-"):
                    yield f"run.redis_url: what answers at {host}:{port} is not Redis"
        except OSError as e:
            yield f"run.redis_url: {host}:{port} does not answer ({e.strerror or e}); start Redis or leave the key out"


# ---------------------------------------------------------------- the run directory
def run_dir_faults(config: Config) -> list[str]:
    """Why this config cannot run in its directory: not writable, another run's, or in use. Leaves nothing."""
    folder = Path(config.run.dir or "")
    parent = next(p for p in (folder, *folder.parents) if p.exists())
    if not parent.is_dir():
        return [f"run.dir={folder}: {parent} is not a folder"]
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix=".leeway-"):  # os.access() says yes to root everywhere
            pass
    except OSError as e:
        return [f"run.dir={folder}: cannot write in {parent} ({e.strerror}); choose another run.dir"]
    return [*_running_here(folder), *_earlier_run(config, folder)]


def _running_here(folder: Path) -> Iterator[str]:
    try:
        with open(folder / LOCK_FILE, "rb") as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return
    except BlockingIOError:
        yield f"run.dir={folder}: a run is going on in it; stop it (launch.py stop {folder}) or choose another run.dir"


def _earlier_run(config: Config, folder: Path) -> Iterator[str]:
    earlier = folder / CONFIG_FILE
    if not earlier.exists():
        there = sorted(f.name for f in folder.glob("[!.]*") if f.name not in _BEFORE_CONFIG)
        if there:
            some = ", ".join(there[:3]) + (", …" if len(there) > 3 else "")
            yield f"run.dir={folder}: has {some} but no {CONFIG_FILE}, so it is no run's; choose another run.dir"
        return
    if config.trainer.resume_mode == "off":
        yield f"run.dir={folder}: already has a run; set trainer.resume_mode=auto or choose another run.dir"
        return
    try:
        other = load_config([str(earlier)], [])
    except ConfigError as e:
        yield f"run.dir={folder}: its {CONFIG_FILE} cannot be read ({e.faults[0]}); choose another run.dir"
        return
    changed = [d for d in differences(config, other) if not d.startswith(MAY_CHANGE)]
    if changed:
        yield f"run.dir={folder}: has a run of another config (here != there); choose another run.dir"
        yield from (f"  {d}" for d in changed)


def save_config(config: Config, folder: Path) -> None:
    """Leave in the run's folder what continuing it, replaying it and going back in it need."""
    tree = config.model_dump(mode="json")
    tree["run"]["redis_url"] = None  # may hold a password
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    fresh = folder / f"{CONFIG_FILE}.tmp"
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(folder / CONFIG_FILE)


def save_config_if_new(config: Config, folder: Path) -> None:
    """For a role that may have been started alone: a launcher's file also has what never travels through Redis."""
    try:
        standing = Config.model_validate(yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError):
        standing = None
    own = (*HOST_KEYS, "run.redis_url")  # of each host
    if standing is None or any(not d.startswith(own) for d in differences(config, standing)):
        save_config(config, folder)


def is_continued(folder: Path) -> bool:
    """Whether the folder already has a run."""
    return (folder / CONFIG_FILE).exists()


def occupy(folder: Path) -> IO[bytes]:
    """Make the run directory and hold its lock until the returned file is closed or the process ends.

    Raises:
        ConfigError: it cannot be made or written, or another launcher holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK_FILE, "ab")  # noqa: SIM115 (kept open)
    except OSError as e:
        raise ConfigError(f"run.dir={folder}: cannot be written ({e.strerror}); choose another run.dir") from e
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(list(_running_here(folder)) or f"run.dir={folder}: is in use") from None
    return lock
