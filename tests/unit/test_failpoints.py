import signal
import subprocess
import sys
import time

import pytest

from common import failpoints
from common.errors import ConfigError
from common.failpoints import failpoint


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    failpoints.arm("")


def test_inert_without_the_variable():
    failpoints.arm("")
    failpoint("anything")


def test_raises_at_the_nth_hit_only():
    failpoints.arm("here:2:raise")
    failpoint("here")
    failpoint("elsewhere")
    with pytest.raises(RuntimeError, match="failpoint here"):
        failpoint("here")
    failpoint("here")


def test_delay_acts_at_every_hit():
    failpoints.arm("slow:2:delay=0.05")
    spent = []
    for _ in range(3):
        start = time.monotonic()
        failpoint("slow")
        spent.append(time.monotonic() - start)
    assert spent[0] < 0.04 and spent[1] >= 0.05 and spent[2] >= 0.05


def test_several_points():
    failpoints.arm("a:raise, b:3:raise")
    failpoint("b")
    with pytest.raises(RuntimeError, match="a"):
        failpoint("a")


@pytest.mark.parametrize("text", ["a:0", "a:explode", "a:delay=soon", "a:-1"])
def test_what_cannot_be_read_is_refused(text):
    with pytest.raises(ConfigError, match="LEEWAY_FAILPOINT"):
        failpoints.arm(text)


def test_kill_is_the_default_and_is_real():
    code = "from common.failpoints import failpoint; failpoint('x'); print('one', flush=True); failpoint('x')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"LEEWAY_FAILPOINT": "x:2"}, capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "one\n")
