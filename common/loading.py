"""From YAML files and ``a.b=c`` overrides to a checked ``Config``; all faults at once.

Layers, later ones win: the files left to right, then the overrides. verl's prefix
``actor_rollout_ref.`` is stripped and a few of verl's key names are translated (``VERL_NAMES``).
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from common.combinations import combination_faults
from common.config import Config
from common.errors import ConfigError

# verl's path -> ours, where they differ.
VERL_NAMES = {
    "custom_reward_function.path": "reward.custom_function.path",
    "custom_reward_function.name": "reward.custom_function.name",
    "reward.reward_kwargs.overlong_buffer_cfg.enable": "reward.overlong_buffer.enable",
    "reward.reward_kwargs.overlong_buffer_cfg.len": "reward.overlong_buffer.len",
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": "reward.overlong_buffer.penalty_factor",
    "reward_model.overlong_buffer.enable": "reward.overlong_buffer.enable",
    "reward_model.overlong_buffer.len": "reward.overlong_buffer.len",
    "reward_model.overlong_buffer.penalty_factor": "reward.overlong_buffer.penalty_factor",
    "ref.log_prob_max_token_len_per_gpu": "actor.log_prob_max_token_len_per_gpu",
    "critic.model.path": "critic.model_path",
    "critic.model.lora_rank": "critic.lora_rank",
    "critic.model.lora_alpha": "critic.lora_alpha",
    "critic.model.target_modules": "critic.target_modules",
    "critic.model.use_remove_padding": "model.use_remove_padding",
    "actor.fsdp_config.ulysses_sequence_parallel_size": "actor.ulysses_sequence_parallel_size",
    "actor.fsdp_config.use_torch_compile": "actor.use_torch_compile",
    "critic.ulysses_sequence_parallel_size": "actor.ulysses_sequence_parallel_size",
    "ref.ulysses_sequence_parallel_size": "actor.ulysses_sequence_parallel_size",
    "critic.model.fsdp_config.param_offload": "critic.fsdp_config.param_offload",
    "critic.model.fsdp_config.optimizer_offload": "critic.fsdp_config.optimizer_offload",
    "critic.model.fsdp_config.offload_policy": "critic.fsdp_config.offload_policy",
    "critic.model.fsdp_config.fsdp_size": "actor.fsdp_config.fsdp_size",
    "critic.fsdp_config.fsdp_size": "actor.fsdp_config.fsdp_size",
    "ref.fsdp_config.fsdp_size": "actor.fsdp_config.fsdp_size",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "actor.checkpoint.async_save": "trainer.async_save",
    "trainer.total_training_steps": "run.max_steps",
}
MAPPINGS = ("trainer.guard.limits",)  # keys whose values are mappings, which files and overrides add to
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class _Loader(yaml.SafeLoader):
    """YAML with JSON's numbers: 5e-4 is a number, 0.5_2 (a pair of thresholds) is text. No key comes twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is there twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag not in ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9]+$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.inf$"),
    list("-+.0123456789"),
)


def load_config(paths: list[str], overrides: list[str], *, now: float | None = None) -> Config:
    """Read, layer and check.

    Args:
        paths: YAML files, left to right.
        overrides: ``a.b=c`` strings; the value is read as YAML.
        now: seconds since the epoch for the default ``run.id`` (tests).

    Raises:
        ConfigError: with every fault found: unreadable file, unknown key (with the nearest
            match), wrong type, impossible combination.
    """
    config, faults = examine_config(paths, overrides, now=now)
    if faults:
        raise ConfigError(faults)
    return config


def examine_config(paths: list[str], overrides: list[str], *, now: float | None = None) -> tuple[Config, list[str]]:
    """As ``load_config``, but returns the faults beside what is valid, so that more can be checked at once."""
    faults: list[str] = []
    tree: dict[str, Any] = {}
    origin: dict[str, str] = {}  # leaf path -> where it was set
    for path in paths:
        for key, value in _leaves(_read_yaml(path, faults)):
            _set(tree, origin, key, value, path, faults)
    for text in overrides:
        key, sep, raw = text.partition("=")
        if not sep or not key:
            faults.append(f"{text!r}: an override has the form a.b=value")
            continue
        try:
            value = yaml.load(raw, _Loader) if raw else None
        except yaml.YAMLError as e:
            faults.append(f"{key}: cannot read the value {raw!r} as YAML ({_first_line(e)})")
            continue
        for leaf, v in _leaves(value, key) if isinstance(value, dict) and value else [(key, value)]:
            _set(tree, origin, leaf, v, "command line", faults)

    config, type_faults = _validate(tree, origin)
    faults += type_faults
    faults += combination_faults(config)
    if config.run.id is not None and not _RUN_ID.fullmatch(config.run.id):
        faults.append(f"run.id={config.run.id!r}: use letters, digits, '.', '_', '-' (at most 100)")
        config = config.model_copy(update={"run": config.run.model_copy(update={"id": None})})
    return _with_names(config, paths, time.time() if now is None else now), faults


def config_paths() -> dict[str, tuple[Any, Any, str]]:
    """Each leaf key: ``(annotation, default, sentence)``."""
    return dict(_model_leaves(Config))


def flat(config: Config) -> dict[str, Any]:
    """Leaf keys, with their values as in JSON."""
    return dict(_leaves(config.model_dump(mode="json")))


