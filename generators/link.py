"""A generator's line to the broker: dial, introduce, notice silence, dial again.

Consumes messages of the broker, hands them on decoded. Waits, by name, for a broker in the registry
and for its welcome. Unblocked by the broker, or by another address in the registry. While there is
no line, ``send`` drops what it is given: the caller sends everything that matters again at each
welcome, and the broker drops duplicates.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from common.errors import ControlError, DeadlineError, WireError
from common.sockets import AsyncDealer
from common.wire import GENERATOR_OPS, decode, encode

HELLO_S = 1.0  # seconds between two introductions that are not answered
SILENCE_S = 5.0  # after so long without a word the broker is asked for one; after three times that, dialled anew

# A refused hello with one of these reasons will be refused again.
_FATAL = ("other_run", "stale_incarnation")


class BrokerLink:
    def __init__(
        self,
        *,
        run_id: str,
        name: str,
        incarnation: str,
        version: Callable[[], int],
        lookup_address: Callable[[], str | None],
        on_message: Callable[[str, dict[str, Any], list[bytes]], None],
        on_welcome: Callable[[], None],
        deadline_s: float,
        log: logging.Logger,
    ) -> None:
        """
        Args:
            version: weights held now, for the introduction.
            lookup_address: the broker's address as the registry has it now.
            on_message: called with each message but the welcome.
            on_welcome: called after each welcome, before anything else is received.
            deadline_s: longest time without a broker; then ``run`` raises DeadlineError.
        """
        self._hello = {"run": run_id, "name": name, "incarnation": incarnation}
        self._version, self._lookup_address = version, lookup_address
        self._on_message, self._on_welcome = on_message, on_welcome
        self._deadline_s, self._log = deadline_s, log
        self._dealer: AsyncDealer | None = None
        self._num_dials = 0
        self._wake = asyncio.Event()
        self._heard_at = 0.0  # of any connection
        self._said_at = 0.0  # the last introduction
        self.is_up = False  # the broker has welcomed this connection
        self.address: str | None = None
        self.refusals: dict[str, int] = {}  # by reason

    def send(self, frames: list[bytes]) -> None:
        if self._dealer is not None and self.is_up:
            self._dealer.post(frames)

    async def run(self) -> None:
        """For ever; raises DeadlineError or ControlError."""
        loop = asyncio.get_running_loop()
        self._heard_at = loop.time()
        while True:
            self.address = self._lookup_address()
            if self.address is None:
                self._check_deadline("a broker in the registry", "start one with the same --redis-url and --run-id")
                await self._pause(HELLO_S / 4)
                continue
            await self._talk(self.address)
            self.close(0.0)  # a cancelled `run` leaves the line open, for what there is to say at the end

    def close(self, linger_s: float) -> None:
        """Hang up; what was sent to a broker that listens is delivered for at most ``linger_s`` more seconds."""
        if self._dealer is not None:
            self._dealer.close(linger_s if self.is_up else 0.0)
        self._dealer, self.is_up = None, False

    # ------------------------------------------------------------ one connection
    async def _talk(self, address: str) -> None:
        """Until the address changes, the broker stays silent, or this task ends."""
        loop = asyncio.get_running_loop()
        self._num_dials += 1
        # A ROUTER ignores a second peer of the same identity: each connection has its own.
        identity = f"{self._hello['name']}/{self._hello['incarnation']}/{self._num_dials}".encode()
        dealer = self._dealer = AsyncDealer(address, identity)
        dialled_at, self._said_at = loop.time(), 0.0
        receiver = asyncio.create_task(self._receive(dealer), name="broker-receiver")
        try:
            while self._lookup_address() in (address, None) and not receiver.done():
                now = loop.time()
                quiet_s = now - max(self._heard_at, dialled_at)
                if quiet_s > 3 * SILENCE_S:
                    self._log.warning("the broker at %s is silent for %.0f s: dialling again", address, quiet_s)
                    return
                self._check_deadline(f"the broker at {address}", "does it run, and is that its address?")
                if now - self._said_at >= HELLO_S and (not self.is_up or quiet_s > SILENCE_S):
                    self._said_at = now
                    dealer.post(encode("hello", version=self._version(), **self._hello))
                await self._pause(min(HELLO_S, SILENCE_S) / 4)
            if receiver.done():
                receiver.result()
        finally:
            receiver.cancel()
            await asyncio.wait([receiver])

    async def _receive(self, dealer: AsyncDealer) -> None:
        loop = asyncio.get_running_loop()
        while True:
            frames = await dealer.receive()
            self._heard_at = loop.time()
            try:
                op, fields, payload = decode(frames, GENERATOR_OPS)
            except WireError as e:
                self._log.warning("a message of the broker at %s is not understood: %s", self.address, e)
                continue
            if op == "welcome":
                if not self.is_up:
                    self._log.info("speaks with the broker at %s (version %d)", self.address, fields["version"])
                self.is_up = True
                self._on_welcome()
            elif op == "refused":
                self._refused(**fields)
            else:
                self._on_message(op, fields, payload)

    def _refused(self, re: str, reason: str, detail: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        if re == "hello" and reason in _FATAL:
            raise ControlError(f"the broker at {self.address} refuses this generator: {reason}: {detail}")
        if self.refusals[reason] == 1:
            self._log.warning("the broker refused a %s: %s: %s", re, reason, detail)
        if reason == "unknown_generator" and self.is_up:  # it was restarted: introduce ourselves again, at once
            self.is_up, self._said_at = False, 0.0
            self._wake.set()

    # ------------------------------------------------------------ waits
    async def _pause(self, at_most_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), at_most_s)
        self._wake.clear()

    def _check_deadline(self, what: str, remedy: str) -> None:
        waited_s = asyncio.get_running_loop().time() - self._heard_at
        if waited_s > self._deadline_s:
            raise DeadlineError(what, waited_s, remedy)
