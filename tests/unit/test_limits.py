"""What can be changed of a run that goes on."""

import pytest

from common.errors import ConfigError
from common.limits import LIVE, OF_A_STEP, number, read_changes
from common.loading import config_paths, load_config
from learner.settings import live_settings

CONFIG = load_config([], ["model.toy=true", "data.task=reverse_digits", "staleness.max=2", "weights.publish_every=3"])


def refusal(*items, standing=None):
    with pytest.raises(ConfigError) as caught:
        read_changes(list(items), CONFIG, standing or {})
    return "\n".join(caught.value.faults)


def test_changes_are_read_as_the_config_reads_them():
    assert set(LIVE) <= config_paths().keys() and tuple(live_settings(CONFIG, Limits({}))) == OF_A_STEP
    assert read_changes(["staleness.max=4", "actor_rollout_ref.actor.optim.lr=2e-6"], CONFIG, {}) == {
        "staleness.max": 4, "actor.optim.lr": 2e-6,
    }  # fmt: skip


def test_what_cannot_be_is_refused_with_the_reason():
    assert "cannot be changed while the run goes on; these can: staleness.max" in refusal("rollout.n=3")
    assert "write KEY=VALUE" in refusal("staleness.max")
    assert "rollout.temperature" in refusal("rollout.temperature=0")
    assert "actor.clip_ratio_low=null: give a number" in refusal("actor.clip_ratio_low=null")
    assert "weights.publish_every" in refusal("staleness.max=1")  # the gate would close for ever
    assert "staleness.max" in refusal("staleness.max=4", "staleness.max=x")


class Limits:
    def __init__(self, limits):
        self.limit = limits.get


def test_only_sound_numbers_act():
    assert live_settings(CONFIG, Limits({"actor.optim.lr": 0.5}))["actor.optim.lr"] == 0.5
    for bad in (True, "1", None, [1], float("nan"), float("inf")):
        assert live_settings(CONFIG, Limits({"actor.optim.lr": bad})) == live_settings(CONFIG, Limits({}))
    assert number(0.0, 1.0, above=0.0) == 1.0 and number(0.1, 1.0, above=0.0) == 0.1
