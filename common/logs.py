"""Logging of a role: to stderr and to a file, one line a record, with the role's name in it."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

LOGGER = "leeway"


class OneLine(logging.Formatter):
    """``12:30:01 broker WARNING text``; line breaks become `` | ``; a traceback only where asked for."""

    def __init__(self, name: str, *, date: bool, traceback: bool) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d {name} %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S" if date else "%H:%M:%S"
        )
        self._traceback = traceback

    def formatException(self, ei: object) -> str:
        if self._traceback:
            return super().formatException(ei)  # type: ignore[arg-type]
        return repr(ei[1]) if isinstance(ei, tuple) else ""

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # another handler's rendering must not be reused
        lines = super().format(record).splitlines()
        return " | ".join(line.rstrip() for line in lines)


def set_up(name: str, folder: Path | None = None) -> logging.Logger:
    """The process's logger: stderr, and ``folder/<name>.log`` (appended to) if a folder is given.

    The level is ``LEEWAY_LOG_LEVEL`` (default INFO). May be called again, e.g. once the folder is known.
    """
    log = logging.getLogger(LOGGER)
    log.setLevel(os.environ.get("LEEWAY_LOG_LEVEL", "INFO").upper())
    log.propagate = False
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(OneLine(name, date=False, traceback=False))
    log.addHandler(stream)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(folder / f"{name}.log", encoding="utf-8")
        file.setFormatter(OneLine(name, date=True, traceback=True))
        log.addHandler(file)
    return log
