"""How long a checkpoint holds up training."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure, benchmark

HIDDEN, LAYERS, VOCAB = 256, 4, 8192
ROUNDS = 3


@benchmark
def checkpoint_blocking() -> Iterator[Figure]:
    """A model of 5 M parameters and its optimizer (60 MB), on one rank: seconds for which training waits when the
    checkpoint is written beside it, over those when it waits for the whole of it. Medians without the first."""
    with tempfile.TemporaryDirectory() as folder:
        times = _times(Path(folder))
    yield Figure("learner.checkpoint_blocked", times["copied"] / times["waited"], "asynchronous/synchronous", "≤ 0.25")
    yield Figure("learner.checkpoint_whole", times["written"] / times["waited"], "asynchronous/synchronous", None)


def _times(folder: Path) -> dict[str, float]:
    from learner.checkpoint import Checkpoints
    from learner.ranks import join_ranks, leave_ranks

    ranks = join_ranks()
    try:
        models = _models(ranks)
        checkpoints = Checkpoints(folder, run_id="bench", keep=1, ranks=ranks)
        rounds: dict[str, list[float]] = {"copied": [], "written": [], "waited": []}
        for step in range(0, 2 * ROUNDS + 2, 2):
            began = time.perf_counter()
            checkpoints.begin(step, models, {})
            rounds["copied"].append(time.perf_counter() - began)
            checkpoints.finished(wait=True)
            rounds["written"].append(time.perf_counter() - began)
            began = time.perf_counter()
            checkpoints.save(step + 1, models, {})
            rounds["waited"].append(time.perf_counter() - began)
        return {name: statistics.median(values[1:]) for name, values in rounds.items()}
    finally:
        leave_ranks()


def _models(ranks):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from common.config import Config
    from learner.estimates import make_kl_controller
    from learner.model import Actor, without_dropout
    from learner.models import Models
    from learner.optim import make_optimizer
    from learner.sharding import shard
    from learner.updates import Trainee

    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    actor = shard(Actor(without_dropout(Qwen2ForCausalLM(config))), ranks.mesh, dtype="float32")
    whole = Config()
    trainee = Trainee("actor", actor, make_optimizer(actor, whole.actor.optim), whole.actor)
    return Models(trainee, None, None, make_kl_controller(whole))
