"""Writes versions to disk for engines that share it (`weights.snapshot=file`): a thread beside the publisher.

Consumes the publisher's newest version whenever it is free, and before that the versions that transfers wait for;
produces ``RUN_DIR/weights/<version>`` (``common/stored.py``). At most two are kept. One that a transfer reads stays
until that has ended; while two are being read nothing is written. Training waits for none of this: the thread holds
one copy of the weights in memory, of its own.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from common.errors import ConfigError, FencedError, LeewayError, WeightError
from common.failpoints import failpoint
from common.memory import refuse_what_does_not_fit
from common.stored import Stored, write_version
from common.transfer import Ticket
from learner.files import replace_file
from learner.version import SEAL_S, Version

KEPT = 2  # versions on disk
EPOCH = "epoch"  # in the folder: whose it is
LOOK_S = 1.0  # who waits for a version looks at its clock at least this often
_OURS = re.compile(r"\d+|\.\d+\.(new|old)")


class _Closing(Exception):
    pass


class Storing:
    """The stored versions of one run. ``take`` and ``give_back`` are for the threads of transfers."""

    def __init__(
        self,
        folder: Path,
        *,
        epoch: int,
        beside: Sequence[Path],
        timeout_s: float,
        changed: threading.Condition,
        newest: Callable[[], Version | None],
        find: Callable[[Ticket], tuple[Version, threading.Event]],
        release: Callable[[Version], None],
        say: Callable[[str], None],
    ) -> None:
        """
        Args:
            beside: config.json and the tokenizer's files.
            timeout_s: a writing that makes no progress for so long is not waited for.
            changed: guards the versions' ``users``, and all here; notified when a version is announced.
            newest: the version published last.
            find: version of a transfer, and the event of its end.
            release: called once for each version whose ``users`` was raised here.
            say: what a person may want to read.

        Raises:
            ConfigError: nothing can be written there.
            FencedError: a learner of a higher epoch writes there.
        """
        self.folder = folder = folder.absolute()  # engines work in other directories
        self._epoch, self._beside, self._timeout_s = epoch, beside, timeout_s
        self._changed, self._newest, self._find, self._release, self._say = changed, newest, find, release, say
        self.busy: Version | None = None  # being written
        self._there: dict[int, Stored] = {}
        self._readers: Counter[int] = Counter()  # transfers by version
        self._demanded: dict[int, Version] = {}  # that transfers wait for
        self._faults: dict[int, str] = {}  # why a demanded one is not there
        self._tried, self._fault = -1, ""  # newest version begun; what went wrong with the last one
        self._progress = 0.0  # when bytes were written last
        self._closing = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._refuse_if_replaced()
            replace_file(folder / EPOCH, lambda fresh: fresh.write_text(f"{epoch}\n"))
        except OSError as e:
            raise ConfigError(
                f"weights.snapshot=file: {folder} cannot be written ({e.strerror}); mend that, or set it to zmq"
            ) from e
        self._thread = threading.Thread(target=self._run, name="weights-storing", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """Newest one that lies on disk; -1: none."""
        return max(self._there, default=-1)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(self._timeout_s)

    # ------------------------------------------------------------ for transfers (``Shelf``)
    def take(self, ticket: Ticket, meanwhile: Callable[[], None]) -> Stored:
        """See ``common/file_snapshot.py``: ``Shelf``."""
        weights, ended = self._find(ticket)
        version, asked = weights.version, time.monotonic()
        with self._changed:
            self._readers[version] += 1
            self._faults.pop(version, None)
            if version not in self._there:
                self._demanded[version] = weights
            self._changed.notify_all()
        try:
            while True:
                with self._changed:
                    stored = self._look(version, ended, asked)
                    if stored is not None:
                        return stored
                    self._changed.wait(min(LOOK_S, self._timeout_s / 4))
                meanwhile()
        except BaseException:
            self._leave(version)
            raise

    def _look(self, version: int, ended: threading.Event, asked: float) -> Stored | None:
        """Raises WeightError when there is no more to wait for."""
        if version in self._there:
            return self._there[version]
        if version in self._faults:
            raise WeightError(self._faults[version])
        if ended.is_set() or self._closing:
            raise WeightError("ended")
        if time.monotonic() - max(self._progress, asked) > self._timeout_s:
            raise WeightError(f"nothing was written to {self.folder} for {self._timeout_s:g} s")
        return None

    def give_back(self, stored: Stored) -> None:
        self._leave(stored.version)

    def _leave(self, version: int) -> None:
        with self._changed:
            self._readers[version] -= 1
            if not self._readers[version]:
                del self._readers[version]
                self._demanded.pop(version, None)
                self._faults.pop(version, None)
            self._changed.notify_all()

    # ------------------------------------------------------------ the thread
    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._next() is not None)
                weights = self._next()
                if self._closing or weights is None:
                    return
                weights.users += 1
                self.busy, self._tried = weights, max(self._tried, weights.version)
            fault = self._fault_of(weights)
            with self._changed:
                self.busy = None
                if self._demanded.pop(weights.version, None) is not None and fault:
                    self._faults[weights.version] = fault
                self._changed.notify_all()
            self._release(weights)

    def _next(self) -> Version | None:
        """What to write now: what a transfer waits for; else the newest, if there is room for it."""
        for weights in self._demanded.values():
            return weights
        newest = self._newest()
        fresh = newest is not None and newest.version > self._tried and not newest.withdrawn
        return newest if fresh and len(self._kept()) < KEPT else None

    def _kept(self) -> set[int]:
        """Versions that are not to be removed for a newer one."""
        return {v for v in self._there if self._readers[v]} | {v for v in (self.version,) if v >= 0}

    def _fault_of(self, weights: Version) -> str:
        """Store a version; what went wrong, said to a person if it is news."""
        fault = ""
        try:
            self._store(weights)
        except FencedError as e:
            fault, self._closing = str(e), True
        except _Closing:
            fault = "the learner ends"
        except (LeewayError, OSError) as e:
            fault = f"{self.folder}: {e.strerror}" if isinstance(e, OSError) else str(e)
        except Exception as e:  # whatever it is: transfers take the socket then
            fault = f"{self.folder}: {type(e).__name__}: {e}"
        if fault and fault != self._fault and not weights.withdrawn:
            self._say(f"version {weights.version} is not stored: {fault}")
        self._fault = fault
        return fault

    def _store(self, weights: Version) -> None:
        assert weights.layout is not None
        self._progress = float("inf")  # the copying out has limits of its own
        try:
            weights.sealed.wait_for(1, SEAL_S)
        finally:
            self._progress = time.monotonic()
        self._make_room()
        size, free = weights.layout.total_bytes, shutil.disk_usage(self.folder).free
        refuse_what_does_not_fit("one stored version of the weights", size, free=free, where=f"in {self.folder}")
        fresh = self.folder / f".{weights.version}.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        try:
            write_version(fresh, weights.buffer, weights.version, beside=self._beside, on_bytes=self._wrote)
            failpoint("publish.stored")
            self._put_in_place(fresh, weights)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _wrote(self, count: int) -> None:
        self._progress = time.monotonic()
        if self._closing:
            raise _Closing

    def _make_room(self) -> None:
        """Remove what is neither read nor the newest; the newest, too, if a transfer waits for another."""
        with self._changed:
            kept = self._kept()
            if len(kept) >= KEPT:
                kept = {v for v in kept if self._readers[v]}
            if len(kept) >= KEPT:
                raise WeightError(f"versions {', '.join(map(str, sorted(kept)))} are being read; no more are kept")
            gone = [self._there.pop(v) for v in list(self._there) if v not in kept]
        for stored in gone:
            _remove(stored.path)

    def _put_in_place(self, fresh: Path, weights: Version) -> None:
        assert weights.layout is not None
        self._refuse_if_replaced()
        target = self.folder / str(weights.version)
        _remove(target)  # of the learner before this one
        fresh.rename(target)
        with self._changed:
            self._there[weights.version] = Stored(weights.version, target, weights.layout)
            ours = {s.path for s in self._there.values()}
        for path in self.folder.iterdir():  # what that learner has left
            if _OURS.fullmatch(path.name) and path not in ours:
                _remove(path)

    def _refuse_if_replaced(self) -> None:
        """A learner of a lower epoch, frozen while it wrote, comes too late."""
        file = self.folder / EPOCH
        if file.exists() and (newest := int(file.read_text())) > self._epoch:
            raise FencedError(f"{self.folder}: is written by the learner of epoch {newest}; this one has {self._epoch}")


def _remove(path: Path) -> None:
    """What has a number as its name is whole, to the last."""
    if path.name.isdecimal() and path.exists():
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        path = path.rename(old)
    shutil.rmtree(path, ignore_errors=True)
