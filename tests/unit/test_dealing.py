"""Which rank fetches what, and that the parts make the batch of one rank."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import LedgerError
from learner.ahead import Ahead, can_be_mended
from learner.batch import Columns, columns_of
from learner.dealing import deal, own_share
from learner.feed import Claim, Group, StepRow
from learner.plain import pack, unpack
from tests.learner_parts import alone, make_config, make_groups
from tests.several_ranks import run_on_ranks
from tests.share_program import Payloads, claim_of


@pytest.mark.parametrize("num_shares", [1, 2, 3, 8])
def test_shares_are_runs_of_about_equal_size(num_shares: int) -> None:
    rng = np.random.default_rng(num_shares)
    for num in [1, 2, 7, *rng.integers(8, 200, 60).tolist()]:
        sizes = np.ceil(rng.lognormal(4, 1, num)).astype(int) * (rng.random(num) > 0.1)
        shares = deal(sizes.tolist(), num_shares)
        assert len(shares) == num_shares and [i for share in shares for i in share] == list(range(num))
        if sizes.any():
            loads = [int(sizes[share.start : share.stop].sum()) for share in shares]
            assert max(loads) <= sizes.sum() / num_shares + sizes.max()
    assert deal([0, 0, 0], 2) == [range(3), range(0)] and deal([], 2) == [range(0), range(0)]


def test_a_record_is_read_by_rank_0_alone() -> None:
    claim = Claim(1, 0, 2, False, (Group(4, 0, ()), Group(5, 1, ())))
    ranks = [replace(alone(), rank=r, world_size=2) for r in range(2)]
    assert [own_share(claim, r).groups for r in ranks] == [claim.groups, ()]
    assert own_share(claim, alone()) is claim


def test_columns_come_back_as_they_were() -> None:
    for samples in (make_groups(make_config(), 1), []):
        columns = columns_of(samples)
        again = Columns.from_bytes(columns.as_bytes())
        for name, value in vars(columns).items():
            found = getattr(again, name)
            assert (found.dtype, found.tolist()) == (value.dtype, value.tolist()) if name != "reward_parts" else (
                found == value
            )


def test_what_ranks_tell_each_other_comes_back_as_it_was() -> None:
    headers = ({"group": 4, "reward": 0.5, "fault": None, "truncated": False},)
    claim = Claim(3, 2, 1, True, (Group(4, 0, headers), Group(5, 1, ())), settings={"actor.optim.lr": 1e-3})
    row = StepRow(3, 1, 2, True, "", {"x": 1.0}, "d", claim)
    for value in (claim, [row], (Path("/a/é"), None), {"a": ("f", "k")}, {1: [True, 1 << 60]}, None, "", b"\0", 0.1):
        again = unpack(pack(value))
        assert again == value and type(again) is type(value)
    assert isinstance(unpack(pack(claim)).groups[0].headers, tuple)
    for stranger in (object(), np.float32(1), alone()):
        with pytest.raises(TypeError, match="is not for other ranks"):
            pack({"x": stranger})


def test_two_ranks_make_the_batch_of_one_and_fail_together(tmp_path: Path) -> None:
    run_on_ranks(2, "tests.share_program", "exchange", str(tmp_path), within_s=120)
    seen = [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(2)]
    for ours, theirs, num in zip(seen[0]["shares"], seen[1]["shares"], (1, 2, 5, 5), strict=True):
        assert len(ours) + len(theirs) == num and sorted({*ours, *theirs}) == ours + theirs
        assert ours and (theirs or num == 1)
    assert seen[0]["raised"] == seen[1]["raised"]
    assert seen[0]["raised"] == [
        [False, "waited 1.0 s for a", 1], [False, "b", 1], [False, "c", 1],
        [True, "told to stop while waiting for d", 0],
    ]  # fmt: skip


class _Broker(Payloads):
    """A feed whose claim is seen once it is made."""

    def __init__(self, samples: list[Any], claim: Claim) -> None:
        super().__init__(samples)
        self.claim, self.stop = claim, threading.Event()

    def see_claim(self, *, step: int) -> Claim:
        return self.claim


def test_a_share_fetched_for_another_claim_is_not_taken() -> None:
    samples = make_groups(make_config(), 1)
    claim, second = claim_of(samples), replace(alone(), rank=1, world_size=2)
    feed = _Broker(samples, claim)
    ahead = Ahead(feed, second)
    ahead.order(step=1, version=0, num_groups=4)
    batch = ahead.part(replace(claim, version=1), stop=threading.Event())  # claimed for a version that was not made
    own = own_share(claim, second).groups
    assert feed.fetched == [g.group for g in own] == list(dict.fromkeys(batch.group_ids.tolist())) and 0 < len(own) < 4
    ahead.order(step=1, version=0, num_groups=4)
    with pytest.raises(LedgerError, match="not the batch of step 1 that is trained") as caught:
        ahead.part(claim_of(make_groups(make_config(), 2)), stop=threading.Event())
    assert can_be_mended(caught.value) and ahead.step is None