def differences(a: Config, b: Config) -> list[str]:
    """Leaf keys in which two configs differ, as ``key: a != b``."""
    la, lb = flat(a), flat(b)
    return [f"{k}: {la.get(k)!r} != {lb.get(k)!r}" for k in sorted(la.keys() | lb.keys()) if la.get(k) != lb.get(k)]


def _read_yaml(path: str, faults: list[str]) -> dict[str, Any]:
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except OSError as e:
        faults.append(f"{path}: cannot be read ({e.strerror})")
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        mark = getattr(e, "problem_mark", None)
        faults.append(f"{path}{f':{mark.line + 1}' if mark else ''}: not valid YAML ({_first_line(e)})")
        return {}
    if content is not None and not isinstance(content, dict):
        faults.append(f"{path}: a config is a mapping of sections, not a {type(content).__name__}")
        return {}
    return content or {}


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaf paths of nested mappings; an empty mapping has none, but a key whose value is one."""
    if value == {} and prefix in MAPPINGS:
        yield prefix, {}
    elif isinstance(value, dict):
        for k, v in value.items():
            yield from _leaves(v, f"{prefix}.{k}" if prefix else str(k))
    elif prefix:
        yield prefix, value


def _set(tree: dict[str, Any], origin: dict[str, str], key: str, value: Any, where: str, faults: list[str]) -> None:
    key = key.removeprefix("+").removeprefix("actor_rollout_ref.")
    if key == "algorithm.rollout_correction.bypass_mode":
        key, value = "algorithm.proximal", "bypass" if value else "recompute"
    key = VERL_NAMES.get(key, key)
    node, *parts = tree, *key.split(".")
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            faults.append(f"{where}: {key}: {part!r} is a value, not a section")
            return
        node = child
    if key in MAPPINGS and not value:  # takes back what came before
        value = {}
    elif isinstance(node.get(parts[-1]), dict):
        if value is not None:
            faults.append(f"{where}: {key}: is a section, not a value")
        return
    node[parts[-1]] = value
    origin[key] = where


def _validate(tree: dict[str, Any], origin: dict[str, str]) -> tuple[Config, list[str]]:
    """The config of all that is valid (defaults elsewhere) and the faults of the rest."""
    try:
        return Config.model_validate(tree), []
    except ValidationError as e:
        errors = e.errors(include_url=False)
    known = list(config_paths())
    faults: dict[str, str] = {}
    for error in errors:
        path = _known_prefix(error["loc"])
        where = origin.get(path) or next((w for k, w in origin.items() if k.startswith(f"{path}.")), "config")
        if error["type"] == "extra_forbidden":
            for key in [k for k in origin if k.startswith(f"{path}.")] or [path]:
                near = _nearest(key, known)
                faults[key] = f"{origin.get(key, where)}: {key}: unknown key" + (
                    f"; did you mean {near}?" if near else ""
                )
        else:
            message = error["msg"].removeprefix("Value error, ")
            faults.setdefault(path, f"{where}: {path}={error['input']!r}: {message[0].lower()}{message[1:]}")
        _delete(tree, path.split("."))
    return _validate(tree, origin)[0], list(faults.values())


def _known_prefix(loc: tuple[int | str, ...]) -> str:
    """The part of an error's location that is a path of keys (unions and lists add to it)."""
    parts: list[str] = []
    model: Any = Config
    for part in loc:
        parts.append(str(part))
        if ".".join(parts[:-1]) in MAPPINGS:
            break
        field = model.model_fields.get(part) if model is not None else None
        model = field.annotation if field else None
        if not (isinstance(model, type) and issubclass(model, BaseModel)) and ".".join(parts) not in MAPPINGS:
            break
    return ".".join(parts)


def _nearest(path: str, known: list[str]) -> str | None:
    """The known key most like ``path``: by whole path, else by its last part."""
    whole = difflib.get_close_matches(path, known, n=1, cutoff=0.8)
    if whole:
        return whole[0]
    last = path.rsplit(".", 1)[-1]
    same = [k for k in known if k.rsplit(".", 1)[-1] == last]
    near = difflib.get_close_matches(path, same, n=1, cutoff=0) or difflib.get_close_matches(
        path, known, n=1, cutoff=0.5
    )
    return near[0] if near else None


def _delete(tree: dict[str, Any], parts: list[str]) -> None:
    for part in parts[:-1]:
        tree = tree.get(part, {})
        if not isinstance(tree, dict):
            return
    tree.pop(parts[-1], None)


def _model_leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, tuple[Any, Any, str]]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _model_leaves(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", (kind, field.get_default(call_default_factory=True), field.description or "")


def _with_names(config: Config, paths: list[str], now: float) -> Config:
    """Fill in ``run.id``, which a run that is continued keeps, and ``run.dir`` (absolute)."""
    stem = Path(paths[-1]).stem if paths else "run"
    fresh = f"{stem}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
    run_id = config.run.id or _run_in(config.run.dir) or fresh
    run_dir = str(Path(config.run.dir or f"runs/{run_id}").expanduser().resolve())
    return config.model_copy(update={"run": config.run.model_copy(update={"id": run_id, "dir": run_dir})})


def _run_in(folder: str | None) -> str | None:
    """The id of the run that a folder has."""
    try:
        tree = yaml.load((Path(folder or "").expanduser() / "config.yaml").read_text(encoding="utf-8"), _Loader)
        found = tree["run"]["id"]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return None
    return found if folder and isinstance(found, str) and _RUN_ID.fullmatch(found) else None
