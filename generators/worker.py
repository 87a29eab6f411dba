"""Inside the engine's processes: dies with its parent, receives weights, loads them."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from common.processes import die_with_parent

BACKEND = "leeway"


@dataclass
class InitInfo(WeightTransferInitInfo):
    pass


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    tensors: Any = None


class StagedWeights(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        raise NotImplementedError

    def receive_weights(self, update_info: UpdateInfo) -> None:
        raise NotImplementedError

    def finish_weight_update(self) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        pass


class WorkerExtension:
    """Mixed into vLLM's worker class."""


def _register() -> None:
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, StagedWeights)


def _die_with_engine() -> None:
    parent = os.environ.get("LEEWAY_ENGINE_PARENT")
    if parent is None:
        return  # imported outside an engine
    die_with_parent()
    if os.getppid() == 1 and parent != "1":
        os.kill(os.getpid(), signal.SIGKILL)


_register()
_die_with_engine()
