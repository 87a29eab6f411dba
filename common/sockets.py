"""ZeroMQ in one place: ROUTER and DEALER with bounded receives, and a wake-up between threads.

Frames past ``MAX_FRAMES`` of one message are read and thrown away one by one, so that a sender
cannot make a receiver hold them; a frame above ``MAX_PAYLOAD_BYTES`` makes ZeroMQ drop the peer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import zmq
import zmq.asyncio

from common.errors import ControlError
from common.wire import MAX_FRAMES, MAX_PAYLOAD_BYTES

_HIGH_WATER = 200_000  # messages per peer; credits and acks bound what is really queued


def _configure(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)


def _receive(socket: zmq.Socket[Any], flags: int = 0) -> list[bytes]:
    """One whole message; frames past the limit are dropped as they come (the caller sees too many)."""
    frame = socket.recv(flags, copy=False)  # it says by itself whether another one follows
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(copy=False)
        if len(frames) <= MAX_FRAMES + 1:
            frames.append(frame.bytes)
    return frames


class Router:
    """The listening side: talks to many peers by identity. One thread owns it."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as e:
            raise ControlError(f"cannot listen on {host}:{port} ({e.strerror}); choose another port") from e
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._waker: Waker | None = None

    def waker(self) -> Waker:
        """A handle with which other threads end a running ``receive`` early."""
        if self._waker is None:
            self._waker = Waker(self._context)
            self._poller.register(self._waker.receiver, zmq.POLLIN)
        return self._waker

    def receive(self, timeout_s: float) -> tuple[bytes, list[bytes]] | None:
        """``(peer identity, frames)``, or None after ``timeout_s`` or a wake-up."""
        if timeout_s <= 0:
            try:
                peer, *frames = _receive(self._socket, zmq.DONTWAIT)
                return peer, frames
            except zmq.Again:
                return None
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        if self._waker is not None and self._waker.receiver in ready:
            self._waker.clear()
        if self._socket not in ready:
            return None
        peer, *frames = _receive(self._socket)
        return peer, frames

    def send(self, peer: bytes, frames: list[bytes], view: memoryview | None = None) -> bool:
        """False if the peer is gone or reads nothing any more; never blocks.

        ``view`` is a last frame that is not copied: its memory must stand until the peer has it.
        """
        more = zmq.SNDMORE if view is not None else 0
        try:
            self._socket.send_multipart([peer, *frames], flags=zmq.DONTWAIT | more)
            if view is not None:
                self._socket.send(view, copy=False)
        except zmq.ZMQError as e:
            if e.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self, linger_s: float = 0.0) -> None:
        self._socket.close(int(linger_s * 1000))
        if self._waker is not None:
            self._waker.close()
        self._context.term()


class Waker:
    """Wakes the owner of a ``Router`` from another thread. ``wake`` may be called from one other thread at a time."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        name = f"inproc://wake-{id(self)}"
        self.receiver = context.socket(zmq.PULL)
        self.receiver.bind(name)
        self._sender = context.socket(zmq.PUSH)
        self._sender.setsockopt(zmq.SNDHWM, 1)
        self._sender.connect(name)

    def wake(self) -> None:
        try:
            self._sender.send(b"", flags=zmq.DONTWAIT)
        except zmq.Again:
            pass  # a wake-up is already waiting

    def clear(self) -> None:
        try:
            while True:
                self.receiver.recv(flags=zmq.DONTWAIT)
        except zmq.Again:
            pass

    def close(self) -> None:
        self._sender.close(0)
        self.receiver.close(0)


class Dealer:
    """The dialling side, blocking. One thread owns it."""

    def __init__(self, address: str, identity: bytes) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _configure(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.connect(address)

    def send(self, frames: list[bytes]) -> None:
        self._socket.send_multipart(frames)

    def receive(self, timeout_s: float) -> list[bytes] | None:
        if not self._socket.poll(max(0, int(timeout_s * 1000))):
            return None
        return _receive(self._socket)

    def receive_into(self, timeout_s: float, view: memoryview) -> tuple[bytes, int] | None:
        """``(first frame, size of the second)``, the second one received into ``view``; further ones are dropped.

        A second frame that is larger than ``view`` is cut there, and its true size returned.
        """
        if not self._socket.poll(max(0, int(timeout_s * 1000))):
            return None
        header, size = self._socket.recv(), 0
        if self._socket.getsockopt(zmq.RCVMORE):
            size = self._socket.recv_into(view)
        while self._socket.getsockopt(zmq.RCVMORE):
            self._socket.recv()
        return header, size

    def close(self, linger_s: float = 0.0) -> None:
        self._socket.close(int(linger_s * 1000))
        self._context.term()


class AsyncDealer:
    """The dialling side in an asyncio loop; made and used in that loop.

    ZeroMQ's descriptor tells of changes, not of messages waiting (it is edge-triggered), so the
    socket is emptied once per turn of the loop after any use of it. pyzmq's own asyncio sockets do
    that after each message, which costs three times as much as the sending.
    """

    def __init__(self, address: str, identity: bytes) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _configure(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.connect(address)
        self._inbox: deque[list[bytes]] = deque()
        self._outbox: deque[list[bytes]] = deque()
        self._arrived = asyncio.Event()
        self._looks = False  # already planned
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._look)

    async def send(self, frames: list[bytes]) -> None:
        self.post(frames)

    def post(self, frames: list[bytes]) -> None:
        """Send without waiting. Order is kept; what cannot leave yet is queued here until it can."""
        self._outbox.append(frames)
        self._flush()
        if not self._looks:
            self._looks = True
            self._loop.call_soon(self._look)

    async def receive(self) -> list[bytes]:
        while not self._inbox:
            self._arrived.clear()
            await self._arrived.wait()
        return self._inbox.popleft()

    def close(self, linger_s: float = 0.0) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.close(int(linger_s * 1000))
        self._context.term()

    def _flush(self) -> None:
        try:
            while self._outbox:
                self._socket.send_multipart(self._outbox[0], flags=zmq.DONTWAIT)
                self._outbox.popleft()
        except zmq.Again:
            pass  # the peer reads slowly; `_look` goes on

    def _look(self) -> None:
        self._looks = False
        if self._socket.closed:
            return
        try:
            while True:
                self._inbox.append(_receive(self._socket, zmq.DONTWAIT))
        except zmq.Again:
            pass
        self._flush()
        if self._inbox:
            self._arrived.set()


class Mailbox:
    """A local (ipc) queue into one asyncio loop, for events of a child process. No port, no peer list."""

    def __init__(self, path: str) -> None:
        self.address = f"ipc://{path}"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        _configure(self._socket)
        self._socket.bind(self.address)

    async def receive(self) -> list[bytes]:
        return await self._socket.recv_multipart()

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


def post(address: str, frames: list[bytes], *, linger_s: float = 5.0) -> None:
    """Send one message to a ``Mailbox``."""
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, int(linger_s * 1000))
    socket.connect(address)
    socket.send_multipart(frames)
    socket.close()
    context.term()
