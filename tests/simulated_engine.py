"""Stand-ins for the costly parts, for tests of what surrounds them: an engine without a model, a broker by script."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.sockets import Router
from common.wire import GENERATOR_OPS, Sample, decode, decode_sample, encode, pack


@dataclass
class SimulatedCompletion:
    response_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int, int]]
    finish_reason: str


@dataclass
class SimulatedEngine:
    """Answers each prompt with ``respond(prompt_ids, max_tokens)``, a token at a time, stamped with ``version``.

    A request ends with "stop" if its last token is ``eos_id``. While ``hold`` is set, no token is made.
    """

    respond: Callable[[list[int], int], list[int]]
    eos_id: int = 1
    version: int = -1
    token_s: float = 0.0
    requests: list[dict[str, Any]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    hold_at: int | None = None  # set `hold` before the token of this number, once
    error: Exception | None = None  # raised by the next request
    closed: bool = False

    def __post_init__(self) -> None:
        self._go = asyncio.Event()
        self._go.set()

    def hold(self) -> None:
        self._go.clear()

    def go_on(self) -> None:
        self._go.set()

    async def generate(
        self,
        prompt_ids: list[int],
        *,
        temperature: float,
        top_p: float,
        top_k: int,
        max_tokens: int,
        request_id: str,
        on_progress: Callable[[int], None] | None = None,
    ) -> SimulatedCompletion:
        if self.error is not None:
            raise self.error
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        self.requests.append({"id": request_id, "prompt_ids": prompt_ids, "max_tokens": max_tokens, **sampling})
        response = self.respond(prompt_ids, max_tokens)
        spans: list[tuple[int, int, int]] = []
        try:
            for i in range(len(response)):
                if i == self.hold_at:
                    self.hold_at = None
                    self.hold()
                await self._go.wait()
                await asyncio.sleep(self.token_s)
                if spans and spans[-1][0] == self.version:
                    spans[-1] = (self.version, spans[-1][1], i + 1)
                else:
                    spans.append((self.version, i, i + 1))
                if on_progress is not None:
                    on_progress(i + 1)
        except asyncio.CancelledError:
            self.cancelled.append(request_id)
            raise
        reason = "stop" if response[-1] == self.eos_id else "length"
        return SimulatedCompletion(response, [-0.5] * len(response), spans, reason)

    async def rpc(self, method: str, **kwargs: Any) -> list[Any]:
        return [None]

    async def swap(self, version: int) -> float:
        self.version = version
        return 0.0

    async def wait_dead(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed = True


class CharTokenizer:
    """One token per character; 0 is padding, 1 the end. No chat template unless one is set."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) for i in ids if i > 1)

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool, tokenize: bool) -> str:
        assert add_generation_prompt and not tokenize
        if any(m["role"] == "tool" for m in messages):
            raise ValueError("this template knows no tools")
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


class SimulatedBroker:
    """A broker by script: the test says what it sends and asks for what it got. One thread owns it."""

    def __init__(self, port: int = 0) -> None:
        self.router = Router(port=port)
        self.peer = b""  # who spoke last
        self.seen: list[tuple[str, dict[str, Any]]] = []  # everything received, in order

    @property
    def address(self) -> str:
        return self.router.address

    def receive(self, deadline_s: float) -> tuple[str, dict[str, Any], list[bytes]] | None:
        message = self.router.receive(deadline_s)
        if message is None:
            return None
        self.peer = message[0]
        op, fields, payload = decode(message[1], GENERATOR_OPS)
        self.seen.append((op, fields))
        return op, fields, payload

    def expect(
        self, op: str, where: Callable[[dict[str, Any]], bool] = lambda _: True, *, deadline_s: float = 10.0
    ) -> tuple[dict[str, Any], list[bytes]]:
        """The next message ``op`` for which ``where`` holds; others are skipped (they are in ``seen``)."""
        end = time.monotonic() + deadline_s
        while (left_s := end - time.monotonic()) > 0:
            message = self.receive(left_s)
            if message is not None and message[0] == op and where(message[1]):
                return message[1], message[2]
        raise AssertionError(f"no {op} within {deadline_s} s; got {[op for op, _ in self.seen][-20:]}")

    def nothing_but(self, ops: set[str], for_s: float) -> None:
        """Assert that only messages of these kinds come for a while."""
        end = time.monotonic() + for_s
        while (left_s := end - time.monotonic()) > 0:
            message = self.receive(left_s)
            assert message is None or message[0] in ops, message[:2]

    def send(self, op: str, *payload: bytes, **fields: Any) -> None:
        assert self.router.send(self.peer, encode(op, *payload, **fields))

    def welcome(self, *, version: int = 0, deadline_s: float = 10.0) -> dict[str, Any]:
        """Wait for an introduction and answer it."""
        hello, _ = self.expect("hello", deadline_s=deadline_s)
        self.send("welcome", version=version, floor=0)
        return hello

    def lease(
        self, row: dict[str, Any], group: int, indices: list[int], *, attempt: int = 0, lane: str = "train"
    ) -> None:
        self.send("lease", pack(row), group=group, attempt=attempt, indices=indices, lane=lane, limit_s=60.0)

    def samples(self, count: int, *, ack: bool = True, deadline_s: float = 10.0) -> list[Sample]:
        """The next ``count`` samples, each checked whole, in order of their keys."""
        got = []
        for _ in range(count):
            header, payload = self.expect("sample", deadline_s=deadline_s)
            got.append(decode_sample(header, payload[0]))
        if ack:
            self.send("acks", keys=[[s.group, s.attempt, s.index] for s in got])
        return sorted(got, key=lambda s: (s.group, s.attempt, s.index))

    def close(self) -> None:
        self.router.close()
