"""``python -m broker.rollback RUN_DIR [STEP]``: a run goes back to one of its checkpoints.

One transaction of the ledger decides it; the learner that goes on finds it there. Of a run that is stopped it
is made here; a broker that is at work makes it itself, and its learner ends, to come back from the checkpoint.
"""

from __future__ import annotations

import argparse
import getpass
import os
import socket
import sys
import time
from contextlib import closing
from pathlib import Path

import yaml

from broker.book import ROLLED_BACK
from broker.database import HeldError
from broker.ledger import Ledger
from broker.records import NEVER, Rules
from broker.store import Store
from common.archive import LEDGER, Archive
from common.config import Config
from common.errors import CheckpointError, ConfigError, DeadlineError, LedgerError, LeewayError
from common.hashes import MANIFEST, verify
from common.preflight import CONFIG_FILE, occupy
from common.sockets import Dealer
from common.wire import LEARNER_OPS, decode, encode

BROKER_S = 15.0


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
    """Have it decided: in the ledger of ``folder``, or by the broker that has it.

    Raises:
        ConfigError: no run there, no step given, or one without a checkpoint that is whole.
        LedgerError: the ledger is damaged, or refuses. DeadlineError: the run goes on, but not its broker.
    """
    if not (folder / LEDGER).is_file() or not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{folder}: no run here ({LEDGER} or {CONFIG_FILE} is missing)")
    config, who = read_config(folder / CONFIG_FILE), f"{getpass.getuser()}@{socket.gethostname()}"
    if to is None:
        print(f"{folder}: {choices(checkpoints(folder)[0])}")
        return 0
    check_step(folder, to)
    try:
        with occupy(folder), closing(open_store(folder, config)) as store:
            step, version, dropped = decide(config, store, to, who)
        then = "started again, it"
    except (ConfigError, HeldError):  # a launcher is in the folder, or a broker has the ledger
        step, version, dropped = ask_broker(folder, config, to, who)
        then = "its learner comes back from there; it"
    given_up = f"steps {to + 1} to {step - 1} are given up" if to < step - 1 else "no step is given up"
    print(f"{folder}: rolled back to the checkpoint of step {to}; {given_up}; {dropped} groups dropped (rolled_back)")
    print(f"{then} goes on with step {step + 1} at version {version}")
    return 0


def decide(config: Config, store: Store, to: int, who: str) -> tuple[int, int, int]:
    """(number of the rollback's row, version from which the run goes on, groups dropped)"""
    ledger = open_ledger(config, store)
    version = ledger.roll_back(to, who=who, at=time.time())
    changes = ledger.take_changes()
    store.commit(changes)
    dropped = sum(a.reason == ROLLED_BACK and a.lane == "train" for a in changes.attempts) if changes else 0
    return ledger.counters.step, version, dropped


def ask_broker(folder: Path, config: Config, to: int, who: str) -> tuple[int, int, int]:
    """`decide`, by the broker of a run that goes on.

    Raises:
        DeadlineError: it does not answer. LedgerError: it refuses.
    """
    with closing(Archive(folder)) as archive:
        port = archive.broker_port()
    if not port:
        raise LedgerError(f"{folder}: the run has only begun; try again")
    address = f"tcp://{config.run.bind_host}:{port}"
    with closing(Dealer(address, f"rollback-{os.getpid()}-{time.time_ns()}".encode())) as dealer:
        dealer.send(encode("rollback", id=1, run=str(config.run.id), epoch=-1, step=to, who=who, lr_factor=1.0))
        frames = dealer.receive(BROKER_S)
    if frames is None:
        raise DeadlineError(
            f"the broker at {address}", BROKER_S, f"it may be starting again: try again, or stop the run ({folder})"
        )
    op, fields, _ = decode(frames, LEARNER_OPS)
    if op != "rolled_back":
        raise LedgerError(f"the broker at {address} refuses: {fields.get('detail', op)}")
    return fields["step"], fields["version"], fields["dropped"]


def read_config(path: Path) -> Config:
    try:
        return Config.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError) as e:
        raise ConfigError(f"{path}: cannot be read ({str(e).splitlines()[0]})") from e


def open_store(folder: Path, config: Config) -> Store:
    return Store(folder / LEDGER, identity={}, fsync=True, keep_bytes=config.ledger.keep_bytes)


def open_ledger(config: Config, store: Store) -> Ledger:
    """For a rollback alone: nothing is too old for it."""
    rules = Rules(
        group_size=config.samples_per_group, batch_size=config.data.train_batch_size,
        max_attempts=config.ledger.max_attempts, lease_timeout_s=config.ledger.lease_timeout_s,
        lease_limit_s=config.ledger.lease_limit_s,
    )  # fmt: skip
    return Ledger(rules, limit=NEVER, snapshot=store.snapshot())


def check_step(folder: Path, to: int) -> None:
    """Raises ConfigError, with the steps that can be gone back to."""
    whole, abandoned = checkpoints(folder)
    if to in abandoned:
        raise ConfigError(f"{folder}: step {to} was given up by an earlier rollback; {choices(whole)}")
    if to not in whole:
        raise ConfigError(f"{folder}: step {to} has no valid checkpoint; {choices(whole)}")
    try:
        verify(checkpoint(folder, to))
    except CheckpointError as e:
        raise ConfigError(f"{e}; choose another step; {choices(whole)}") from e


def checkpoints(folder: Path) -> tuple[list[int], set[int]]:
    """Steps that have a finished checkpoint, and steps that were given up."""
    with closing(Archive(folder)) as archive:
        valid, abandoned = archive.checkpoints(), archive.abandoned_steps()
    return [step for step in valid if (checkpoint(folder, step) / MANIFEST).is_file()], abandoned


def choices(whole: list[int]) -> str:
    return f"checkpoints to go back to: {', '.join(map(str, whole)) or 'none'}"


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
