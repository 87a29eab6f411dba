"""Print, as shell exports, where `uv` should look for packages: pip's own settings, where it has any.

`uv` does not read pip's configuration. Settings of `uv` itself (UV_*) always win.
usage: uv_sources.py cpu|gpu TORCH_VERSION
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path


def pip_settings() -> dict[str, str]:
    """pip's settings by name ("find-links"), environment over files."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    settings: dict[str, str] = {}
    for line in listing.splitlines():
        key, separator, value = line.partition("=")
        scope, _, name = key.rpartition(".")
        if separator and scope in ("global", "install", ":env:"):
            text = value.strip("'\"").replace("\\n", " ")
            if scope == ":env:" or name not in settings:
                settings[name] = text
    return settings


def holds_wheel(place: str, torch_version: str) -> bool:
    """Whether the directory `place` has torch's CPU wheel for this Python."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    directory = Path(place.removeprefix("file://"))
    return any(directory.glob(f"torch-{torch_version}+cpu-{tag}-*.whl"))


def main(accelerator: str, torch_version: str) -> None:
    pip = pip_settings()
    wanted = {
        "UV_DEFAULT_INDEX": pip.get("index-url"),
        "UV_HTTP_TIMEOUT": pip.get("default-timeout") or pip.get("timeout"),
        "SSL_CERT_FILE": pip.get("cert"),
    }
    places = os.environ.get("UV_FIND_LINKS", "").replace(",", " ").split()
    places += [place for place in pip.get("find-links", "").split() if place not in places]
    with_wheel = [place for place in places if holds_wheel(place, torch_version)]
    if accelerator == "gpu":
        # torch==2.13.0 is also met by 2.13.0+cpu, which could not use the GPU.
        places = [place for place in places if place not in with_wheel]
    elif not with_wheel:
        # Alternatives: `uv` stops at an index it cannot reach, even with the wheel at hand.
        wanted["UV_TORCH_BACKEND"] = "cpu"
    for name, value in wanted.items():
        if value and not os.environ.get(name):
            print(f"export {name}={shlex.quote(value)}")
    print(f"export UV_FIND_LINKS={shlex.quote(','.join(places))}" if places else "unset UV_FIND_LINKS")


if __name__ == "__main__":
    main(*sys.argv[1:])
