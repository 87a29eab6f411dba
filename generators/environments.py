"""From a prompt row to token ids, and from sampled token ids to the text that is scored.

An environment plays one episode with the model: it asks the engine for completions and returns the
whole trajectory. Here there is one turn; a tool environment would call ``generate`` several times
and append its own tokens with loss mask 0 (``loss_mask_runs``), without anything else changing.

Sampled tokens are kept as they are: no text is ever tokenised again, so what is trained is what
was sampled, the end token included, once. Lengths and masks come from the lists of tokens, never
from comparing ids with a padding or end id.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from common.config import Config
from common.errors import ConfigError
from common.prompting import prompt_ids


class Completion(Protocol):
    """What the engine returns, see ``generators/requests.py``."""

    response_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int, int]]
    finish_reason: str


# (prompt ids, largest number of new tokens) -> what the engine sampled
Generate = Callable[[list[int], int], Awaitable[Completion]]


@dataclass(frozen=True)
class Trajectory:
    """One episode. Example: 4 sampled tokens, then 2 of a tool."""

    response_ids: list[int]  # [response]
    logprobs: list[float]  # [response]; 0 on tokens that were not sampled
    spans: list[tuple[int, int, int]]  # [(3, 0, 6)]
    finish_reason: str  # of the last completion: "stop" or "length"
    loss_mask_runs: tuple[int, ...] = ()  # (4, 2); (): all tokens were sampled


class RowError(Exception):
    """The row itself is at fault; trying it again is no use. ``reason`` is a short word to count by."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


class Environment(Protocol):
    def prompt_ids(self, row: dict[str, Any]) -> list[int]:
        """Raises RowError."""

    async def play(self, prompt_ids: list[int], row: dict[str, Any], generate: Generate) -> Trajectory: ...

    def text(self, trajectory: Trajectory) -> str:
        """What the reward sees: only what came after the prompt."""


class SingleTurn:
    """One prompt, one response."""

    def __init__(self, tokenizer: Any, config: Config) -> None:
        self._tokenizer = tokenizer
        self._max_prompt_tokens = config.data.max_prompt_length
        self._max_response_tokens = config.data.max_response_length

    def prompt_ids(self, row: dict[str, Any]) -> list[int]:
        """See `common/prompting.py`. Raises RowError: no prompt, or one that is too long."""
        try:
            ids = prompt_ids(self._tokenizer, row["prompt"])
        except Exception as e:  # templates are programs: they refuse roles, orders, …
            raise RowError("bad_prompt", f"{type(e).__name__}: {e}") from e
        if not ids:
            raise RowError("bad_prompt", "no tokens")
        if len(ids) > self._max_prompt_tokens:
            raise RowError("prompt_too_long", f"{len(ids)} tokens, data.max_prompt_length={self._max_prompt_tokens}")
        return ids

    async def play(self, prompt_ids: list[int], row: dict[str, Any], generate: Generate) -> Trajectory:
        c = await generate(prompt_ids, self._max_response_tokens)
        return Trajectory(c.response_ids, c.logprobs, c.spans, c.finish_reason)

    def text(self, trajectory: Trajectory) -> str:
        return str(self._tokenizer.decode(trajectory.response_ids, skip_special_tokens=True))


def load_environment(model_path: str, config: Config) -> Environment:
    """The environment of this run, with the tokenizer of the model folder.

    Raises:
        ConfigError: the folder has no tokenizer that can be loaded.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as e:
        first = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise ConfigError(f"model {model_path}: its tokenizer cannot be loaded: {first}") from e
    return SingleTurn(tokenizer, config)
