"""Sends each published version of the weights to the engines, while the learner trains on.

``publish`` copies the weights out into host memory, which is all that the training thread waits
for. Sending begins with the first bytes: digests and buckets follow the copying through the buffer (where
there are cores for both: ``OVERLAPS``). A thread of its own talks to the engines (``CONTROL_OPS``) and
decides what they are sent (``learner/roster.py``); each transfer has a short-lived thread, so a dead or
frozen engine holds up no other, and itself at most ``weights.timeout_s``.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from common.buffers import Buffer, Watermark, copy_out, copy_out_as, layout_of, pack_digests, with_digests
from common.canary import Canary
from common.config import Weights
from common.errors import ConfigError, DeadlineError, FencedError, WeightError, WireError
from common.failpoints import failpoint
from common.file_snapshot import FileTransport
from common.logs import LOGGER
from common.model_files import FileServer
from common.snapshot import SnapshotTransport
from common.sockets import Router
from common.transfer import Group, KeptGroups, StoreTransport, Ticket, Transport, first_line
from common.weights import Manifest, encode_manifest
from common.wire import CONTROL_OPS, decode, encode
from learner import roster
from learner.roster import Action, Member, Roster
from learner.storing import Storing
from learner.version import SEAL_S, Version

MAX_BUFFERS = 3  # copies of the weights in host memory; normally one is in use
GIVE_WAY = 3  # a transfer that was ended frees its memory within so many times the timeout
# Digests and sending follow the copying where there are cores for it. On two they would take turns with it, and
# training wait twice as long; there only the agreement with the engines overlaps.
OVERLAPS = len(os.sched_getaffinity(0)) >= 4
MAX_WAIT_S = 1.0  # the control thread looks at its clock at least this often

_log = logging.getLogger(LOGGER)


@dataclass(eq=False)
class _Transfer:
    peer: bytes
    ticket: Ticket
    weights: Version
    group: Group | None = None  # kept from the transfer before, or made for this one
    ended: threading.Event = field(default_factory=threading.Event)
    started: bool = False


class Publisher:
    """The learner's end of the weights. Methods are for the training thread."""

    def __init__(
        self,
        *,
        run_id: str,
        epoch: int,
        config: Weights,
        host: str = "127.0.0.1",
        on_event: Callable[[str], None] | None = None,
        dtype: torch.dtype | None = None,
        files: FileServer | None = None,
        folder: Path | None = None,
    ) -> None:
        """
        Args:
            files: config and tokenizer, for generators that have none; default: there are none to be had.
            epoch: the learner's fencing token; engines obey the highest they have met.
            on_event: called, in the control thread, with what a person may want to read; default: the log.
            dtype: floating-point tensors travel as this; default: as they come.
            folder: where versions are stored; needed with `weights.snapshot=file`, else not used.

        Raises:
            ConfigError: nothing can be written to ``folder``.
            FencedError: a learner of a higher epoch writes there.
        """
        self._config, self._epoch, self._dtype = config, epoch, dtype
        self._on_event = on_event
        self._files = files
        self._lock = threading.RLock()  # guards all below; held for moments only
        self._changed = threading.Condition(self._lock)
        snapshot = "file" if config.snapshot == "file" else "snapshot"
        usual = {"auto": "gloo", "snapshot": snapshot}.get(config.transport, config.transport)
        # No number is used by two learners of a run.
        self._roster = Roster(
            run_id=run_id, epoch=epoch, timeout_s=config.timeout_s, next_number=epoch << 32, transport=usual,
            snapshot=snapshot,
        )  # fmt: skip
        self._canary: Callable[[Iterable[tuple[str, torch.Tensor]]], Canary] | None = None
        self._layout: Manifest | None = None
        self._newest: Version | None = None  # announced; its bytes and digests may still be on their way
        self._buffers: list[Buffer] = []  # not in use
        self._num_buffers = 0
        self._transfers: dict[int, _Transfer] = {}
        self._kept = KeptGroups()
        self._last = -1  # version handed in
        self._copy_out_s = 0.0
        self._error: Exception | None = None
        self._closing = self._ended = False
        self._events: queue.SimpleQueue[Callable[[float], list[Action]]] = queue.SimpleQueue()
        self._transports: dict[str, Transport] = {
            "snapshot": SnapshotTransport(host, timeout_s=config.timeout_s),
        }
        self._storing: Storing | None = None
        self._max_buffers = MAX_BUFFERS
        if snapshot == "file":
            assert folder is not None
            self._storing = self._begin_storing(folder)
            self._max_buffers += 1
            self._transports["file"] = FileTransport(host, timeout_s=config.timeout_s, shelf=self._storing)
        if usual not in self._transports:
            self._transports[usual] = StoreTransport(host, timeout_s=config.timeout_s, name=usual)
        self._router = Router(host)
        self._waker = self._router.waker()
        self.address: str = self._router.address
        self._thread = threading.Thread(target=self._run, name="weights-control", daemon=True)
        self._thread.start()

    def _begin_storing(self, folder: Path) -> Storing:
        return Storing(
            folder, epoch=self._epoch, beside=[] if self._files is None else self._files.paths,
            timeout_s=self._config.timeout_s, changed=self._changed, newest=lambda: self._newest,
            find=self._transfer_of, release=self._release, say=lambda text: self._say(text, fault=True),
        )  # fmt: skip

    # ------------------------------------------------------------ for the training thread
    def prove_with(self, forward: Callable[[Iterable[tuple[str, torch.Tensor]]], Canary]) -> None:
        """From now on have loads proven: ``forward`` computes the canary of the tensors as sent (in a thread)."""
        with self._lock:
            self._canary = forward
            self._roster.proves, self._roster.canary_every = True, self._config.canary_every

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over the weights of ``version``; returns once they are copied out.

        A version not yet on its way to an engine is superseded by a newer one. With no engine
        connected the weights are kept and sent to whoever comes.

        Raises:
            WeightError: the version is not above the last one; a tensor that does not travel.
            FencedError: an engine has met a learner with a higher epoch.
            DeadlineError: all buffers are held by transfers that do not end when they are told to.
        """
        start = time.perf_counter()
        with self._lock:
            self._check()
            if version <= self._last:
                raise WeightError(f"version {version} is not above {self._last}, which was published before")
            buffer = self._free_buffer()
        try:
            self._fill(version, buffer, tensors)
        except BaseException:
            with self._lock:
                self._buffers.append(buffer)
            raise
        self._last = version
        self._copy_out_s = time.perf_counter() - start

    def _fill(self, version: int, buffer: Buffer, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy out tensor by tensor, while others already read it, what says how it will lie or lies as the version
        before; another layout at once, when it is known."""
        options: dict[str, Any] = {"bucket_bytes": self._config.bucket_bytes, "dtype": self._dtype}
        known, rest = layout_of(tensors, **options) or self._layout, iter(tensors)
        if known is not None:
            buffer.prepare(known)
            weights = self._announce(version, buffer, known)
            try:
                filled = weights.filled if OVERLAPS else Watermark()
                seen = copy_out_as(known, rest, buffer, filled, self._dtype)
            except BaseException as e:
                self._withdraw(weights, f"the learner could not copy it out ({type(e).__name__})")
                raise
            if not seen:
                weights.filled.raise_to(known.total_bytes)
                self._lies_as(known)
                return
            self._withdraw(weights, "its layout has changed")
            rest = itertools.chain(seen, rest)
        layout = copy_out(rest, buffer, **options)
        self._lies_as(layout)
        weights = self._announce(version, buffer, layout)
        weights.filled.raise_to(layout.total_bytes)

    def _lies_as(self, layout: Manifest) -> None:
        if self._layout is None:
            size = f"{layout.total_bytes / 1e9:.3g} GB a version in host memory, up to {self._max_buffers} at a time"
            self._say(f"weights: {len(layout.entries)} tensors, {size}")
        self._layout = layout

    def _announce(self, version: int, buffer: Buffer, layout: Manifest) -> Version:
        """From now on engines that hold less are sent this version; its bytes follow."""
        weights = Version(version, buffer, users=2, layout=layout)  # its digests, and the announcement
        self._post(lambda now: self._announced(weights, now))
        threading.Thread(target=self._seal, args=(weights,), name=f"seal-{version}", daemon=True).start()
        return weights

    def _withdraw(self, weights: Version, reason: str) -> None:
        """Nobody is sent this any more; returns when nobody reads its buffer."""
        weights.withdraw(reason)
        self._post(lambda now: self._withdrawn(weights))
        patience_s = GIVE_WAY * self._config.timeout_s
        with self._changed:
            if not self._changed.wait_for(lambda: weights.users == 0, patience_s):
                self._fail(DeadlineError(f"the end of transfers of version {weights.version}, withdrawn", patience_s))
                self._check()

    def make_canary(self) -> None:
        """Compute the canary of the last version now; engines need it at their first load anyway.

        Raises:
            ConfigError: the model cannot be computed with here, so that no load of it could be proven.
            DeadlineError: the version was not complete in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_announced(self._last), SEAL_S):
                raise DeadlineError(f"version {self._last} to be announced", SEAL_S)
            self._check()
            weights = self._newest
            assert weights is not None
            weights.users += 1
        try:
            weights.make_canary(self._canary)
        except Exception as e:
            raise ConfigError(
                "model.path: its forward on the CPU, by which engines prove that they have loaded it, fails "
                f"({type(e).__name__}: {first_line(e)})"
            ) from e
        finally:
            self._release(weights)

    def wait_held(self, version: int, *, timeout_s: float, minimum: int = 1) -> list[str]:
        """Wait until all connected engines, and at least ``minimum``, hold ``version`` or a newer one; their names.

        Raises:
            DeadlineError: names those that do not.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._check()
                members = self._roster.members.values()
                holders = [m.name for m in members if m.version >= version]
                if len(holders) >= minimum and len(holders) == len(members):
                    return holders
                left = deadline - time.monotonic()
                if left <= 0:
                    late = ", ".join(f"{m.name} (holds {m.version}, {m.state})" for m in members if m.version < version)
                    who = late or f"{minimum} engines ({len(holders)} are connected)"
                    raise DeadlineError(f"version {version} to be held by {who}", timeout_s)
                self._changed.wait(left)

    def members(self) -> list[Member]:
        """The engines that are connected: name, version, state, …"""
        with self._lock:
            return [replace(m) for m in self._roster.members.values()]

    def stats(self) -> dict[str, float]:
        """Figures for the metrics; times in seconds, those of the last transfer."""
        with self._lock:
            f = self._roster.figures
            held = [m.version for m in self._roster.members.values()]
            return {
                "weights/held_version_min": float(min(held, default=-1)),
                "weights/version": float(self._roster.version),
                "weights/members": float(len(self._roster.members)),
                "weights/transfers": float(f.transfers),
                "weights/failures": float(f.failures),
                "weights/transfer_s": f.transfer_s,
                "weights/pause_s": f.pause_s,
                "weights/copy_out_s": self._copy_out_s,
                "weights/canary_difference": f.difference,
                **({} if self._storing is None else {"weights/stored_version": float(self._storing.version)}),
            }

    def close(self) -> None:
        """End running transfers and the control thread."""
        with self._lock:
            self._closing = True
        if self._storing is not None:
            self._storing.close()
        self._wake()
        self._thread.join(self._config.timeout_s)

    # ------------------------------------------------------------ versions in memory
    def _free_buffer(self) -> Buffer:
        """One that nobody reads: the newest version's own if all engines have it, else a spare one, else that of the
        slowest engines' transfers, which end."""
        patience_s = GIVE_WAY * self._config.timeout_s
        deadline = time.monotonic() + patience_s
        while True:
            newest = self._newest
            if self._buffers:
                return self._buffers.pop()
            if newest is not None and newest.users == 0:
                self._newest = None
                self._roster.ready = False  # until the next one is complete
                return newest.buffer
            if self._num_buffers < self._max_buffers:
                self._num_buffers += 1
                return Buffer()
            left = deadline - time.monotonic()
            if left <= 0:
                names = ", ".join(m.name for m in self._roster.members.values() if m.state in roster.TRANSFER_STATES)
                raise DeadlineError(f"a free copy of the weights; transfers run to {names}", patience_s)
            self._post(self._make_room)
            self._changed.wait(left)
            self._check()

    def _make_room(self, now: float) -> list[Action]:
        """If each buffer is held by a transfer, or stored, end the transfers of one; else one is about to be free."""
        held = {id(t.weights) for t in self._transfers.values()}
        if self._storing is not None and self._storing.busy is not None:
            held.add(id(self._storing.busy))
        return self._roster.make_room(now) if len(held) >= self._max_buffers and not self._buffers else []

    def _is_announced(self, version: int) -> bool:
        return self._error is not None or (self._newest is not None and self._newest.version >= version)

    def _seal(self, weights: Version) -> None:
        """The digest of each tensor, as it is copied out."""
        try:
            manifest = with_digests(weights.buffer, weights.filled, SEAL_S)
            weights.digests = pack_digests(manifest)
            self._post(lambda now: self._roster.sealed(weights.version, manifest.digest))
            weights.sealed.raise_to(1)
        except WeightError:
            pass  # withdrawn; `publish` says why
        except Exception as e:
            self._fail(e)
        finally:
            self._release(weights)

    def _announced(self, weights: Version, now: float) -> list[Action]:
        before, self._newest = self._newest, weights
        if before is not None and before.users == 0:
            self._buffers.append(before.buffer)
        self._release(weights)
        return self._roster.published(weights.version, now)

    def _withdrawn(self, weights: Version) -> list[Action]:
        if self._newest is weights:
            self._newest = None
            self._roster.ready = False
        return []

    def _release(self, weights: Version) -> None:
        """One user less; the last one of a superseded version gives its buffer back."""
        with self._changed:
            weights.users -= 1
            if weights.users == 0 and weights is not self._newest and not weights.withdrawn:
                self._buffers.append(weights.buffer)
            self._changed.notify_all()

    # ------------------------------------------------------------ the control thread
    def _run(self) -> None:
        """Consumes messages of engines and events of our threads; produces messages and transfers."""
        try:
            while not self._closing:
                with self._lock:
                    wait = min(max(self._roster.next_due() - time.monotonic(), 0.0), MAX_WAIT_S)
                message = self._router.receive(wait)
                with self._changed:
                    self._drain()  # first: what our threads know, engines may already answer to
                    if message is not None:
                        self._receive(*message)
                    self._act(self._roster.tick(time.monotonic()))
                    self._kept.close_all_but({m.peer for m in self._roster.members.values()})
                    self._changed.notify_all()
        except Exception as e:
            _log.exception("the weights' control thread failed")
            self._fail(e)
        finally:
            self._end()

    def _receive(self, peer: bytes, frames: list[bytes]) -> None:
        now = time.monotonic()
        try:
            op, fields, _ = decode(frames, CONTROL_OPS)
            if op in ("files", "file") and self._files is not None:
                self._send(peer, self._files.answer(op, fields))
            else:
                self._act(self._roster.receive(peer, op, fields, now))
        except WireError as e:
            self._router.send(peer, encode("refused", re="?", reason=e.reason, detail=str(e)))

    def _drain(self) -> None:
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            self._act(event(time.monotonic()))

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, roster.Send):
                self._send(action.peer, encode(action.op, **action.fields))
            elif isinstance(action, roster.Prepare):
                self._prepare(action)
            elif isinstance(action, roster.Start):
                self._start(action)
            elif isinstance(action, roster.Swap):
                self._swap(action)
            elif isinstance(action, roster.End):
                self._end_transfer(action.number, staged=action.staged)
            elif self._on_event is not None:
                self._on_event(action.text)
            else:
                _log.log(logging.WARNING if action.fault else logging.INFO, "%s", action.text)

    def _say(self, text: str, *, fault: bool = False) -> None:
        self._post(lambda now: [roster.Note(text, fault)])

    def _send(self, peer: bytes, frames: list[bytes]) -> None:
        if not self._router.send(peer, frames):
            self._act(self._roster.gone(peer, time.monotonic()))

    def _prepare(self, action: roster.Prepare) -> None:
        weights = self._newest
        assert weights is not None and weights.version == action.version and weights.layout is not None
        kept = self._kept.take(action.peer, action.transport)
        ticket, group = kept or (self._transports[action.transport].announce(self._epoch, action.number), None)
        self._transfers[action.number] = _Transfer(action.peer, ticket, weights, group)
        weights.users += 1
        frames = encode(
            "prepare", encode_manifest(weights.layout),
            epoch=self._epoch, version=action.version, number=action.number, rank=1, world_size=1 + action.num_workers,
            transport=ticket.transport, host=ticket.host, port=ticket.port, prefix=ticket.prefix,
            timeout_s=self._config.timeout_s,
        )  # fmt: skip
        failpoint("publish.prepare")
        self._send(action.peer, frames)

    def _transfer_of(self, ticket: Ticket) -> tuple[Version, threading.Event]:
        """For a transfer's own thread: the version, and the event of its end. Raises WeightError."""
        with self._lock:
            for transfer in self._transfers.values():
                if transfer.ticket == ticket:
                    return transfer.weights, transfer.ended
        raise WeightError("ended")

    def _swap(self, action: roster.Swap) -> None:
        canary = self._transfers[action.number].weights.canary if action.prove else None
        payload = [] if canary is None else [canary.encode()]
        self._send(action.peer, encode("swap", *payload, number=action.number, version=action.version))

    def _start(self, action: roster.Start) -> None:
        transfer = self._transfers[action.number]
        transfer.started = True
        name = f"weights-to-{action.name}"
        threading.Thread(target=self._stream, args=(action, transfer), name=name, daemon=True).start()

    def _end_transfer(self, number: int, *, staged: bool) -> None:
        transfer = self._transfers.pop(number, None)
        if transfer is None:
            return
        if staged and KeptGroups.lasts(transfer.ticket):
            # Here, not in the transfer's thread, which may be late: the next PREPARE comes after this.
            group, transfer.group = transfer.group, None
            if group is not None:
                self._kept.keep(transfer.peer, transfer.ticket, group)
        transfer.ended.set()
        if not transfer.started:
            self._transports[transfer.ticket.transport].cancel(transfer.ticket)
            if transfer.group is not None:
                transfer.group.close()
            self._release(transfer.weights)
        elif not staged and transfer.group is not None:
            transfer.group.abort()

    # ------------------------------------------------------------ one transfer, in its own thread
    def _stream(self, action: roster.Start, transfer: _Transfer) -> None:
        try:
            proof = self._make_canary_beside(transfer.weights) if action.prove else None
            failpoint("publish.group")
            if transfer.group is None:
                transport = self._transports[transfer.ticket.transport]
                transfer.group = transport.open_group(transfer.ticket, action.num_workers)
            transfer.weights.send(transfer.group, transfer.ended, proof)
            self._post(lambda now: self._roster.sent(action.number, now))
            # Closing before the engine has all would cut off what is still on its way.
            transfer.ended.wait(2 * self._config.timeout_s)
        except Exception as e:
            reason = str(e)
            self._post(lambda now: self._roster.torn(action.number, reason, now))
        finally:
            with self._lock:
                group, transfer.group = transfer.group, None
            if group is not None:
                group.close()
            self._release(transfer.weights)

    def _make_canary_beside(self, weights: Version) -> Watermark:
        """Compute the canary in a thread of its own, while buckets are sent; raised to 1 once it is there."""
        made = Watermark()

        def make() -> None:
            try:
                weights.make_canary(self._canary)
                made.raise_to(1)
            except Exception as e:
                made.fail(f"canary: {first_line(e)}")
            finally:
                self._release(weights)

        with self._lock:
            weights.users += 1
        threading.Thread(target=make, name=f"canary-{weights.version}", daemon=True).start()
        return made

    # ------------------------------------------------------------ threads and ends
    def _post(self, event: Callable[[float], list[Action]]) -> None:
        self._events.put(event)
        self._wake()

    def _wake(self) -> None:
        with self._lock:  # one at a time
            if not self._ended:
                self._waker.wake()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise WeightError(f"weights can no longer be published: {self._error}") from self._error
        if self._roster.fenced_by is not None:
            raise FencedError(
                f"a learner of epoch {self._roster.fenced_by} has taken over; this one is of {self._epoch}"
            )
        if self._closing:
            raise WeightError("the publisher is closed")

    def _end(self) -> None:
        with self._changed:
            self._closing = self._ended = True
            for number in list(self._transfers):
                self._end_transfer(number, staged=False)
            self._kept.close_all_but()
            self._router.close()
            for transport in self._transports.values():
                transport.close()
            self._changed.notify_all()
