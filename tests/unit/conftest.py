"""Fixtures that several files use."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the small model's first weights. Never written to."""
    from tests.learner_parts import initial_weights, make_config  # imports torch

    return initial_weights(tmp_path_factory.mktemp("model"), make_config())
