"""The receiving end of the figures of ``weights.py``, as a process: ``python -m benchmarks.weight_receiver KIND …``."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from common.buffers import Buffer
from common.processes import die_with_parent
from common.sockets import Dealer
from common.transfer import Ticket, join_group
from generators.member import Member, Swapped
from tests.filling_receiver import Filling


class Receiving(Filling):
    """Takes the staged version as it is: what is measured is the way to the engine, not its load."""

    async def swap(self, version: int, canary: object, timeout_s: float) -> Swapped:
        self._staging.take(version)
        self.version = version
        return Swapped(0.0)


async def member(address: str, name: str, digests: bool) -> None:
    if not digests:
        Buffer.digest = lambda self, entry: 0  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        m = Member(
            engine=Receiving(folder), run_id="run", name=name, incarnation=str(os.getpid()),
            lookup_address=lambda: address,
        )  # fmt: skip
        await m.run()


def flat(port: int, rank: int, world: int, total: int, bucket: int) -> None:
    """The peer of a flat broadcast of ``total`` bytes, over and over."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    group = ProcessGroupGloo(PrefixStore("flat", store), rank, world, timedelta(seconds=60))
    buffer = torch.zeros(total, dtype=torch.uint8)
    while True:
        for start in range(0, total, bucket):
            group.broadcast(buffer[start : start + bucket], 0).wait()
        group.barrier().wait()


def take(transport: str, host: str, port: str, prefix: str, sizes: str) -> None:
    """Join one group and receive buckets of these sizes (``bytes`` or ``bytes*count``), then say so."""
    plan = [int(size) for item in sizes.split(",") for size in [item.split("*")[0]] * int((item + "*1").split("*")[1])]
    buffer = torch.zeros(max(plan), dtype=torch.uint8)
    group = join_group(Ticket(transport, host, int(port), prefix), rank=1, world_size=2, timeout_s=60)
    for size in plan:
        group.receive(buffer[:size])
    print("done", flush=True)
    sys.stdin.readline()
    group.close()


def raw(address: str, total: int) -> None:
    """Take chunks from a ZeroMQ socket as fast as they come."""
    dealer = Dealer(address, b"raw")
    buffer = torch.zeros(total, dtype=torch.uint8).numpy().data
    while True:
        dealer.send([b"go"])
        got = 0
        while got < total:
            message = dealer.receive_into(60, buffer[got:])
            assert message is not None
            got += message[1]
        dealer.send([b"done"])


if __name__ == "__main__":
    die_with_parent()
    kind, *args = sys.argv[1:]
    print("ready", flush=True)
    if kind == "member":
        asyncio.run(member(args[0], args[1], args[2] == "digests"))
    elif kind == "flat":
        flat(*map(int, args))
    elif kind == "take":
        take(*args)
    else:
        raw(args[0], int(args[1]))
