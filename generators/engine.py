"""The engine of one generator: vLLM's AsyncLLM, with weights that change while requests run.

Two processes: this one has the scheduler's front, its child (``EngineCore``) the model and
``generators/worker.py``. vLLM is imported when an engine starts, not with this module. All
methods are for one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from common.canary import Canary
from common.config import Config
from common.errors import DisprovedError, EngineError, OtherModelError, RequestCancelled, WeightError
from common.logs import LOGGER
from common.sockets import Mailbox
from generators.member import Swapped

T = TypeVar("T")
BACKEND = "leeway"  # name of our weight-transfer backend inside the worker
PROGRESS_TOKENS = 32  # vLLM reports a running request every so many tokens
SHUTDOWN_S = 1.0
DIRECT_PATIENCE = 12  # … but for a version that is loaded as it comes: a whole transfer, and a little
PATIENCE = 4  # a child that answers a call not within so many times `weights.timeout_s` hangs, and counts as dead

_log = logging.getLogger(LOGGER)
# vLLM only says "see above"; its processes write where their launcher writes.
ENDED = "the engine's process ended; what it said last is on stderr (of a launched run: RUN_DIR/logs/generators.out)"

# Read by vLLM, torch and Hugging Face when they are imported, or at each use.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Rendezvous and collectives of one engine stay on this host.
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class Completion:
    """What the engine made of one prompt. Example for three tokens."""

    response_ids: list[int]  # [response]: [17, 4, 1], the end token included
    logprobs: list[float]  # [response], of the distribution actually sampled
    spans: list[tuple[int, int, int]]  # [(3, 0, 2), (4, 2, 3)]: version 4 made the last token
    finish_reason: str  # "stop" or "length"


class Engine:
    """``version`` is that of the weights it samples with; -1 until the first load."""

    def __init__(self, llm: Any, folder: Path, mailbox: Mailbox, config: Config) -> None:
        self.version = -1
        self.mailbox = mailbox  # events of the workers; `generators/member.py` reads it
        num_workers = config.rollout.tensor_model_parallel_size
        self._staging = config.weights.staging
        shares = self._staging == "host" and num_workers > 1
        self.shared = str(_shared_file(folder)) if shares else ""
        self.num_receivers = 1 if self._staging == "host" else num_workers
        self._loaded = (-1, 0.0)  # version that was loaded as it came and is not confirmed yet; seconds it took
        self._llm = llm
        self._folder = folder
        self._recompute_kv = config.rollout.recompute_kv
        self._patience_s = PATIENCE * config.weights.timeout_s
        self._closed = False
        self._died = False
        self._running: dict[str, str] = {}  # request -> vLLM's id of it
        self._cancels: dict[str, asyncio.Event] = {}  # request -> set once `cancel` was called for it
        self._trusted = asyncio.Event()  # cleared while a load is to be proven: no sample leaves
        self._trusted.set()
        self._num_disproofs = 0
        self._num_proofs = 0
        self._timeout_s = config.weights.timeout_s

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
        """
        folder = Path(tempfile.mkdtemp(prefix="leeway-"))
        mailbox = Mailbox((mailbox_address or f"{folder}/events").removeprefix("ipc://"))
        try:
            llm = await _in_own_thread(lambda abandoned: _start_vllm(model_path, config, seed, folder, abandoned))
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

    # ------------------------------------------------------------ sampling
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
    ) -> Completion:
        """Sample one response. Cancelling the task ends the request.

        While a load is being proven the response is held back; if it is disproved, the request is made anew.

        Args:
            temperature: 0 is greedy; the log-probs are then those of temperature 1.
            request_id: unique among running requests.
            on_progress: called with the number of tokens made so far, about every 32 tokens.

        Raises:
            RequestCancelled: ``cancel`` was called for it.
            EngineError: the engine died, refused the prompt, or has no weights of a known version.
        """
        self._cancels[request_id] = cancelled = asyncio.Event()
        try:
            while True:
                self._running[request_id] = request_id
                if self.version < 0:  # what it has was disproved, is being loaded, or is about to be proven
                    await self._wait_trusted(cancelled)
                disproofs = self._num_disproofs
                self._running[request_id] = vllm_id = f"{request_id}~{disproofs}"
                try:
                    completion = await self._sample(
                        prompt_ids, temperature, top_p, top_k, max_tokens, vllm_id, on_progress
                    )
                except RequestCancelled:
                    if cancelled.is_set() or disproofs == self._num_disproofs:
                        raise
                await self._wait_trusted(cancelled)
                if self._closed:
                    raise EngineError("the engine was closed")
                if disproofs == self._num_disproofs:
                    return completion
        finally:
            del self._running[request_id], self._cancels[request_id]

    async def _wait_trusted(self, cancelled: asyncio.Event) -> None:
        """Until what the engine has counts. Raises RequestCancelled when the request is ``cancelled``."""
        if not self._trusted.is_set():
            waits = [asyncio.ensure_future(e.wait()) for e in (self._trusted, cancelled)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        if cancelled.is_set():
            raise RequestCancelled("the request was cancelled")

    async def _sample(
        self,
        prompt_ids: list[int],
        temperature: float,
        top_p: float,
        top_k: int,
        max_tokens: int,
        request_id: str,
        on_progress: Callable[[int], None] | None,
    ) -> Completion:
        """One request, whatever the proof of its weights will say."""
        from vllm.inputs.engine import tokens_input

        stream = on_progress is not None and max_tokens > PROGRESS_TOKENS
        params = _sampling_params(temperature, top_p, max(top_k, 0), max_tokens, stream)
        ids: list[int] = []
        logprobs: list[float] = []
        last = None
        held_at_start = self.version
        try:
            async for out in self._llm.generate(tokens_input(prompt_ids), params, request_id):
                last = out.outputs[0]
                ids += last.token_ids
                if last.token_ids:
                    logprobs += _sampled_logprobs(last.logprobs, len(last.token_ids))
                    if on_progress is not None:
                        on_progress(len(ids))
        except Exception as e:
            cause = e.__cause__ or e  # vLLM wraps what it does not expect
            what = ENDED if self._llm.errored else f"{type(cause).__name__}: {cause}"
            raise EngineError(f"request {request_id}: {what}") from e
        if last is None or last.finish_reason == "abort":
            raise RequestCancelled(f"request {request_id} was cancelled")
        if last.finish_reason not in ("stop", "length"):
            raise EngineError(f"request {request_id} ended with {last.finish_reason!r}")
        spans = _spans(last.weight_versions, len(ids), request_id)
        if not self._recompute_kv:  # its oldest keys and values may be of the version held when it came
            spans = [(min(spans[0][0], held_at_start), 0, len(ids))]
        return Completion(ids, logprobs, spans, last.finish_reason)

    async def cancel(self, request_id: str) -> None:
        """End a request early; nothing happens if it is unknown."""
        if request_id in self._running:
            self._cancels[request_id].set()
            await self._llm.abort(self._running[request_id])

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
        plans = await self.rpc("plan_staging", staging=self._staging, shared=self.shared)
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

    async def prompt_logprobs(self, ids: tuple[int, ...]) -> list[float]:
        """[ids - 1]: log-probs of the tokens from the second on; goes before all that wait for their turn."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._num_proofs += 1
        params = SamplingParams(
            n=1, temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        last = None
        async for out in self._llm.generate(tokens_input(list(ids)), params, f"canary-{self._num_proofs}", priority=-1):
            last = out
        if last is None or last.prompt_logprobs is None:
            raise EngineError("the engine gave no log-probs of the canary")
        flat = last.prompt_logprobs
        return [flat.logprobs[i] for i in flat.start_indices[1:]]

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


@functools.lru_cache(maxsize=64)
def _sampling_params(temperature: float, top_p: float, top_k: int, max_tokens: int, stream: bool) -> Any:
    """vLLM's request settings. Requests share them: its own deep copy costs more than a short request's sampling."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        logprobs=0,  # the sampled token's only
        flat_logprobs=True,
        skip_clone=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    )


