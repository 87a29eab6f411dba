"""How a checkpoint's tensors get to disk: copied to host memory, written by a thread, with points to die at.

Tests kill the process at each of `POINTS` (`LEEWAY_FAILPOINT=learner.checkpoint.<point>`), in the order in
which a save passes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from common.errors import CheckpointError
from common.failpoints import failpoint

POINTS = (
    "begin", "folder", "staged", "thread",
    "setup", "plan", "global_plan", "data", "data_written", "metadata", "metadata_written",  # within DCP
    "tensors", "state", "hashes", "written", "flushed", "aside", "renamed", "settled", "retired", "removed", "end",
    "told",  # the broker knows
)  # fmt: skip


def at(point: str) -> None:
    """A place where tests can make the process fail."""
    failpoint(f"learner.checkpoint.{point}")


class Stager:
    """Copies a state into host memory that is kept from one checkpoint to the next."""

    def __init__(self) -> None:
        on_gpu = torch.cuda.is_available()
        options = StagingOptions(
            use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
        )
        self._stager = DefaultStager(options)

    def __call__(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """A copy on the host that training does not change; a GPU has finished copying when this returns."""
        staged = self._stager.stage(tensors)
        assert isinstance(staged, dict)
        return staged


def write_tensors(tensors: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> None:
    """All ranks write their shards; on rank 0 everything is written when this returns.

    Raises:
        CheckpointError: on every rank, if one of them could not write.
    """
    try:
        dcp.save(tensors, storage_writer=_Writer(folder), process_group=group)
    except CheckpointException as e:  # a BaseException
        reasons = {f"rank {rank}: {failure[0]}" for rank, failure in e.failures.items()}
        raise CheckpointError(f"{folder}: cannot be written ({'; '.join(sorted(reasons))})") from e


class _Writer(dcp.FileSystemWriter):
    """DCP's, with points to die at."""

    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
        at("setup")
        super().set_up_storage_writer(*args, **kwargs)

    def prepare_local_plan(self, plan: Any) -> Any:
        at("plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        at("global_plan")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        at("data")
        written = super().write_data(plan, planner)
        at("data_written")
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        at("metadata")
        super().finish(metadata, results)
        at("metadata_written")


def in_thread(work: Callable[[], None], *, name: str) -> Future[None]:
    """Run `work` in a thread that does not keep the process alive, with this thread's GPU as the current one."""
    future: Future[None] = Future()
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if gpu is not None:  # a new thread would wait for GPU 0, whichever its tensors are on
                torch.cuda.set_device(gpu)
            future.set_result(work())
        except BaseException as e:  # whoever waits gets it
            future.set_exception(e)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
