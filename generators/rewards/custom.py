"""The process that runs a reward function: ``python -m generators.rewards.custom FD TARGET NAME``.

Consumes calls from the socket FD (a stream of msgpack values ``[data_source, solution_str,
ground_truth, extra_info]``), produces one answer each, in order. The first answer says whether
the function could be loaded. It has no time limit of its own: ``pool.py`` kills it.

TARGET is a Python file or the name of a module. The file is run with this user's rights, so its
path is never taken from Redis but from this host's own command line (``common/roles.py``).
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

from common.processes import die_with_parent
from common.tasks import REWARD_CALL

READY, FAULT = "ready", "fault"  # first answer
OK, RAISED, NO_NUMBER = "ok", "raised", "no_number"  # the others
_MAX_PARTS = 64
Function = Callable[..., Any]


def load_function(target: str, name: str) -> Function:
    """The function ``name`` of a file or module.

    Raises:
        ValueError: saying what is wrong and what to do.
    """
    module = _load_file(Path(target)) if target.endswith(".py") or os.sep in target else _import(target)
    function = getattr(module, name, None)
    if function is None:
        raise ValueError(f"reward.custom_function.name={name}: {target} has no such function")
    if not callable(function):
        raise ValueError(f"reward.custom_function.name={name}: in {target} it is a {type(function).__name__}")
    try:
        inspect.signature(function).bind(**dict.fromkeys(REWARD_CALL))
    except TypeError as e:
        raise ValueError(f"{target}: {name} is called as {name}({'=…, '.join(REWARD_CALL)}=…), but: {e}") from None
    except ValueError:
        pass  # a builtin without a signature
    return function  # type: ignore[no-any-return]


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"reward.custom_function.path={path}: no such file")
    spec = importlib.util.spec_from_file_location("leeway_custom_reward", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"reward.custom_function.path={path}: not a Python file (name it *.py)")
    sys.path.insert(0, str(path.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as e:
        raise ValueError(f"reward.custom_function.path={path}: cannot be loaded: {_describe(e)}") from e
    return module


def _import(name: str) -> Any:
    try:
        module = importlib.import_module(name)
    except ImportError as e:
        raise ValueError(f"reward module {name}: {e}") from e
    getattr(module, "prepare", lambda: None)()
    return module


def call(function: Function, arguments: list[Any]) -> list[Any]:
    """``[OK, value, parts]``, ``[RAISED, line]`` or ``[NO_NUMBER, line]``; raises nothing."""
    try:
        result = function(**dict(zip(REWARD_CALL, arguments, strict=True)))
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        value, parts = _read_result(result)
    except _NoNumber as e:
        return [NO_NUMBER, str(e)]
    except BaseException as e:  # SystemExit and KeyboardInterrupt of a user's function too
        return [RAISED, _describe(e)]
    return [OK, value, parts]


class _NoNumber(Exception):
    pass


def _read_result(result: Any) -> tuple[float, dict[str, float]]:
    """A number, or a dict with ``score`` and other numbers, the parts."""
    if not isinstance(result, dict):
        return _finite(result), {}
    if "score" not in result:
        raise _NoNumber("a dict without 'score'")
    value = _finite(result["score"])
    parts = {}
    for key, part in result.items():
        if key != "score" and len(parts) < _MAX_PARTS:
            try:
                parts[str(key)[:64]] = _finite(part)
            except _NoNumber:
                pass  # texts and such are allowed beside the score; they do not travel
    return value, parts


def _finite(value: Any) -> float:
    if value is None or isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise _NoNumber(f"{_short(value)} is not a number")
    number = float(value)
    if not math.isfinite(number):
        raise _NoNumber(f"{number} is not finite")
    return number


def _short(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _describe(error: BaseException) -> str:
    """Type, first line of the message, and the innermost place: one line."""
    lines = str(error).splitlines()
    tail, place = error.__traceback__, ""
    while tail is not None:
        place = f" ({Path(tail.tb_frame.f_code.co_filename).name}:{tail.tb_lineno})"
        tail = tail.tb_next
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:400] + place


def serve(channel: socket.socket, function: Function) -> None:
    """Answer calls until the other side closes."""
    unpacker = msgpack.Unpacker(raw=False, max_buffer_size=1 << 30)
    while data := channel.recv(1 << 18):
        unpacker.feed(data)
        for arguments in unpacker:
            channel.sendall(msgpack.packb(call(function, arguments)))


def main(argv: list[str]) -> int:
    die_with_parent()
    channel = socket.socket(fileno=int(argv[0]))
    channel.set_inheritable(False)
    channel.setblocking(True)
    os.dup2(2, 1)  # what the function prints goes to the log
    try:
        function = load_function(argv[1], argv[2])
    except ValueError as e:
        channel.sendall(msgpack.packb([FAULT, str(e)]))
        return 2
    channel.sendall(msgpack.packb([READY, ""]))
    try:
        serve(channel, function)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the generator is gone
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
