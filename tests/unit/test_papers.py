"""Pages made from the code are up to date; imports go one way."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROLES = ("broker", "generators", "learner")
HOMES = {  # library -> the only files that import it
    "zmq": {"common/sockets.py"},
    "redis": {"common/control.py"},
    "wandb": {"common/sinks.py"},
    "vllm": {f"generators/{name}.py" for name in ("starting", "requests", "worker", "adapter_slot")},
}
NO_TORCH = ("common.loading", "common.preflight", "common.control", "common.roles", "common.local_run", "common.verbs",
            "common.wire", "common.sockets", "launch")  # fmt: skip


def sources(*folders):
    return [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]


def imports(path):
    """Dotted names of everything a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names)


def top(name):
    return name.partition(".")[0]


def test_pages_made_from_the_code_are_up_to_date():
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "scripts" / "make_docs.py")
    make_docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_docs)
    for name, content in make_docs.pages().items():
        assert (ROOT / "docs" / name).read_text() == content, f"docs/{name}: run python scripts/make_docs.py"


def test_common_imports_no_role_and_roles_import_no_other_role():
    for path in sources("common", *ROLES):
        own = path.relative_to(ROOT).parts[0]
        others = {r for r in (*ROLES, "launch") if r != own}
        assert not others & set(map(top, imports(path))), path


def test_launch_imports_only_common():
    first_party = {"common", "tests", "benchmarks", "scripts", *ROLES}
    assert {top(n) for n in imports(ROOT / "launch.py")} & first_party == {"common"}


@pytest.mark.parametrize("library", HOMES)
def test_each_library_has_one_home(library):
    users = {str(p.relative_to(ROOT)) for p in [*sources("common", *ROLES), ROOT / "launch.py"]
             if library in map(top, imports(p))}  # fmt: skip
    assert users <= HOMES[library]


def test_torch_distributed_is_for_the_learner_and_the_transfer_of_weights():
    allowed = {"common/transfer.py", "common/weights.py", "generators/worker.py", "generators/staging.py"}
    users = {str(p.relative_to(ROOT)) for p in [*sources("common", "generators", "broker"), ROOT / "launch.py"]
             if any(n.startswith("torch.distributed") for n in imports(p))}  # fmt: skip
    assert users <= allowed


def test_the_broker_and_the_launcher_import_no_torch():
    names = [*NO_TORCH, *(f"broker.{p.stem}" for p in sources("broker") if p.stem != "__init__")]
    code = (
        f"import sys\nfor n in {names}: __import__(n)\nprint(*({{'torch', 'transformers', 'vllm'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
