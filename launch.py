"""Leeway's command: start a run, one of its roles, or talk to one.

launch.py run CONFIG.yaml [more.yaml …] [a.b=c …]     everything on this host
launch.py broker|learner|generators …                 one role alone, in any order
launch.py status|why|pause|resume|stop [RUN_DIR]      talk to a run
launch.py set [RUN_DIR] a.b=c …                       change a run that goes on
launch.py scale [RUN_DIR] N                           have so many generators, while it goes on
launch.py drain [RUN_DIR] [--generator NAME]          finish the work under way and end: the run, or one generator
launch.py samples RUN_DIR --where "reward > 0.9"      ask what became of a run's samples
launch.py export RUN_DIR OUT.parquet                  write them to a file
launch.py replay RUN_DIR|FILE [CONFIG.yaml] [a.b=c …] train on recorded rollouts, without generators
launch.py rollback RUN_DIR STEP                       a run goes back to a checkpoint
launch.py config [CONFIG.yaml …] [a.b=c …]            check or print a config
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from common.config import HOST_KEYS, Config
from common.errors import ConfigError, LeewayError, Stopped
from common.limits import LIVE
from common.loading import config_paths, load_config
from common.preflight import CONFIG_FILE, checked_config

ROLE_VERBS = {"broker": "broker", "learner": "learner", "generators": "generator"}
DESIRED_VERBS = {"pause": "paused", "resume": "running", "stop": "stopped"}
_SENTENCES = {
    "run": "start a whole run on this host and see it to its end",
    "broker": "start the broker of a run",
    "learner": "start the learner of a run",
    "generators": "start this host's generators of a run",
    "status": "show a run's processes and what its groups are doing",
    "why": "show who waits for whom, and what happened last",
    "pause": "hand out no more work until `resume`",
    "resume": "go on after `pause`",
    "set": "change what can be changed of a run that goes on",
    "scale": "have so many generators in a fleet, while the run goes on",
    "drain": "hand out no more work, train what is under way, and end; or let one generator finish and end",
    "stop": "end a run; the learner saves first",
    "replay": "train on recorded rollouts, without broker and generators",
    "rollback": "have a run go back to one of its checkpoints, and go on from there",
    "config": "check a config, or print it whole",
    "export": "write a run's samples to a parquet file, with tokens, text, rewards, versions and fate",
    "samples": "show a run's samples and what became of them, by an SQL condition",
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    args, rest = parser.parse_known_args(argv)  # files and overrides may also come after options
    if unknown := [a for a in rest if a.startswith("-") or not hasattr(args, "config")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        args.config += rest
    try:
        return int(args.do(args))
    except Stopped:
        return 0
    except ConfigError as e:
        return _complain(e.faults, e.exit_code)
    except LeewayError as e:
        return _complain([str(e)], e.exit_code)


def _complain(faults: list[str], code: int) -> int:
    num = sum(not fault.startswith(" ") for fault in faults)  # the others say more of the one before
    if num == 1:
        print("launch.py: error: " + "\n  ".join(faults), file=sys.stderr)
    else:
        print("\n  ".join([f"launch.py: {num} errors:", *faults]), file=sys.stderr)
    return code


# ---------------------------------------------------------------- arguments
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, do: Any, **options: Any) -> argparse.ArgumentParser:
        made = verbs.add_parser(
            name, help=_SENTENCES[name], description=_SENTENCES[name], allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter, **options,
        )  # fmt: skip
        made.set_defaults(do=do)
        return made

    for name, do in (("run", _run), ("replay", _replay), ("config", _config)):
        made = verb(name, do, epilog=_key_help() if _wants_help() else None)
        if name == "replay":
            made.add_argument("rollouts", metavar="RUN_DIR|FILE", help="a run's folder or ledger, or a parquet file")
        _add_config(made)
        made.add_argument("--print-config", action="store_true", help="print the whole config as YAML and end")
        made.add_argument("--dry-run", "--check", action="store_true", help="check everything, start nothing")
    for name in ROLE_VERBS:
        made = verb(name, _role)
        _add_place(made)
        made.add_argument("--name", help="name of the process in the registry")
        _add_config(made)
    for name in ("status", "why", *DESIRED_VERBS):
        made = verb(name, _talk)
        made.add_argument("folder", nargs="?", metavar="RUN_DIR", help="default: the newest under runs/")
        _add_place(made)
        if name == "status":
            made.add_argument("--json", action="store_true", help="one JSON object")
    made = verb("set", _set, epilog="keys: " + ", ".join(LIVE))
    made.add_argument("config", nargs="+", metavar="RUN_DIR | a.b=c", help="the run (default: the newest), new values")
    _add_place(made)
    made = verb("scale", _scale)
    made.add_argument("config", nargs="+", metavar="[RUN_DIR] N", help="the run (default: the newest), generators")
    made.add_argument("--fleet", metavar="NAME", help="which, if there are several; `launch.py status` lists them")
    _add_place(made)
    made = verb("drain", _drain)
    made.add_argument("folder", nargs="?", metavar="RUN_DIR", help="default: the newest under runs/")
    made.add_argument("--generator", metavar="NAME", help="only this one; `launch.py status` lists them")
    _add_place(made)
    _add_samples(verb("samples", _records))
    made = verb("export", _records)
    _add_record(made)
    made.add_argument("out", metavar="OUT.parquet", help="docs/rollouts.md describes it")
    made.add_argument("--no-text", action="store_true", help="tokens only; needs no tokenizer")
    made = verb("rollback", _rollback)
    made.add_argument("folder", metavar="RUN_DIR", help="the run's folder")
    made.add_argument("step", metavar="STEP", nargs="?", help="of the checkpoint; without it, they are listed")
    return parser


def _add_samples(parser: argparse.ArgumentParser) -> None:
    _add_record(parser)
    parser.add_argument("--columns", metavar="A,B,…", help="columns to show; docs/ledger.md lists them")
    parser.add_argument("--order", metavar="SQL", help="e.g. 'reward DESC' (default: by group)")
    parser.add_argument("--limit", metavar="N", help="rows to show (default: 20; 0: all)")
    parser.add_argument("--text", action="store_true", help="also the text of prompt and response")
    parser.add_argument("--json", action="store_true", help="one JSON object per sample")


def _add_record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN_DIR", help="a run's folder, or a copy of its ledger.sqlite")
    parser.add_argument("--where", metavar="SQL", help="condition over the view `rollouts`, e.g. 'reward > 0.9'")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="default: the run's own")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="*", metavar="CONFIG.yaml | a.b=c", help="files, left to right, then overrides")


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--redis-url", help="Redis of the run (default: $LEEWAY_REDIS_URL)")
    parser.add_argument("--run-id", help="id of the run")


def _wants_help() -> bool:
    return "-h" in sys.argv or "--help" in sys.argv


def _key_help() -> str:
    """Each config key with its default and its sentence."""
    lines = ["keys:"]
    for key, (_, default, sentence) in config_paths().items():
        lines += [f"  {key}={json.dumps(default)}", f"      {sentence}"]
    return "\n".join(lines)


def _split(items: list[str]) -> tuple[list[str], list[str]]:
    return [i for i in items if "=" not in i], [i for i in items if "=" in i]


# ---------------------------------------------------------------- verbs
def _run(args: argparse.Namespace) -> int:
    files, overrides = _split(args.config)
    if not files and not overrides:
        raise ConfigError("give a config, e.g. launch.py run configs/quickstart.yaml")
    config = checked_config(files, overrides, engines=True)
    if args.print_config or args.dry_run:
        return _show(config, args.print_config)
    from common.local_run import LocalRun

    return LocalRun(config).execute()


def _replay(args: argparse.Namespace) -> int:
    """A run whose rollouts are recorded ones; without a config, with the one that recorded them.

    The same command again continues the same replay.
    """
    record = Path(args.rollouts)
    files, overrides = _split(args.config)
    if not files and (record / CONFIG_FILE).is_file():
        files = [str(record / CONFIG_FILE)]
        recorded = load_config(files, [])
        overrides = [f"run.id={recorded.run.id}-replay", "run.dir=null", *overrides]
    if not files and not overrides:
        raise ConfigError(f"{record}: does not say with which config it was made; give one")
    args.config = [*files, f"replay.rollouts={json.dumps(str(record.expanduser().resolve()))}", *overrides]
    return _run(args)


def _config(args: argparse.Namespace) -> int:
    files, overrides = _split(args.config)
    if args.print_config and not args.dry_run:
        return _show(load_config(files, overrides), True)
    return _show(checked_config(files, overrides, engines=True), args.print_config)


def _show(config: Config, whole: bool) -> int:
    if whole:
        print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), end="")
    else:
        print(f"the config is good: run {config.run.id} in {config.run.dir}")
    return 0


def _role(args: argparse.Namespace) -> int:
    """Check what can be checked here, then become the role."""
    files, overrides = _split(args.config)
    run_id = [f"run.id={args.run_id}"] if args.run_id else []
    own = [o for o in overrides if o.partition("=")[0] in HOST_KEYS]  # these alone are not a config
    config = checked_config(files, [*overrides, *run_id], folder=False) if files or overrides != own else None
    redis_url = args.redis_url or os.environ.get("LEEWAY_REDIS_URL") or (config and config.run.redis_url)
    if not redis_url:
        raise ConfigError(
            "--redis-url: give the Redis of the run (or LEEWAY_REDIS_URL, or run.redis_url in the config)"
        )
    from common.local_run import run_alone

    arguments = [a for option in ("run_id", "name") if (value := getattr(args, option)) for a in (_flag(option), value)]
    return run_alone(args.verb, config, redis_url, [*arguments, *args.config], run_id=args.run_id)


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _set(args: argparse.Namespace) -> int:
    from common import verbs

    folders, items = _split(args.config)
    if not items or len(folders) > 1:
        raise ConfigError("give one RUN_DIR (or none) and KEY=VALUE, e.g. launch.py set runs/r staleness.max=2")
    return verbs.set_limits(verbs.find_run(folders[0] if folders else None, args.redis_url, args.run_id), items)


def _scale(args: argparse.Namespace) -> int:
    from common import verbs

    *folders, size = args.config
    if len(folders) > 1 or not size.isdecimal():
        raise ConfigError("give one RUN_DIR (or none) and a number of generators, e.g. launch.py scale runs/r 4")
    place = verbs.find_run(folders[0] if folders else None, args.redis_url, args.run_id)
    return verbs.scale(place, int(size), args.fleet)


def _drain(args: argparse.Namespace) -> int:
    from common import verbs

    place = verbs.find_run(args.folder, args.redis_url, args.run_id)
    return verbs.drain(place, args.generator) if args.generator else verbs.set_desired(place, "draining")


def _records(args: argparse.Namespace) -> int:
    """Become the program that reads a run's record."""
    ours = ("verb", "do", "folder", "out")
    options = {k: v for k, v in vars(args).items() if k not in ours and v not in (None, False)}
    flags = [a for k, v in options.items() for a in ([_flag(k)] if v is True else [f"{_flag(k)}={v}"])]
    places = [value for name in ("folder", "out") if (value := getattr(args, name, None))]
    from common.local_run import become

    return become("generators.records", [args.verb, *places, *flags])


def _rollback(args: argparse.Namespace) -> int:
    """Become the broker's program for it."""
    from common.local_run import become

    return become("broker.rollback", [args.folder, *([args.step] if args.step else [])])


def _talk(args: argparse.Namespace) -> int:
    from common import verbs

    place = verbs.find_run(args.folder, args.redis_url, args.run_id)
    if args.verb == "status":
        return verbs.status(place, as_json=args.json)
    if args.verb == "why":
        return verbs.why(place)
    return verbs.set_desired(place, DESIRED_VERBS[args.verb])  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
