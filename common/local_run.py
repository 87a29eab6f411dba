"""A whole run on this host: Redis-compatible server, broker, learner, generators, from start to end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from types import FrameType

from common import logs, preflight
from common.config import HOST_KEYS, Config
from common.console import make_console
from common.control import Control
from common.errors import ControlError
from common.processes import child_environment, kill_descendants, spawn, terminate_workers
from common.redis_server import start_server
from common.roles import CONNECT_S, ERROR_FILE, read_config, store_config
from common.summary import Summary
from common.supervise import Child, End, Outcome, Start, Supervisor, read_own_error

ROOT = Path(__file__).resolve().parent.parent
RUN_FILE = "run.json"
ROLES = ("broker", "learner", "generators")
INTERRUPTED = 130
_READS_S = 2.5  # a role has read the desired state by then
_LAST_S = 2.0  # for broker and Redis, once the learner is down
_log = logging.getLogger(logs.LOGGER)


def role_environment(redis_url: str) -> dict[str, str]:
    """What every role's process gets on top of this one's environment."""
    path = os.environ.get("PYTHONPATH")
    return {
        "LEEWAY_REDIS_URL": redis_url,  # not in `ps`, as an argument would be
        "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT),
        "PYTHONSAFEPATH": "1",  # a `common` in the user's folder is not ours
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Nothing of torch.distributed listens on other interfaces: the agent's store is a file,
        # and it makes no TCPStore for its workers.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def role_command(role: str, config: Config, folder: Path, arguments: list[str]) -> list[str]:
    """The command line of a role; the learner's ranks are started by torch.distributed.run."""
    if role != "learner":
        return [sys.executable, "-m", role, *arguments]
    place = folder / "rendezvous"  # of the agent: its store, and a folder for logs that it wants to have
    place.mkdir(exist_ok=True)
    name = uuid.uuid4().hex[:8]
    return [
        sys.executable, "-m", "torch.distributed.run",
        "--nnodes=1", f"--nproc-per-node={config.trainer.nproc_per_node}", "--max-restarts=0",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={place / name}", "--rdzv-conf=store_type=file",
        f"--rdzv-id={name}", f"--log-dir={place}", "--local-addr=127.0.0.1",
        f"--shutdown-timeout={max(1, int(config.run.stop_timeout_s))}",
        "-m", "learner", *arguments,
    ]  # fmt: skip


def host_overrides(config: Config) -> list[str]:
    """The values that never travel through Redis, for the command lines of this host's roles."""
    def resolved(path: str | None) -> str | None:
        return json.dumps(str(Path(path).expanduser().resolve())) if path else None

    values = {
        "reward.custom_function.path": resolved(config.reward.custom_function.path),
        "model.trust_remote_code": "true" if config.model.trust_remote_code else None,
        "trainer.resume_from_path": resolved(config.trainer.resume_from_path),
    }
    return [f"{key}={value}" for key in HOST_KEYS if (value := values[key])]


