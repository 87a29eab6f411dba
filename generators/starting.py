"""Starting vLLM: its arguments, its environment, and the thread that its processes live and die with.

vLLM is imported when an engine starts, not with this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.config import Config
from common.errors import EngineError

ADAPTER_NAME, ADAPTER_ID = "policy", 1  # of the one adapter, under `weights.adapters_only`
BACKEND = "leeway"  # name of our weight-transfer backend inside the worker
SERVED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM makes room
PROGRESS_TOKENS = 32  # vLLM reports a running request every so many tokens

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


async def in_own_thread(start: Callable[[threading.Event], Any]) -> Any:
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


def start_vllm(model_path: str, config: Config, seed: int, folder: Path, abandoned: threading.Event) -> Any:
    """AsyncLLM; its processes get their temporary files in ``folder``. Raises EngineError, or what vLLM raises."""
    _set_environment(model_path, folder)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(**engine_args(model_path, config, seed, current_platform.is_cpu()))
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


def engine_args(model_path: str, config: Config, seed: int, on_cpu: bool) -> dict[str, Any]:
    """What AsyncEngineArgs is called with."""
    from vllm.config import WeightTransferConfig

    rollout = config.rollout
    workers = rollout.tensor_model_parallel_size
    args: dict[str, Any] = {
        "model": model_path,
        "load_format": "auto" if config.weights.adapters_only else "dummy",
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
    if config.weights.adapters_only:
        rank = next(r for r in SERVED_RANKS if r >= config.model.lora_rank)
        args |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    if on_cpu:
        if workers > 1 and _num_numa_nodes() < workers:  # vLLM binds a worker to each node, or refuses
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling small kernels costs seconds at the first request
        args |= {"enforce_eager": True, "kv_cache_memory_bytes": rollout.cpu_kv_cache_bytes}
    else:
        args["gpu_memory_utilization"] = rollout.gpu_memory_utilization
    return args


def _num_numa_nodes() -> int:
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
