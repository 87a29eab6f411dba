"""Run control in Redis: config, registry, desired state, live limits, events. The only redis import.

Redis advises. One thread per process writes this process's registry entry and reads everything
else about once a second; all reads are answered from that copy. When Redis is gone the last copy
stays and the thread keeps trying; when it returns, even empty, everything this process knows
(its entry, the config, the model folder, the desired state) is written back where missing.

Keys, all under ``leeway:<run>:``, all readable with ``redis-cli``:
    config          the run's config as JSON, stored by the first role that was given one
    desired         running | paused | draining | stopped
    limits          hash of live limits (staleness.max, …)
    model           folder with the model's config and tokenizer
    model_files     digest of these files (``common/model_files.py``)
    members         set of the names in the registry
    registry:<name> hash: role, name, pid, host, address, state, version, …; expires
    events          stream of who did what
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from common.errors import ControlError, DeadlineError, Stopped
from common.logs import LOGGER
from common.redis_server import start_server as start_server

REFRESH_S = 1.0
TTL_S = 10
EVENTS_KEPT = 10_000
_T = TypeVar("_T")
Desired = Literal["running", "paused", "draining", "stopped"]
DESIRED: tuple[Desired, ...] = ("running", "paused", "draining", "stopped")


@dataclass(frozen=True)
class Entry:
    """One process in the registry."""

    role: str  # "broker", "learner", "generator"
    name: str
    pid: int
    host: str
    address: str | None  # "tcp://127.0.0.1:41233"
    state: str  # what it does now: "waits for broker", "steps", …
    version: int  # weights held; -1: none
    fields: dict[str, str] = field(default_factory=dict)  # everything else


@dataclass
class _View:
    """What was read last."""

    entries: dict[str, Entry] = field(default_factory=dict)
    desired: Desired = "running"
    limits: dict[str, str] = field(default_factory=dict)
    model: str | None = None
    model_files: str = ""
    config: str | None = None


class Control:
    """This process's side of run control. Thread-safe.

    Consumes: the keys above. Produces: this process's entry, events. Waits for: Redis, with a
    timeout on every call. Unblocked by: the refresh thread, which notifies all waits.
    """

    def __init__(
        self, url: str, run_id: str, *, deadline_s: float = 10.0, patience_s: float = 0.0,
        stop: threading.Event | None = None,
    ) -> None:  # fmt: skip
        """Connects.

        patience_s: a request that Redis does not answer is made again for so long.

        Raises:
            ControlError: naming the address, if Redis cannot be reached within ``deadline_s``.
        """
        self.url, self.run_id = url, run_id
        self.address = _without_password(url)
        self.connected = False
        self._patience_s = patience_s
        self._prefix = f"leeway:{run_id}:"
        self._log = logging.getLogger(LOGGER)
        self._view = _View()
        self._own: dict[str, str] = {}
        self._kept: dict[str, str] = {}  # key -> value written back where Redis lost it
        self._changed = threading.Condition()
        self._exchanging = threading.Lock()  # one exchange at a time, so that an older view never replaces a newer one
        self._work = threading.Event()
        self._closing = False
        self._grace_until = 0.0
        self._callbacks: list[Callable[[], None]] = []
        self._incarnation = f"{os.getpid()}-{time.time_ns()}"
        try:
            self._redis: redis.Redis = redis.Redis.from_url(
                url, decode_responses=True, socket_timeout=2.0, socket_connect_timeout=2.0,
                retry=Retry(NoBackoff(), 0), health_check_interval=0,
            )  # fmt: skip
        except ValueError as e:
            raise ControlError(f"{self.address}: not a Redis URL ({e}); use redis://[:password@]host:port") from e
        self._connect(deadline_s, stop)
        self._thread = threading.Thread(target=self._refresh_for_ever, name="control", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ registry
    def register(self, role: str, name: str, *, address: str | None = None, **fields: Any) -> None:
        """Enter this process into the registry; kept alive by the refresh thread."""
        now = f"{time.time():.3f}"
        own = {
            "role": role, "name": name, "pid": os.getpid(), "host": socket.gethostname(),
            "address": address or "", "state": "starts", "version": -1,
            "incarnation": self._incarnation, "since": now, "state_since": now, **fields,
        }  # fmt: skip
        with self._changed:
            self._own = {k: str(v) for k, v in own.items()}
        self._refresh_now()

    def update(self, **fields: Any) -> None:
        """Change fields of this process's entry (``state=``, ``version=``, ``address=`` …)."""
        new = {k: "" if v is None else str(v) for k, v in fields.items()}
        with self._changed:
            if not self._own or self._own.items() >= new.items():
                return
            if new.get("state", self._own["state"]) != self._own["state"]:
                new["state_since"] = f"{time.time():.3f}"
            self._own.update(new)
        self._work.set()

    def unregister(self) -> None:
        """Leave the registry, unless a newer process has taken the name."""
        with self._changed:
            own, self._own = self._own, {}
        if not own:
            return
        with contextlib.suppress(redis.RedisError):
            key = self._key(f"registry:{own['name']}")
            if self._redis.hget(key, "incarnation") == self._incarnation:
                pipe = self._redis.pipeline()
                pipe.delete(key)
                pipe.srem(self._key("members"), own["name"])
                pipe.execute()

    def entries(self, role: str | None = None) -> list[Entry]:
        """Who is there, as read at most about a second ago."""
        with self._changed:
            return [e for e in self._view.entries.values() if role in (None, e.role)]

    def entry(self, name: str) -> Entry | None:
        with self._changed:
            return self._view.entries.get(name)

    def wait_for(self, role: str, *, deadline_s: float, stop: threading.Event | None = None, why: str = "") -> Entry:
        """The first entry of ``role`` that has an address.

        Raises:
            DeadlineError: naming the role, the run and Redis' address.
            Stopped: when ``stop`` is set.
        """

        def found() -> Entry | None:
            return next((e for e in self._view.entries.values() if e.role == role and e.address), None)

        what = f"the {role} of run {self.run_id} in the registry at {self.address}" + (f" ({why})" if why else "")
        return self._wait(found, what, deadline_s, stop, f"is a {role} started with the same --redis-url and --run-id?")

    # ------------------------------------------------------------ config and model
    def store_config(self, text: str) -> str:
        """Store the run's config if there is none yet; returns the one that stands."""
        stored = self._call(lambda r: r.set(self._key("config"), text, nx=True, get=True))
        standing = str(stored) if stored else text
        with self._changed:
            self._kept["config"] = standing
        return standing

    def wait_for_config(self, *, deadline_s: float, stop: threading.Event | None = None) -> str:
        """The stored config, once some role that was given one has stored it."""
        what = f"the config of run {self.run_id} at {self.address}"
        text = self._wait(
            lambda: self._view.config, what, deadline_s, stop, "give the config to (exactly) one of the roles"
        )
        with self._changed:
            self._kept["config"] = text
        return text

    def publish_model(self, path: str, digest: str) -> None:
        """Tell the generators the folder with the model's config and tokenizer, and the digest of these files."""
        values = {"model": path, "model_files": digest}
        with self._changed:
            self._kept.update(values)
        with contextlib.suppress(redis.RedisError):
            self._redis.mset({self._key(name): value for name, value in values.items()})
        self._refresh_now()

    def model(self) -> str | None:
        with self._changed:
            return self._view.model

    def model_digest(self) -> str:
        """Of the files that engines start from; empty before they are announced."""
        with self._changed:
            return self._view.model_files

    def wait_for_model(
        self, deadline_s: float, stop: threading.Event | None = None, *, after_warmup: bool = False
    ) -> str:
        """The model folder, once the learner has published it.

        after_warmup: it may train it first, for as long as it likes: the deadline runs only while no learner is in the
        registry.
        """

        def warms_up() -> bool:
            return after_warmup and any(e.role == "learner" for e in self._view.entries.values())

        what = f"the model folder of run {self.run_id} at {self.address}"
        remedy = "the learner publishes it at its start"
        return self._wait(lambda: self._view.model, what, deadline_s, stop, remedy, pauses=warms_up)

    # ------------------------------------------------------------ desired state, limits, events
    def desired(self) -> Desired:
        with self._changed:
            return self._view.desired

    def set_desired(self, state: Desired, who: str) -> None:
        """Raises ControlError when Redis cannot be reached."""
        if state not in DESIRED:
            raise ControlError(f"desired state {state!r}: use one of {', '.join(DESIRED)}")
        self._call(lambda r: r.set(self._key("desired"), state))
        with self._changed:
            self._view.desired = state
        self.event(who, f"desired state: {state}")
        self._refresh_now()

    def limit(self, name: str) -> Any:
        """A live limit (``staleness.max``, …) or None if nobody set it."""
        with self._changed:
            text = self._view.limits.get(name)
        if text is None:
            return None
        try:
            return json.loads(text)
        except ValueError:
            return text

    def limits(self) -> dict[str, Any]:
        """All live limits that were set."""
        with self._changed:
            names = list(self._view.limits)
        return {name: self.limit(name) for name in names}

    def set_limit(self, name: str, value: Any, who: str) -> None:
        """Raises ControlError when Redis cannot be reached."""
        self._call(lambda r: r.hset(self._key("limits"), name, json.dumps(value)))
        self.event(who, f"{name} = {value}")
        self._refresh_now()

    def event(self, who: str, what: str) -> None:
        """Note who did what; lost if Redis is away."""
        with contextlib.suppress(redis.RedisError):
            fields: dict[Any, Any] = {"who": who, "what": what}
            self._redis.xadd(self._key("events"), fields, maxlen=EVENTS_KEPT, approximate=True)

    def events(self, count: int = 20) -> list[tuple[float, str, str]]:
        """The latest events, oldest first: ``(Unix seconds, who, what)``."""
        rows: Any = self._call(lambda r: r.xrevrange(self._key("events"), count=count))
        return [(int(i.split("-")[0]) / 1000, f.get("who", ""), f.get("what", "")) for i, f in reversed(rows)]

    def forget_run(self) -> None:
        """Delete every key of the run except the events (a launcher starting or continuing it)."""
        names = [f"registry:{n}" for n in self._call(lambda r: r.smembers(self._key("members")))]
        keys = [self._key(k) for k in ("config", "desired", "limits", "model", "model_files", "members", *names)]
        with self._exchanging:
            self._call(lambda r: r.delete(*keys))
            with self._changed:
                self._kept.clear()
                self._view = _View()
        self._refresh_now()

    def on_refresh(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` after each refresh, in the refresh thread."""
        self._callbacks.append(callback)

    def refresh(self) -> bool:
        """Read everything now; False if Redis is away."""
        return self._refresh_now()

    def close(self) -> None:
        """Leave the registry and end the thread."""
        self.unregister()
        self._closing = True
        self._work.set()
        self._thread.join(timeout=5.0)
        with contextlib.suppress(redis.RedisError):
            self._redis.close()

    # ------------------------------------------------------------ inside
    def _key(self, name: str) -> str:
        return self._prefix + name

    def _call(self, request: Callable[[redis.Redis], Any]) -> Any:
        """The answer to a request that may be made twice."""
        end = time.monotonic() + self._patience_s
        while True:
            try:
                return request(self._redis)
            except redis.RedisError as e:
                passing = isinstance(e, (redis.ConnectionError, redis.TimeoutError))
                if not passing or isinstance(e, redis.AuthenticationError) or time.monotonic() >= end:
                    raise ControlError(f"Redis at {self.address}: {_reason(e)}") from e
            time.sleep(0.1)

    def _connect(self, deadline_s: float, stop: threading.Event | None) -> None:
        end = time.monotonic() + deadline_s
        pause = stop or threading.Event()
        while True:
            try:
                self._redis.ping()
                self.connected = True
                return
            except (redis.AuthenticationError, redis.ResponseError) as e:
                raise ControlError(f"Redis at {self.address} refused this process: {_reason(e)}") from e
            except redis.RedisError as e:
                if time.monotonic() >= end:
                    raise ControlError(
                        f"Redis at {self.address} cannot be reached within {deadline_s:g} s ({_reason(e)}); "
                        "check --redis-url, the host it names, and that the server runs"
                    ) from e
            if pause.wait(0.2):
                raise Stopped(f"Redis at {self.address}")

    def _wait(
        self, found: Callable[[], _T | None], what: str, deadline_s: float, stop: threading.Event | None, remedy: str,
        pauses: Callable[[], bool] = lambda: False,
    ) -> _T:  # fmt: skip
        """pauses: while it is true the deadline does not run, and then it begins anew."""
        start, said = time.monotonic(), False
        with self._changed:
            while not (value := found()):
                waited = time.monotonic() - start
                if stop is not None and stop.is_set():
                    raise Stopped(what)
                if waited >= deadline_s:
                    raise DeadlineError(what, waited, remedy)
                if not said and waited > 1.0:
                    said = True
                    self._log.info("waits for %s", what)
                if pauses():
                    start = time.monotonic()
                self._work.set()  # look again now, not in a second
                self._changed.wait(min(0.1, deadline_s - waited))
        return value

    def _refresh_for_ever(self) -> None:
        while not self._closing:
            self._work.wait(REFRESH_S)
            self._work.clear()
            if not self._closing:
                self._refresh_now()

    def _refresh_now(self) -> bool:
        with self._exchanging:
            return self._refresh_locked()

    def _refresh_locked(self) -> bool:
        try:
            view = self._exchange()
        except redis.RedisError as e:
            if self.connected:
                self._log.warning(
                    "Redis at %s is gone (%s): going on with the last known state", self.address, _reason(e)
                )
            self.connected = False
            return False
        if not self.connected:
            self._log.warning("Redis at %s is back: registered again", self.address)
            self._grace_until = time.monotonic() + 3 * REFRESH_S  # until the others are back too
        self.connected = True
        with self._changed:
            if time.monotonic() < self._grace_until:
                view.entries = {**self._view.entries, **view.entries}
            self._view = view
            self._changed.notify_all()
        for callback in self._callbacks:
            callback()
        return True

    def _exchange(self) -> _View:
        """Write this process's entry and what Redis lost; read the rest. Two round trips."""
        with self._changed:
            own, kept = dict(self._own), dict(self._kept)
            if self._view.desired != "running":
                kept["desired"] = self._view.desired
            limits = dict(self._view.limits)
        pipe = self._redis.pipeline(transaction=True)
        for key, value in kept.items():
            pipe.set(self._key(key), value, nx=True)
        for key, value in limits.items():
            pipe.hsetnx(self._key("limits"), key, value)
        if own:
            key = self._key(f"registry:{own['name']}")
            fields: dict[Any, Any] = {**own, "seen": f"{time.time():.3f}"}
            pipe.hset(key, mapping=fields)
            pipe.expire(key, TTL_S)
            pipe.sadd(self._key("members"), own["name"])
        for name in ("config", "desired", "model", "model_files"):
            pipe.get(self._key(name))
        pipe.hgetall(self._key("limits"))
        pipe.smembers(self._key("members"))
        *_, config, desired, model, model_files, limits, names = pipe.execute()
        return _View(
            entries=dict(self._read_entries(sorted(names))),
            desired=desired if desired in DESIRED else "running",
            limits=limits,
            model=model,
            model_files=model_files or "",
            config=config,
        )

    def _read_entries(self, names: list[str]) -> Iterator[tuple[str, Entry]]:
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.hgetall(self._key(f"registry:{name}"))
        for name, fields in zip(names, pipe.execute() if names else [], strict=True):
            if fields.get("role"):
                yield name, _entry(name, fields)
            else:  # it expired
                self._redis.srem(self._key("members"), name)


def _entry(name: str, f: dict[str, str]) -> Entry:
    known = {"role", "name", "pid", "host", "address", "state", "version"}
    return Entry(
        role=f["role"],
        name=name,
        pid=_int(f.get("pid"), 0),
        host=f.get("host", ""),
        address=f.get("address") or None,
        state=f.get("state", ""),
        version=_int(f.get("version"), -1),
        fields={k: v for k, v in f.items() if k not in known},
    )


def _int(text: str | None, default: int) -> int:
    try:
        return int(text or "")
    except ValueError:
        return default


def _without_password(url: str) -> str:
    try:
        parts = urlsplit(url)
        if not parts.hostname:
            return url.rsplit("@", 1)[-1]
        return f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}{parts.path}"
    except ValueError:
        return url.rsplit("@", 1)[-1]


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