class LocalRun:
    """One run from start to end; ``execute`` returns the exit code."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = Path(config.run.dir or "")
        self.supervisor = Supervisor(self.folder / "logs", config.run.max_restarts)
        self._taken_over = False  # before that a verb must not find another run here
        self._url = ""
        self._started = time.time()

    def execute(self) -> int:
        """Raises LeewayError before anything runs; afterwards the exit code says it."""
        lock = preflight.occupy(self.folder)
        continued = preflight.is_continued(self.folder)
        (self.folder / "logs").mkdir(exist_ok=True)
        self._log_to_file()
        self._handle_signals()
        try:
            return self._execute(continued)
        finally:
            self.supervisor.kill_all()
            self._remove_rendezvous()
            if self._taken_over:
                self._write_run_file()
            lock.close()

    def _execute(self, continued: bool) -> int:
        self._start_redis()
        control = Control(self._url, str(self.config.run.id))
        try:
            self._take_over(control)
            preflight.save_config(self.config, self.folder)
            self._taken_over = True
            self.supervisor.on_change = self._write_run_file
            self._write_run_file()
            self.supervisor.on_restart = lambda name, what: control.event("launcher", f"{name}: {what}")
            self.console = make_console(self.config, self.folder, control.entries, control.desired)
            verb = "continues" if continued else "starts"
            self.console.note(f"run {self.config.run.id} {verb} in {self.folder}")
            try:
                for role in ("learner",) if self.config.replay.rollouts else ROLES:
                    self.supervisor.add(role, self._starter(role))
                outcome = self.supervisor.watch(
                    lambda: self._tick(control), lambda child, end: self._finishes(control, child, end)
                )
                self._end(control, outcome)
            finally:
                self.console.close()
        finally:
            control.close()
        return self._report(outcome)

    # ------------------------------------------------------------ start
    def _start_redis(self) -> None:
        if self.config.run.redis_url:
            self._url = self.config.run.redis_url
            return
        self._url, process = start_server(self.folder)
        self.supervisor.adopt("redis", process, lambda env, out: start_server(self.folder, url=self._url)[1])

    def _take_over(self, control: Control) -> None:
        """Make sure nobody is there, forget what an earlier launch left, store the config."""
        control.refresh()
        if there := ", ".join(e.name for e in control.entries()):
            raise ControlError(
                f"run {control.run_id} at {control.address} already has {there}; stop them or choose another run.id"
            )
        control.forget_run()
        store_config(control, self.config)
        control.event("launcher", "starts the run")

    def _starter(self, role: str) -> Start:
        arguments = ["--run-id", str(self.config.run.id), *host_overrides(self.config)]

        def start(env: dict[str, str], out: int) -> subprocess.Popen[bytes]:
            if role == "learner":
                self._remove_rendezvous()
            command = role_command(role, self.config, self.folder, arguments)
            return spawn(command, env={**env, **role_environment(self._url)}, stdout=out, stderr=out)

        return start

    def _remove_rendezvous(self) -> None:
        shutil.rmtree(self.folder / "rendezvous", ignore_errors=True)

    def _write_run_file(self) -> None:
        """``run.json``, readable by its owner only: where a verb finds the run."""
        content = {
            "run_id": self.config.run.id, "redis_url": self._url, "host": socket.gethostname(),
            "started": round(self._started, 3), "pids": {"launcher": os.getpid(), **self.supervisor.pids()},
        }  # fmt: skip
        fresh = self.folder / f"{RUN_FILE}.tmp"
        fresh.unlink(missing_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as f:
            json.dump(content, f, indent=1)
        os.replace(fresh, self.folder / RUN_FILE)

    def _log_to_file(self) -> None:
        """The launcher's own lines go where the roles' go; the console shows them from there."""
        log = logs.set_up("launcher", self.folder / "logs")
        for handler in list(log.handlers):
            if not isinstance(handler, logging.FileHandler):
                log.removeHandler(handler)

    def _handle_signals(self) -> None:
        def on_signal(_number: int, _frame: FrameType | None) -> None:
            self.supervisor.interrupts += 1
            if self.supervisor.interrupts > 1:
                sys.stdout.write("\x1b[?25h" if sys.stdout.isatty() else "")  # the live table hides the cursor
                sys.stdout.flush()
                self.supervisor.kill_all()
                os._exit(INTERRUPTED)
            self.supervisor.wake()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, on_signal)

    # ------------------------------------------------------------ middle
    def _tick(self, control: Control) -> bool:
        """Show what is new; False once somebody wants the run to stop."""
        for child in self.supervisor.children.values():
            child.ready = child.ready or self._works(control, child)
        self.console.tick()
        return control.desired() != "stopped"

    def _works(self, control: Control, child: Child) -> bool:
        """Whether this incarnation of a role has come to its real work."""
        role = "generator" if child.name == "generators" else child.name
        mine = [e for e in control.entries(role) if float(e.fields.get("since", "0")) >= child.started_at]
        return any(e.address is not None if role == "broker" else e.version >= 0 for e in mine)

    def _finishes(self, control: Control, child: Child, end: End) -> bool:
        """The learner ends the run by ending well; the others end well only once the run is stopped."""
        if end.returncode != 0:
            return False
        control.refresh()
        return child.name == "learner" or control.desired() == "stopped"

    # ------------------------------------------------------------ end
    def _end(self, control: Control, outcome: Outcome) -> None:
        """Everything down: learner first (it saves), generators meanwhile, then broker and Redis."""
        deadline = time.monotonic() + max(1.0, self.config.run.stop_timeout_s - _LAST_S)
        if self.supervisor.interrupts:
            self.console.note("stopping; once more Ctrl-C kills at once")
        with contextlib.suppress(ControlError):
            if control.desired() != "stopped":
                control.set_desired("stopped", "launcher")
        self.supervisor.signal(signal.SIGTERM, "generators")
        self._end_learner(control, deadline)
        self.supervisor.signal(signal.SIGTERM, "broker")
        self._await(["broker", "generators"], max(deadline, time.monotonic() + _LAST_S))
        self.supervisor.signal(signal.SIGTERM, "redis")
        self._await(["redis"], time.monotonic() + 1.0)
        self.supervisor.kill_all()

    def _end_learner(self, control: Control, deadline: float) -> None:
        """It reads the desired state itself; a signal only if it has not begun, or does not (one might hit its end)."""
        learner = self.supervisor.children.get("learner")
        if learner is None or learner.process is None:
            return
        if control.connected and (learner.ready or control.entries("learner")):
            soon = min(deadline, time.monotonic() + _READS_S)
            self.supervisor.wait_for_end(["learner"], soon, self._show)
        if learner.alive:
            terminate_workers(learner.process)
        self._await(["learner"], deadline)

    def _await(self, names: list[str], deadline: float) -> None:
        if not self.supervisor.wait_for_end(names, deadline, self._show):
            alive = [n for n in names if n in self.supervisor.children and self.supervisor.children[n].alive]
            for name in alive:
                _log.warning("%s did not end in time and is killed", name)

    def _show(self) -> bool:
        self.console.tick()
        return True

    def _report(self, outcome: Outcome) -> int:
        """The summary, and last of all the error if there is one."""
        summary = Summary.read(self.folder, newer_than=self._started)
        if summary is not None and summary.step > 0:
            print(summary.paragraph(self.folder), flush=True)
        if not outcome.gave_up or outcome.end is None:
            return INTERRUPTED if self.supervisor.interrupts else 0
        sys.stdout.flush()
        text = str(outcome.end).splitlines()
        log = self.folder / "logs" / f"{outcome.child}.out"
        print(f"\n{outcome.child} ended the run; its output is in {log}", file=sys.stderr)
        print("\n  ".join([f"{outcome.child}: error: {text[0]}", *text[1:]]), file=sys.stderr, flush=True)
        return outcome.end.own_exit_code or 1


def run_alone(
    role: str, config: Config | None, redis_url: str, arguments: list[str], *, run_id: str | None = None
) -> int:
    """One role in the foreground, not supervised, until it ends; its own error is the last thing it says.

    A learner without a config of its own has as many ranks as the run's config says, once there is one.
    """
    os.environ.update(role_environment(redis_url))
    if role != "learner":
        command = role_command(role, Config(), Path(), arguments)
        os.execve(command[0], command, _without_supervisor(child_environment()))
    if config is None and run_id is not None:
        try:
            config = config_of(redis_url, run_id)
        except KeyboardInterrupt:
            return INTERRUPTED
    with tempfile.TemporaryDirectory(prefix="leeway-") as folder:
        return _run_agent(role_command(role, config or Config(), Path(folder), arguments), Path(folder))


def config_of(redis_url: str, run_id: str) -> Config:
    """The config of a run, once one of its roles has stored it. Raises ControlError, DeadlineError."""
    control = Control(redis_url, run_id, deadline_s=CONNECT_S)
    try:
        config, _ = read_config(control.wait_for_config(deadline_s=Config().run.start_timeout_s))
        return config
    finally:
        control.close()


def become(module: str, arguments: list[str]) -> int:
    """Go on as another program of ours, in the foreground."""
    os.environ.update({k: v for k, v in role_environment("").items() if k != "LEEWAY_REDIS_URL"})
    command = [sys.executable, "-m", module, *arguments]
    os.execve(command[0], command, _without_supervisor(child_environment()))


def _run_agent(command: list[str], folder: Path) -> int:
    """torch.distributed.run in the foreground: signals go to its workers, their own error is said again last."""
    error_file = folder / "learner.error"
    agent = spawn(command, env=child_environment({ERROR_FILE: str(error_file)}))
    interrupts = 0

    def on_signal(number: int, _frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 1:
            kill_descendants()
        else:
            terminate_workers(agent)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    code = agent.wait()
    kill_descendants()
    own = read_own_error(error_file)
    if own is None:
        return code if code >= 0 else 128 - code
    print(f"learner: error: {own[0]}", file=sys.stderr, flush=True)
    return own[1]


def _without_supervisor(env: dict[str, str]) -> dict[str, str]:
    """A role in the foreground of a shell ends by signals, not with whatever started the shell."""
    return {k: v for k, v in env.items() if k not in ("LEEWAY_PDEATHSIG", ERROR_FILE)}
