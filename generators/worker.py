"""Inside the engine's processes: dies with its parent, stages weights, loads them.

vLLM imports this module because it is named as executor and worker extension (``starting.py``).
"""

from __future__ import annotations

import copy
import math
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from common.adapters import Adapters, is_adapter, sent_name
from common.buffers import Buffer, free_on
from common.errors import ConfigError, EngineError, OtherModelError, WeightError
from common.failpoints import failpoint
from common.processes import die_with_parent
from common.sockets import post
from common.wire import encode
from generators.adapter_slot import AdapterSlot
from generators.arriving import Arriving
from generators.receiving import Layout, Line, Shapes, reason_of
from generators.staging import Staging
from generators.starting import BACKEND


def _die_with_parent() -> None:
    """In a process of the engine: be killed when its parent is, also if that has already happened."""
    parent = os.environ.get("LEEWAY_ENGINE_PARENT")
    if parent is None or parent == str(os.getpid()):
        return  # the generator itself
    die_with_parent()
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ["LEEWAY_ENGINE_PARENT"] = str(os.getpid())  # for workers that this process starts


_die_with_parent()


class OneWorker(UniProcExecutor):
    """The worker inside EngineCore. (Unpickling the class imports this module early in the child.)"""


class ManyWorkers(MultiprocExecutor):
    """A process for each worker."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to set up: groups are made for each transfer."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A whole version, in memory or as it comes."""

    weights: Buffer | Arriving


class StagedWeights(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's hook: loads a version that ``Staging`` has received."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Before any reload, which takes tied tensors apart.
        self._names = {name for name, _ in self.model.named_parameters()}

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: Any) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # the base class would do this on CPUs too, where it raises
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        loaded = self.model.load_weights(update_info.weights.tensors())
        self._refuse_gaps(loaded)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        _refresh_tied_head(self.model, self.model_config)

    def shutdown(self) -> None:
        pass

    def _refuse_gaps(self, loaded: Iterable[str] | None) -> None:
        """What ``load_weights`` says it loaded must be all that the model has."""
        if loaded is None:
            return  # this model's loader does not say; the digests and the first dummy start remain
        missing = self._names - set(loaded)
        if missing:
            raise EngineError(f"the model has tensors that were not sent: {', '.join(sorted(missing)[:5])}")


def _refresh_tied_head(model: Any, model_config: Any) -> None:
    """On CPUs a tied head keeps a packed copy of the old weights, silently; pack it anew."""
    head = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear") and model_config.hf_text_config.tie_word_embeddings:
        head.quant_method.process_weights_after_loading(head)


def _shapes_of(model_config: Any, adapters: Adapters | None) -> Shapes | None:
    """Name and shape of each tensor that the learner would send for this model; None: transformers does not say."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(model_config.hf_config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=model_config.trust_remote_code)
    except Exception:  # whatever it is: the load and the canary are left to judge by
        return None
    if adapters is None:
        return {name: tuple(p.shape) for name, p in model.named_parameters()}
    adapters.inject(model)
    return {sent_name(name): tuple(p.shape) for name, p in model.named_parameters() if is_adapter(name)}


class WorkerExtension:
    """Mixed into vLLM's worker; ``Engine.rpc`` calls these methods by name, between two steps.

    Answers are lists: ``[word, text or number]``.
    """

    _staging: Staging | None = None
    _layout: Layout | None = None
    _slot: AdapterSlot | None = None  # if versions are adapters alone

    def plan_staging(self, *, staging: str, shared: str, adapters: dict[str, Any] | None = None) -> list[Any]:
        """``["planned", bytes of a version, free bytes where it would lie]``; None: not known.

        Or ``["refused", why, None]``: such adapters cannot be computed here.
        """
        try:
            model = self._plan_adapters(Adapters(**adapters)) if adapters else _shapes_of(self.model_config, None)
        except ConfigError as e:
            return ["refused", str(e), None]
        if staging == "none":
            self._layout, self._line = Layout(model), Line()
        else:
            device = self.device if staging == "device" else None
            self._staging = Staging(worker=self.rank, shared=shared, device=device, model=model)
        numel = None if model is None else sum(math.prod(shape) for shape in model.values())
        free = free_on(self.device if staging == "device" else torch.device("cpu"))
        return ["planned", None if numel is None else numel * self.model_config.dtype.itemsize, free]

    def _plan_adapters(self, adapters: Adapters) -> Shapes | None:
        """Raises ConfigError for those that cannot be computed here."""
        self._slot = AdapterSlot(self.model_runner.lora_manager, adapters, self.model_config.get_vocab_size())
        model = _shapes_of(self.model_config, adapters)
        self._slot.refuse_unknown_layers(model or {})
        return model

    def stage(self, *, mailbox: str, **transfer: Any) -> list[Any]:
        """Start to receive a version (``Staging.begin``); events go to ``mailbox``.

        Answers ``begun``; or ``refused`` or ``other_model``, and why.
        """
        failpoint("worker.stage")
        try:
            assert self._staging is not None, "plan_staging comes first"
            self._staging.begin(post=lambda op, **fields: post(mailbox, encode(op, **fields)), **transfer)
        except WeightError as e:
            return _refusal(e)
        return ["begun", ""]

    def load_staged(self, *, version: int) -> str | None:
        """Put the staged weights into the model.

        Returns why not, if ``version`` is not staged; nothing has changed then. After an exception
        the model is not usable.
        """
        failpoint("worker.load")
        try:
            if self._staging is None:
                raise WeightError("nothing is staged here")
            weights = self._staging.take(version)
        except WeightError as e:
            return str(e)
        if self._slot is not None:
            self._slot.fill(weights.tensors())
            return None
        self.start_weight_update()
        self.update_weights({"weights": weights})
        self.finish_weight_update()
        return None

    def accept(self, *, manifest: bytes) -> list[Any]:
        """Without staging: whether such a version can be loaded. Answers as ``stage`` does."""
        try:
            assert self._layout is not None, "plan_staging comes first"
            self._layout.accept(manifest)
        except WeightError as e:
            return _refusal(e)
        return ["begun", ""]

    def load_directly(self, *, manifest: bytes, rank: int, **transfer: Any) -> list[Any]:
        """Without staging: receive a version into the model, while the engine pauses.

        Answers ``loaded`` and the digest; ``refused`` if nothing has changed; ``torn`` if the transfer broke and
        the model is now a mixture, which the next whole version replaces. Raises what the load itself meets with.
        """
        assert self._layout is not None, "plan_staging comes first"
        failpoint("worker.load")
        wanted = self._layout.accept(manifest)
        try:
            arriving = Arriving(wanted, self._line, rank=rank + self.rank, **transfer)
        except (RuntimeError, WeightError) as e:
            return ["refused", reason_of(e)]
        try:
            self._load(arriving)
            digest = arriving.check()
        except WeightError as e:
            return ["torn", reason_of(e)]
        finally:
            arriving.close()
        self._layout.keep(wanted)
        return ["loaded", digest]

    def _load(self, arriving: Arriving) -> None:
        """Raises what the transfer raises, after which the model can be loaded again; or EngineError."""
        if self._slot is not None:
            self._slot.fill(arriving.tensors())
            return
        self.start_weight_update()
        try:
            self.update_weights({"weights": arriving})
        except BaseException:
            with set_current_vllm_config(self.vllm_config):  # layers half loaded are made whole, of whatever came
                self.weight_transfer_engine.finish_weight_update()
            raise
        self.finish_weight_update()


def _refusal(error: WeightError) -> list[Any]:
    return ["other_model" if isinstance(error, OtherModelError) else "refused", str(error)]


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, StagedWeights)
