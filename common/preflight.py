"""Checks that touch the world, before anything heavy is imported or written.

Each function yields faults; ``check`` runs them all so that a user sees everything at once.
"""

from __future__ import annotations

import ast
import fcntl
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from common.config import Config
from common.data import open_rows
from common.errors import ConfigError
from common.loading import differences, examine_config, load_config

CONFIG_FILE = "config.yaml"
LOCK_FILE = "run.lock"
# What may differ when a run directory is continued.
MAY_CHANGE = (
    "run.max_steps", "run.goal_score", "run.goal_window", "run.redis_url", "run.stop_timeout_s", "run.start_timeout_s",
    "run.max_restarts", "generators.count", "trainer.save_freq", "trainer.test_freq", "trainer.max_ckpt_to_keep",
    "trainer.logger", "trainer.project_name", "trainer.experiment_name", "ledger.fsync", "ledger.keep_bytes",
)  # fmt: skip
_RUN_FILES = ("ledger.sqlite", "metrics.jsonl", "checkpoints")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_ANSWER_S = 1.0


def checked_config(paths: list[str], overrides: list[str], *, folder: bool = True) -> Config:
    """Read the config and check it against this machine.

    folder: also check the run directory (a role that joins a run finds it in use).

    Raises:
        ConfigError: every fault of the config and of the world, at once.
    """
    config, faults = examine_config(paths, overrides)
    faults += world_faults(config)
    if folder:
        faults += run_dir_faults(config)
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))
    return config


def world_faults(config: Config) -> list[str]:
    """What the config names and this machine does not have."""
    return [*_data(config), *_model(config), *_reward(config), *_redis(config.run.redis_url)]


def _data(config: Config) -> Iterator[str]:
    for split in ("train", "val"):
        if split == "train" and not config.data.task and not config.data.train_files:
            continue  # already a fault of the config
        try:
            open_rows(config, "train" if split == "train" else "val")
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
    names = set(_top_level_names(tree))
    if name not in names:
        functions = sorted(n.name for n in tree.body if isinstance(n, ast.FunctionDef))
        yield f"reward.custom_function.name={name}: {path} does not define it; it has {', '.join(functions) or 'none'}"


def _top_level_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (a.asname or a.name for a in node.names)
        else:
            yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


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
        there = [name for name in _RUN_FILES if (folder / name).exists()]
        if there:
            yield f"run.dir={folder}: has {', '.join(there)} but no {CONFIG_FILE}; choose another run.dir"
        return
    if config.trainer.resume_mode == "off":
        yield f"run.dir={folder}: already has a run; set trainer.resume_mode=auto or choose another run.dir"
        return
    try:
        other = load_config([str(earlier)], [])
    except ConfigError as e:
        yield f"run.dir={folder}: its {CONFIG_FILE} cannot be read ({e.faults[0]}); choose another run.dir"
        return
    changed = [d for d in differences(config, other) if d.split(":")[0] not in MAY_CHANGE]
    if changed:
        yield f"run.dir={folder}: has a run of another config (here != there); choose another run.dir"
        yield from (f"  {d}" for d in changed)


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