def _sampled_logprobs(logprobs: Any, num_tokens: int) -> list[float]:
    """The first entry of each position is the sampled token's."""
    if len(logprobs) != num_tokens:
        raise EngineError(f"{len(logprobs)} log-probs for {num_tokens} tokens")
    return [logprobs.logprobs[i] for i in logprobs.start_indices]


def _spans(stamped: Any, num_tokens: int, request_id: str) -> list[tuple[int, int, int]]:
    """vLLM's stamps as numbers; an engine without published weights has none that count."""
    spans = [(s.version, s.start, s.end) for s in stamped or []]
    if not all(v.isdecimal() for v, _, _ in spans) or not spans or spans[-1][2] != num_tokens:
        raise EngineError(f"request {request_id}: the engine stamped {spans} on {num_tokens} tokens")
    return [(int(v), start, end) for v, start, end in spans if end > start]


def _shared_file(folder: Path) -> Path:
    """In memory, where there is such a place; one name for each engine."""
    shm = Path("/dev/shm")
    return (shm if shm.is_dir() else folder) / f"{folder.name}.weights"


# ---------------------------------------------------------------- starting vLLM
async def _in_own_thread(start: Callable[[threading.Event], Any]) -> Any:
    """Run ``start`` in a thread that never ends: the child is killed when the thread that made it does.

    ``start`` gets an event that is set if nobody waits for it any more.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()
    abandoned = threading.Event()

    def settle(value: Any, error: Exception | None) -> None:
        if not result.done():
            result.set_result(value) if error is None else result.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = start(abandoned)
        except Exception as e:
            error = e if isinstance(e, EngineError) else EngineError(f"vLLM does not start: {type(e).__name__}: {e}")
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, value, error)
        if error is None:
            threading.Event().wait()

    threading.Thread(target=run, name="engine-parent", daemon=True).start()
    try:
        return await result
    except asyncio.CancelledError:
        abandoned.set()
        _kill_children()
        raise


def _kill_children() -> None:
    """An engine that is still starting; else this process would wait for it when it ends."""
    for child in multiprocessing.active_children():
        if child.name.startswith("EngineCore"):
            child.kill()


def _start_vllm(model_path: str, config: Config, seed: int, folder: Path, abandoned: threading.Event) -> Any:
    _set_environment(model_path, folder)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(**_engine_args(model_path, config, seed, current_platform.is_cpu()))
    with _for_children(folder):
        if abandoned.is_set():
            raise EngineError("the engine is no longer wanted")
        return AsyncLLM.from_engine_args(args)


def _set_environment(model_path: str, folder: Path) -> None:
    os.environ.update(_ENVIRONMENT)
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it overrides kv_cache_memory_bytes
    if os.path.isdir(model_path):
        os.environ["HF_HUB_OFFLINE"] = "1"


@contextlib.contextmanager
def _for_children(folder: Path) -> Iterator[None]:
    """Environment that the engine's processes get and this one does not keep."""
    before = dict(os.environ)
    os.environ["TMPDIR"] = str(folder)  # rendezvous files
    os.environ["LEEWAY_ENGINE_PARENT"] = str(os.getpid())
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _engine_args(model_path: str, config: Config, seed: int, on_cpu: bool) -> dict[str, Any]:
    from vllm.config import WeightTransferConfig

    rollout = config.rollout
    workers = rollout.tensor_model_parallel_size
    args: dict[str, Any] = {
        "model": model_path,
        "load_format": "dummy",
        "dtype": config.model.dtype,
        "seed": seed,
        "max_model_len": config.max_sequence_tokens,
        "max_num_seqs": rollout.max_num_seqs,
        "enable_prefix_caching": rollout.enable_prefix_caching and rollout.recompute_kv,
        "trust_remote_code": config.model.trust_remote_code,
        "disable_log_stats": True,
        "logprobs_mode": "processed_logprobs",
        "stream_interval": PROGRESS_TOKENS,
        "scheduling_policy": "priority",  # the canary goes first; all else has the same priority: first come
        "generation_config": "auto",
        "tensor_parallel_size": workers,
        # On a CPU, too, the worker lives inside EngineCore: vLLM's own choice is a third process.
        "distributed_executor_backend": f"generators.worker.{'OneWorker' if workers == 1 else 'ManyWorkers'}",
        "worker_extension_cls": "generators.worker.WorkerExtension",
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
    }
    if on_cpu:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling small kernels costs seconds at the first request
        args |= {"enforce_eager": True, "kv_cache_memory_bytes": rollout.cpu_kv_cache_bytes}
    else:
        args["gpu_memory_utilization"] = rollout.gpu_memory_utilization
    return args
