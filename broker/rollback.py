"""``python -m broker.rollback RUN_DIR [STEP]``: a run that is stopped goes back to one of its checkpoints.

One transaction of the ledger decides it; the learner that continues the run finds it there. The lock of
the ledger keeps a broker at work out of this.
"""

from __future__ import annotations

import argparse
import getpass
import hashlib
import json
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import yaml

from broker.database import HeldError
from broker.ledger import Ledger
from broker.records import NEVER, Rules
from broker.store import Store
from common.archive import LEDGER
from common.config import Config
from common.errors import ConfigError, LedgerError, LeewayError
from common.preflight import CONFIG_FILE, occupy

MANIFEST = "manifest.json"  # of a checkpoint: size and SHA-256 of each file; written last


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    try:
        return roll_back(Path(args.folder), args.step)
    except LeewayError as e:
        print(f"launch.py: error: {e}", file=sys.stderr)
        return e.exit_code


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="launch.py rollback", allow_abbrev=False)
    made.add_argument("folder")
    made.add_argument("step", type=int, nargs="?")
    return made


def roll_back(folder: Path, to: int | None) -> int:
    """Decide it in the ledger of ``folder``.

    Raises:
        ConfigError: no run there, no step given, or one without a checkpoint that is whole.
        LedgerError: the run is going on; its ledger is damaged.
    """
    if not (folder / LEDGER).is_file() or not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{folder}: no run here ({LEDGER} or {CONFIG_FILE} is missing)")
    config = read_config(folder / CONFIG_FILE)
    with occupied(folder), closing(open_store(folder, config)) as store:
        ledger = open_ledger(config, store)
        to = checked_step(folder, ledger, to)
        last = ledger.counters.step
        version = ledger.roll_back(to, who=f"{getpass.getuser()}@{socket.gethostname()}", at=time.time())
        changes = ledger.take_changes()
        store.commit(changes)
    given_up = f"steps {to + 1} to {last} are given up" if to < last else "no step is given up"
    dropped = sum(a.reason == "rolled_back" for a in changes.attempts) if changes else 0
    print(f"{folder}: rolled back to the checkpoint of step {to}; {given_up}; {dropped} groups dropped (rolled_back)")
    print(f"started again, it goes on with step {last + 2} at version {version}")
    return 0


def read_config(path: Path) -> Config:
    try:
        return Config.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError) as e:
        raise ConfigError(f"{path}: cannot be read ({str(e).splitlines()[0]})") from e


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """No launcher runs in the folder meanwhile; its roles, wherever they were started, need the ledger's lock."""
    try:
        lock = occupy(folder)
    except ConfigError as e:
        raise LedgerError(f"{folder}: the run is going on; stop it first: launch.py stop {folder}") from e
    with lock:
        yield


def open_store(folder: Path, config: Config) -> Store:
    try:
        return Store(folder / LEDGER, identity={}, fsync=True, keep_bytes=config.ledger.keep_bytes)
    except HeldError as e:
        raise LedgerError(f"{folder}: the run is going on ({e}); stop it first: launch.py stop {folder}") from e


def open_ledger(config: Config, store: Store) -> Ledger:
    """For a rollback alone: nothing is too old for it."""
    rules = Rules(
        group_size=config.samples_per_group, batch_size=config.data.train_batch_size,
        max_attempts=config.ledger.max_attempts, lease_timeout_s=config.ledger.lease_timeout_s,
        lease_limit_s=config.ledger.lease_limit_s,
    )  # fmt: skip
    return Ledger(rules, limit=NEVER, snapshot=store.snapshot())


def checked_step(folder: Path, ledger: Ledger, to: int | None) -> int:
    """Raises ConfigError, with the steps that can be gone back to."""
    whole = [step for step in ledger.checkpoints if (checkpoint(folder, step) / MANIFEST).is_file()]
    choices = f"checkpoints to go back to: {', '.join(map(str, whole)) or 'none'}"
    if to is None:
        raise ConfigError(f"{folder}: say to which step; {choices}")
    if any(first <= to <= last for first, last in ledger.abandoned):
        raise ConfigError(f"{folder}: step {to} was given up by an earlier rollback; {choices}")
    if to not in whole:
        raise ConfigError(f"{folder}: step {to} has no valid checkpoint; {choices}")
    if fault := fault_of(checkpoint(folder, to)):
        raise ConfigError(f"{fault}; choose another step; {choices}")
    return to


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step}"


def fault_of(path: Path) -> str | None:
    """Why a checkpoint is not what was written; None: it is whole."""
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, expected in files.items():
            with open(path / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                    return f"{path / name}: is damaged"
    except (OSError, ValueError, KeyError, TypeError) as e:
        return f"{path}: is not whole ({e})"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
