"""The engine of one generator: vLLM's AsyncLLM, with weights that change while requests run.

Two processes: this one has the scheduler's front, its child (``EngineCore``) the model and
``generators/worker.py``. How they start is in ``starting.py``, how they sample in ``requests.py``;
here are their weights. All methods are for one asyncio loop.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from common.adapters import Adapters
from common.canary import Canary
from common.config import Config
from common.errors import ConfigError, DisprovedError, EngineError, OtherModelError, WeightError
from common.logs import LOGGER
from common.sockets import Mailbox
from generators.member import Swapped
from generators.requests import ENDED, Requests
from generators.starting import in_own_thread, start_vllm

T = TypeVar("T")
SHUTDOWN_S = 1.0
DIRECT_PATIENCE = 12  # … but for a version that is loaded as it comes: a whole transfer, and a little
PATIENCE = 4  # a child that answers a call not within so many times `weights.timeout_s` hangs, and counts as dead

_log = logging.getLogger(LOGGER)


class Engine(Requests):
    """``version`` is that of the weights it samples with; -1 until the first load."""

    def __init__(self, llm: Any, folder: Path, mailbox: Mailbox, config: Config) -> None:
        super().__init__(llm, config)
        self.mailbox = mailbox  # events of the workers; `generators/member.py` reads it
        num_workers = config.rollout.tensor_model_parallel_size
        self._staging = config.weights.staging
        shares = self._staging == "host" and num_workers > 1
        self.shared = str(_shared_file(folder)) if shares else ""
        self.num_receivers = 1 if self._staging == "host" else num_workers
        self._loaded = (-1, 0.0)  # version that was loaded as it came and is not confirmed yet; seconds it took
        self._folder = folder
        self._patience_s = PATIENCE * config.weights.timeout_s
        self._died = False
        self._timeout_s = config.weights.timeout_s
        self._adapters = Adapters.of(config.model) if config.weights.adapters_only else None

    # ------------------------------------------------------------ start and end
    @classmethod
    async def start(cls, *, model_path: str, config: Config, seed: int, mailbox_address: str | None = None) -> Engine:
        """An engine with random weights, as ``model_path``'s config.json says; takes 10 s or more.

        Args:
            model_path: folder with config.json and tokenizer (weights are not read).
            seed: of the sampler; another one for each generator.
            mailbox_address: where the workers post events; the engine listens there. Default: a
                socket file in a private folder.

        Raises:
            EngineError: vLLM does not start; its own message is in the text or above on stderr. Or there is no room
                for a staged version (``weights.staging``) now.
            ConfigError: adapters are to be sent alone for a layer beside which vLLM cannot compute one.
        """
        folder = Path(tempfile.mkdtemp(prefix="leeway-"))
        mailbox = Mailbox((mailbox_address or f"{folder}/events").removeprefix("ipc://"))
        try:
            llm = await in_own_thread(lambda abandoned: start_vllm(model_path, config, seed, folder, abandoned))
        except BaseException:
            mailbox.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        gc.collect()
        gc.freeze()  # else each full collection walks vLLM's and torch's modules for 0.3 s
        engine = cls(llm, folder, mailbox, config)
        try:
            await engine._plan_staging()
        except BaseException:
            await asyncio.shield(engine.close())
            raise
        return engine

    async def close(self) -> None:
        """End the child; running requests fail with EngineError."""
        if self._closed:
            return
        self._closed = True
        # First the reader of the child's output, which would report the end as a fault.
        if (reader := self._llm.output_handler) is not None:
            reader.cancel()
        self._llm.output_processor.propagate_error(EngineError("the engine was closed"))
        self._trusted.set()
        await asyncio.to_thread(self._llm.shutdown, SHUTDOWN_S)
        self.mailbox.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self.shared:
            for file in Path(self.shared).parent.glob(f"{Path(self.shared).stem}.*"):
                file.unlink(missing_ok=True)

    @property
    def dead(self) -> bool:
        """The child ended, or its output can no longer be read."""
        return bool(self._closed or self._died or self._llm.errored)

    async def wait_dead(self) -> None:
        """Return when the child process has ended; also while no request runs."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        fds = [p.sentinel for p in self._llm.engine_core.resources.engine_manager.processes]
        for fd in fds:
            loop.add_reader(fd, done.set)
        try:
            await done.wait()
            self._died = True
        finally:
            for fd in fds:
                loop.remove_reader(fd)
    # ------------------------------------------------------------ weights
    async def rpc(self, method: str, *, patience_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call a method of ``WorkerExtension`` in each worker; one result per worker."""
        try:
            return list(await self._answer(method, self._llm.collective_rpc(method, kwargs=kwargs), patience_s))
        except EngineError:
            raise
        except Exception as e:
            raise EngineError(f"{method}: {ENDED if self._llm.errored else f'{type(e).__name__}: {e}'}") from e

    async def _answer(self, what: str, call: Awaitable[T], patience_s: float | None = None) -> T:
        """The child's answer to a call. One that does not come in time ends the engine: a frozen child looks alive."""
        patience_s = patience_s or self._patience_s
        try:
            return await asyncio.wait_for(call, patience_s)
        except TimeoutError:
            self._died = True
            raise EngineError(f"{what}: the engine has not answered for {patience_s:g} s; it hangs") from None

    async def _plan_staging(self) -> None:
        """Say what `weights.staging` will need, and refuse what there is no room for."""
        adapters = self._adapters and asdict(self._adapters)
        plans = await self.rpc("plan_staging", staging=self._staging, shared=self.shared, adapters=adapters)
        if faults := [text for word, text, _ in plans if word == "refused"]:
            raise ConfigError(faults[0])
        size, free = plans[0][1], min((p[2] for p in plans if p[2] is not None), default=None)
        if self._staging == "none":
            _log.info("weights.staging=none: %s are loaded as they come, and the engine pauses so long", _GB(size))
            return
        where = "host memory" if self._staging == "host" else "device memory of each worker"
        text = f"weights.staging={self._staging}: a version takes {_GB(size)} of {where}"
        if size is not None and free is not None and size > free:
            raise EngineError(  # no ConfigError, after which no generator is started again: others may free some
                f"{text}, {_GB(free)} are free. Free some, or set weights.staging="
                + ("none (pauses for the transfer)" if self._staging == "device" else "device or none")
            )
        _log.info("%s (%s free)", text, _GB(free))

    async def stage(self, *, on_ready: Callable[[], None], manifest: bytes, **transfer: Any) -> int | None:
        """Begin to receive a version; ``on_ready`` is called once the workers wait for the learner.

        Returns:
            None: it is received beside the sampling; the workers' events tell when it is there.
            Its digest, with `weights.staging=none`: it is loaded (``swap`` confirms it).

        Raises:
            WeightError: it is refused, or its transfer broke. If it was being loaded the engine holds nothing now.
            OtherModelError: it is not this engine's model.
        """
        if self._staging == "none":
            _accepted(await self.rpc("accept", manifest=manifest))
            return await self._load_directly(on_ready, manifest=manifest, **transfer)
        _accepted(await self.rpc("stage", manifest=manifest, mailbox=self.mailbox.address, **transfer))
        on_ready()
        return None

    async def _load_directly(self, on_ready: Callable[[], None], *, number: int, version: int, **transfer: Any) -> int:
        """The engine pauses while the version comes; samples leave again once ``swap`` has confirmed it."""
        core, start = self._llm.engine_core, time.perf_counter()
        held, trusted = self.version, self._trusted.is_set()
        self._trusted.clear()
        if not trusted:
            await self._distrust()  # nobody has confirmed what was loaded before
        self.version = -1
        try:
            await self._answer("pause", core.pause_scheduler_async(mode="keep", clear_cache=self._recompute_kv))
            on_ready()
            answers = await self.rpc("load_directly", patience_s=DIRECT_PATIENCE * self._timeout_s, **transfer)
            failed = [text for word, text in answers if word != "loaded"]
            if not failed:
                await self._answer("set_weight_version", core.set_weight_version_async(str(version)))
            elif trusted and all(word == "refused" for word, _ in answers):
                self.version = held
                self._trusted.set()
            else:
                await self._distrust()
            await self._answer("resume", core.resume_scheduler_async())
        except BaseException:
            await asyncio.shield(self.close())
            raise
        if failed:
            raise WeightError(failed[0] + ("" if self.version == held else "; the engine holds nothing until the next"))
        self._loaded = (version, time.perf_counter() - start)
        return int(answers[0][1])

    async def swap(self, version: int, canary: Canary | None = None, timeout_s: float = 60.0) -> Swapped:
        """Load the weights that the workers have staged (or confirm what was loaded); requests in flight go on with
        them.

        With a canary the version counts as held, and samples leave, only once it is proven.
        Versions only rise.

        Args:
            timeout_s: longest wait for the canary's log-probs.

        Raises:
            DisprovedError: the log-probs are not the canary's, or there are none. The engine then holds
                version -1; running requests begin anew once a load is proven.
            WeightError: the log-probs did not come in time; the engine then holds nothing, too.
            EngineError: nothing complete of that version is staged (the old weights stay), or the
                load failed half way, or hangs (the engine is then closed: its weights are not known).
        """
        if version <= self.version:
            raise EngineError(f"version {version} is not above {self.version}, which this engine holds")
        if self._staging == "none":
            loaded, pause_s = self._loaded
            if loaded != version:
                raise EngineError(f"version {version} is not loaded here (but {loaded})")
        else:
            pause_s = await self._load_staged(version, canary is not None)
        difference = -1.0 if canary is None else await self._prove(canary, timeout_s)
        self.version = version
        self._trusted.set()
        if self.shared:  # all workers look into it by now; without a name it cannot outlive them
            Path(self.shared).unlink(missing_ok=True)
        return Swapped(pause_s, difference)

    async def _load_staged(self, version: int, to_be_proven: bool) -> float:
        """Seconds for which the engine paused. Raises EngineError, see ``swap``."""
        core = self._llm.engine_core
        start = time.perf_counter()
        trusted = self._trusted.is_set()
        if to_be_proven:
            self._trusted.clear()
        try:
            # AsyncLLM.pause_generation does this and then sleeps for 20 ms.
            await self._answer("pause", core.pause_scheduler_async(mode="keep", clear_cache=self._recompute_kv))
            answers = await self.rpc("load_staged", version=version)
            refusals = [a for a in answers if a is not None]
            if not refusals:
                await self._answer("set_weight_version", core.set_weight_version_async(str(version)))
                if not to_be_proven:
                    self.version = version
            elif len(refusals) < len(answers):
                raise EngineError(f"only some workers loaded version {version}: {refusals[0]}")
            await self._answer("resume", core.resume_scheduler_async())
        except BaseException:
            await asyncio.shield(self.close())
            raise
        pause_s = time.perf_counter() - start
        if refusals:
            if trusted:
                self._trusted.set()
            raise EngineError(refusals[0])
        return pause_s

    async def _prove(self, canary: Canary, timeout_s: float) -> float:
        """The difference, if it is small enough; else nothing that was sampled since the load will leave."""
        try:
            try:
                measured = await asyncio.wait_for(self.prompt_logprobs(canary.ids), timeout_s)
            except TimeoutError:  # this engine is slow, which says nothing of its weights
                raise WeightError(f"canary: no log-probs within {timeout_s:g} s; nothing is held until then") from None
            return canary.check(measured)
        except Exception as e:  # whatever it is: what is not proven is not sampled with
            await self._distrust()
            if isinstance(e, WeightError):
                raise
            raise DisprovedError(float("inf"), f"canary: no log-probs ({type(e).__name__}: {e})") from e

    async def _distrust(self) -> None:
        """The engine holds nothing; requests that ran with what it has begin anew once a load is trusted."""
        self.version = -1
        self._num_disproofs += 1
        await self._answer("abort", self._llm.abort(list(self._running.values())))


def _accepted(answers: list[Any]) -> None:
    """Raises WeightError for what a worker does not take."""
    for word, text in answers:
        if word != "begun":
            raise OtherModelError(text) if word == "other_model" else WeightError(text)


def _GB(size: int | None) -> str:
    return "an unknown number of bytes" if size is None else f"{size / 1e9:.3g} GB"

def _shared_file(folder: Path) -> Path:
    """In memory, where there is such a place; one name for each engine."""
    shm = Path("/dev/shm")
    return (shm if shm.is_dir() else folder) / f"{folder.name}.weights"
