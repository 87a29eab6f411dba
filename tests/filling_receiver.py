"""A process that is a member of the learner's roster but only fills tensors: no vLLM.

``python -m tests.filling_receiver NAME ADDRESS_FILE`` prints one JSON line per event:
``{"held": 3, "sum": 12.5, "pause_s": …}``. Its address comes from the file, as from a registry.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from common.canary import Canary
from common.processes import die_with_parent
from common.sockets import Mailbox, post
from common.wire import encode
from generators.member import Member, Swapped
from generators.staging import Staging


class Filling:
    """Stands in for ``generators.engine.Engine``."""

    def __init__(self, folder: str) -> None:
        self.version = -1
        self.num_workers = 1
        self.dead = False
        self.mailbox = Mailbox(f"{folder}/events")
        self.tensors: dict[str, Any] = {}
        self._staging = Staging(worker=0)

    async def rpc(self, method: str, *, mailbox: str, **transfer: Any) -> list[Any]:
        assert method == "stage"
        self._staging.begin(post=lambda op, **fields: post(mailbox, encode(op, **fields)), **transfer)
        return [None]

    async def swap(self, version: int, canary: Canary | None, timeout_s: float) -> Swapped:
        assert version > self.version
        staged = self._staging.take(version)
        self.tensors = {name: t.clone() for name, t in staged.tensors()}
        self.version = version
        return Swapped(0.0)


async def main(name: str, address_file: str) -> None:
    def lookup() -> str | None:
        path = Path(address_file)
        return path.read_text() if path.exists() else None

    with tempfile.TemporaryDirectory(prefix="filling-") as folder:
        engine = Filling(folder)

        def held(version: int) -> None:
            total = sum(float(t.double().sum()) for t in engine.tensors.values())
            print(json.dumps({"held": version, "sum": total, "tensors": len(engine.tensors)}), flush=True)

        member = Member(
            engine=engine, run_id="run", name=name, incarnation=str(os.getpid()), lookup_address=lookup, on_version=held
        )
        print(json.dumps({"ready": os.getpid()}), flush=True)
        await member.run()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main(*sys.argv[1:]))
