"""The reward of this run, as the config says: the user's function or a built-in one.

The overlong penalty is no part of it: the learner adds it (`learner/estimates.py`), so what is
reported, validated and filtered by is the score itself.
"""

from __future__ import annotations

import logging
from typing import Any

from common.answers import scoring_fault
from common.config import Config
from generators.rewards import ERROR, BuiltIn, Score, built_in
from generators.rewards.pool import RewardProcess


class Scorer:
    """Scores responses. ``start`` it before the engine: a bad function then ends the generator at once."""

    def __init__(self, config: Config, log: logging.Logger) -> None:
        self._config, self._log = config, log
        self._custom: RewardProcess | None = None
        self._isolated: dict[str, RewardProcess] = {}  # by module, started at the first row that needs it
        self._logged: set[str] = set()

    @classmethod
    async def start(cls, config: Config, log: logging.Logger) -> Scorer:
        """Raises ConfigError if the user's function cannot be loaded."""
        scorer = cls(config, log)
        custom = config.reward.custom_function
        if custom.path:
            scorer._custom = scorer._process(custom.path, custom.name)
            try:
                await scorer._custom.ready()
            except BaseException:
                scorer.close()
                raise
        return scorer

    def row_fault(self, row: dict[str, Any]) -> tuple[str, str] | None:
        """``(short reason, sentence)`` if no response to this row could be scored."""
        if self._custom is not None:
            return None
        return scoring_fault(row["data_source"], row["reward_model"]["ground_truth"])

    async def score(self, row: dict[str, Any], text: str) -> Score:
        """The score of a response; raises only if scoring is impossible altogether."""
        arguments = (row["data_source"], text, row["reward_model"]["ground_truth"], row.get("extra_info"))
        if self._custom is not None:
            return await self._custom.score(*arguments)
        scorer = built_in(row["data_source"])
        assert scorer is not None  # `row_fault` was asked
        if scorer.isolated:
            return await self._isolated_process(scorer).score(*arguments)
        return self._here(scorer, *arguments)

    def close(self) -> None:
        for process in [self._custom, *self._isolated.values()]:
            if process is not None:
                process.close()

    def _here(self, scorer: BuiltIn, *arguments: Any) -> Score:
        try:
            return Score(float(scorer.compute_score(*arguments)))
        except Exception as e:  # one odd row must not end the generator
            detail = f"{type(e).__name__}: {e}"
            if detail not in self._logged and len(self._logged) < 20:
                self._logged.add(detail)
                self._log.exception("built-in reward of %s", arguments[0])
            return Score(None, fault=ERROR, detail=detail)

    def _isolated_process(self, scorer: BuiltIn) -> RewardProcess:
        module = scorer.compute_score.__module__
        if module not in self._isolated:
            self._isolated[module] = self._process(module, scorer.compute_score.__name__)
        return self._isolated[module]

    def _process(self, target: str, name: str) -> RewardProcess:
        return RewardProcess(
            target,
            name,
            timeout_s=self._config.reward.timeout_s,
            start_timeout_s=self._config.run.start_timeout_s,
            log=self._log,
        )
