"""A process that is a member of the learner's roster but only fills tensors: no vLLM.

``python -m tests.filling_receiver NAME ADDRESS_FILE [MODEL [STAGING]]`` prints one JSON line per event:
``{"held": 3, "sum": 12.5, "pause_s": …}``. Its address comes from the file, as from a registry; MODEL is
JSON of the shapes it takes, by name: default: any. STAGING is ``host`` or ``none``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.canary import Canary
from common.errors import LeewayError
from common.processes import die_with_parent
from common.roles import end_process
from common.sockets import Mailbox, post
from common.wire import encode
from generators.arriving import Arriving
from generators.member import Member, Swapped
from generators.receiving import Layout, Line, Shapes
from generators.staging import Staging


class Filling:
    """Stands in for ``generators.engine.Engine``."""

    def __init__(self, folder: str, model: Shapes | None = None) -> None:
        self.version = -1
        self.num_receivers = 1
        self.dead = False
        self.mailbox = Mailbox(f"{folder}/events")
        self.tensors: dict[str, Any] = {}
        self._staging = Staging(worker=0, model=model)

    async def stage(self, *, on_ready: Callable[[], None], **transfer: Any) -> int | None:
        address = self.mailbox.address
        self._staging.begin(post=lambda op, **fields: post(address, encode(op, **fields)), **transfer)
        on_ready()
        return None

    async def swap(self, version: int, canary: Canary | None, timeout_s: float) -> Swapped:
        assert version > self.version
        staged = self._staging.take(version)
        self.tensors = {name: t.clone() for name, t in staged.tensors()}
        self.version = version
        return Swapped(0.0)


class FillingDirectly(Filling):
    """Without staging: what it has is a mixture once the first tensor has come."""

    def __init__(self, folder: str, model: Shapes | None = None) -> None:
        super().__init__(folder)
        self._layout, self._line = Layout(model), Line()

    async def stage(self, *, on_ready: Callable[[], None], manifest: bytes, **transfer: Any) -> int | None:
        del transfer["number"], transfer["version"]
        wanted = self._layout.accept(manifest)
        on_ready()
        digest = await asyncio.to_thread(self._load, Arriving(wanted, self._line, **transfer))
        self._layout.keep(wanted)
        return digest

    def _load(self, arriving: Arriving) -> int:
        try:
            for name, tensor in arriving.tensors():
                self.version = -1
                self.tensors[name] = tensor
            return arriving.check()
        finally:
            arriving.close()

    async def swap(self, version: int, canary: Canary | None, timeout_s: float) -> Swapped:
        self.version = version
        return Swapped(0.0)


async def main(name: str, address_file: str, model: str = "", staging: str = "host") -> None:
    def lookup() -> str | None:
        path = Path(address_file)
        return path.read_text() if path.exists() else None

    with tempfile.TemporaryDirectory(prefix="filling-") as folder:
        kind = {"host": Filling, "none": FillingDirectly}[staging]
        engine = kind(folder, {n: tuple(s) for n, s in json.loads(model).items()} if model else None)

        def held(version: int) -> None:
            total = sum(float(t.double().sum()) for t in engine.tensors.values())
            print(json.dumps({"held": version, "sum": total, "tensors": len(engine.tensors)}), flush=True)

        member = Member(
            engine=engine, run_id="run", name=name, incarnation=str(os.getpid()), lookup_address=lookup, on_version=held
        )
        print(json.dumps({"ready": os.getpid()}), flush=True)
        me = asyncio.current_task()
        assert me is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)  # as a generator: it leaves
        try:
            await member.run()
        except asyncio.CancelledError:
            pass
        except LeewayError as e:
            print(json.dumps({"error": str(e)}), flush=True)
            sys.exit(e.exit_code)


if __name__ == "__main__":
    die_with_parent()
    try:
        asyncio.run(main(*sys.argv[1:]))
    except SystemExit as e:
        end_process(int(e.code or 0))
    end_process(0)  # as a generator does: a thread may still be in a transfer
