"""The layers of the package: imports go down only, in no circle, and light modules stay light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"arenarl": "arenarl", "algorithms": "arenarl.algorithms", "envs": "arenarl.envs"} | {
    name: name for name in ("experiments", "benchmarks")
}

# The table of the design. A name that ends with a dot places a whole folder; every other new file must be added here.
LAYERS = (
    "arenarl arenarl.types arenarl.errors arenarl.functional arenarl.jsonl arenarl.strict_json",
    "arenarl.chat arenarl.tool_calls arenarl.state arenarl.rubric arenarl.mcp. arenarl.taskset arenarl.calls arenarl.async_env arenarl.env arenarl.vector_env"
    " arenarl.vllm_settings arenarl.vllm_thread arenarl.vllm_worker arenarl.engine arenarl.judge arenarl.grader arenarl.grader_prompt arenarl.expected_tools arenarl.coach arenarl.coach_prompt arenarl.generated arenarl.novelty arenarl.task_pool arenarl.ecr arenarl.gates arenarl.arena arenarl.topologies arenarl.estimators"
    " arenarl.simulation arenarl.endpoint arenarl.endpoint_calls arenarl.endpoint_wire arenarl.endpoint_budget arenarl.reply_cache arenarl.llm_judge arenarl.judge_prompt arenarl.judge_rubrics arenarl.judge_reply arenarl.panel"
    " arenarl.vllm_judge arenarl.arena_metrics arenarl.arena_view arenarl.arena_svg arenarl.drawing arenarl.references arenarl.batching"
    " arenarl.causal_lm arenarl.tracking arenarl.traces arenarl.console arenarl.envs.",
    "arenarl.player arenarl.rollout arenarl.scoring arenarl.random_agent arenarl.isolation arenarl.chat_check arenarl.env_runner arenarl.learner arenarl.learner_meter arenarl.learner_tokens arenarl.learner_group arenarl.rllib_compat arenarl.metrics",
    "arenarl.config arenarl.executor arenarl.solver_pool arenarl.preflight arenarl.comparison arenarl.algorithm arenarl.evaluate arenarl.algorithms.",
    "arenarl.training arenarl.sweep arenarl.evaluation arenarl.evaluation_tables arenarl.study arenarl.study_page arenarl.arena_show arenarl.pool_show arenarl.plan arenarl.env_commands arenarl.env_play arenarl.cli_env arenarl.cli experiments. benchmarks.",
)
PLACES = {place: layer for layer, places in enumerate(LAYERS) for place in places.split()}

HEAVY_LIBRARIES = {"torch", "ray", "vllm", "transformers", "mlflow", "mcp", "accelerate"}
# Layer 1, but at home in one heavy library; the MCP server of an environment runs in a process of its own.
HEAVY_MODULES = {
    "arenarl.causal_lm",
    "arenarl.mcp.transport",
    "arenarl.mcp.handshake",
    "arenarl.mcp.remote",
    "arenarl.vllm_worker",
}


def modules(root: Path) -> dict[str, Path]:
    """Files by dotted name. The links ``arenarl/algorithms`` and ``arenarl/envs`` are seen once, at the root."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            if folder == "arenarl" and parts[0] in ("algorithms", "envs"):
                continue
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def layer(module: str) -> int | None:
    """Layer of a module by its name, or by the nearest folder that the table places; None if it has no place."""
    parts = module.split(".")
    names = [module, *(".".join(parts[:n]) + "." for n in range(len(parts), 0, -1))]
    return next((PLACES[name] for name in names if name in PLACES), None)


def statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that can run, at any depth: those of ``if TYPE_CHECKING`` are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for otherwise in node.orelse:
                yield from statements(ast.Module(body=[otherwise], type_ignores=[]))
        else:
            yield from statements(node)


def imported(source: str, module: str, known: Mapping[str, object]) -> set[str]:
    """Modules of ``known`` that the source of ``module`` imports, a script's neighbours by their bare name included."""
    package = module if any(name.startswith(module + ".") for name in known) else module.rpartition(".")[0]
    targets: set[str] = set()
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [[alias.name] for alias in node.names]
        else:
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            start = ".".join(filter(None, (base, node.module)))
            names = [[f"{start}.{alias.name}", start] for alias in node.names]
        for choices in names:
            if not package.startswith("arenarl"):
                choices += [f"{package}.{name}" for name in choices]
            targets |= set(next(([name] for name in choices if name in known), []))
    return targets


def graph(files: Mapping[str, Path]) -> dict[str, set[str]]:
    return {name: imported(path.read_text(), name, files) for name, path in files.items()}


def upward(edges: Mapping[str, set[str]]) -> list[str]:
    """Imports that go up, as ``module -> module``."""
    return [
        f"{source} -> {target}"
        for source, targets in edges.items()
        for target in sorted(targets)
        if (layer(source) or 0) < (layer(target) or 0)
    ]


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """One circle of imports, or nothing."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def private_ray_names(source: str) -> list[str]:
    """Names with one leading underscore that the source imports from Ray, or reads from what it imported."""
    tree, roots, found = ast.parse(source), set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            ray = [alias for alias in node.names if (start + alias.name).split(".")[0] == "ray"]
            roots |= {alias.asname or alias.name.split(".")[0] for alias in ray}
            found += [start + alias.name for alias in ray]
    found += [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node).split(".")[0] in roots
    ]
    return [name for name in found if any(p.startswith("_") and not p.startswith("__") for p in name.split("."))]


# --- the tree ----------------------------------------------------------------------------------------------------


def test_every_file_has_a_layer_and_every_entry_a_file():
    files = modules(ROOT)
    assert [name for name in files if layer(name) is None] == []
    assert [place for place in PLACES if not any((name + ".").startswith(place) for name in files)] == []
    assert {"arenarl.types": 0, "arenarl.envs.travel": 1, "arenarl.cli": 4}.items() <= {
        name: layer(name) for name in files
    }.items()


def test_imports_go_down():
    edges = graph(modules(ROOT))
    assert upward(edges) == []
    assert "arenarl.learner_group" in edges["arenarl.config"]  # inside a function
    assert "arenarl.types" in edges["arenarl.async_env"]


def test_imports_go_in_no_circle():
    assert circle(graph(modules(ROOT))) == []


def test_no_import_by_the_names_of_the_root_folders():
    paths = [*modules(ROOT).values(), *(ROOT / "tests").rglob("*.py")]
    bare = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom) and root_folders(node)
    ]
    assert bare == []


def root_folders(node: ast.Import | ast.ImportFrom) -> set[str]:
    if isinstance(node, ast.ImportFrom) and node.level:
        return set()
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return {name.split(".")[0] for name in names} & {"algorithms", "envs"}


def test_only_rllib_compat_touches_private_names_of_ray():
    files = modules(ROOT)
    private = {n: private_ray_names(p.read_text()) for n, p in files.items() if n != "arenarl.rllib_compat"}
    assert {name: names for name, names in private.items() if names} == {}


def test_light_modules_import_nothing_heavy():
    files = modules(ROOT)
    light = [n for n in files if layer(n) in (0, 1) and n not in HEAVY_MODULES and not n.endswith("_server")]
    code = f"""
import importlib, json, sys
loaded = {{}}
for name in {[*light, "arenarl.cli"]}:
    importlib.import_module(name)
    heavy = {HEAVY_LIBRARIES} & set(sys.modules) - {{h for found in loaded.values() for h in found}}
    loaded[name] = sorted(heavy)
print(json.dumps(loaded))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert {name: heavy for name, heavy in loaded.items() if heavy} == {}
    assert {"arenarl.types", "arenarl.engine", "arenarl.envs.travel"} <= set(loaded)


# --- the checks themselves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import arenarl.cli", {"arenarl.cli"}),
        ("from arenarl import cli, __version__", {"arenarl.cli", "arenarl"}),
        ("from arenarl.cli import main", {"arenarl.cli"}),
        ("from . import cli", {"arenarl.cli"}),
        ("from .cli import main", {"arenarl.cli"}),
        ("def f():\n    if True:\n        import arenarl.cli", {"arenarl.cli"}),
        ("try:\n    import arenarl.cli\nexcept ImportError:\n    pass", {"arenarl.cli"}),
        ("if TYPE_CHECKING:\n    import arenarl.cli", set()),
        ("if typing.TYPE_CHECKING:\n    pass\nelse:\n    import arenarl.cli", {"arenarl.cli"}),
        ("import numpy", set()),
    ],
)
def test_imports_are_found(source: str, expected: set[str]):
    assert imported(source, "arenarl.types", {"arenarl": 0, "arenarl.cli": 0, "arenarl.types": 0}) == expected


def test_a_script_imports_its_neighbour_and_a_package_the_standard_library():
    known = {"experiments.tiny.make": 0, "experiments.tiny.data": 0, "arenarl.cli": 0, "arenarl.types": 0}
    assert imported("from data import rows", "experiments.tiny.make", known) == {"experiments.tiny.data"}
    assert imported("from types import ModuleType", "arenarl.cli", known) == set()


def test_an_upward_import_is_found():
    assert upward({"arenarl.types": {"arenarl.errors", "arenarl.cli"}, "arenarl.cli": {"arenarl.types"}}) == [
        "arenarl.types -> arenarl.cli"
    ]


def test_a_circle_is_found():
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_a_new_file_has_no_layer_until_it_is_placed():
    assert layer("arenarl.surprise") is None
    assert layer("arenarl.mcp.surprise") == layer("arenarl.envs.surprise") == 1
    assert layer("arenarl.algorithms.surprise") == 3
    assert layer("experiments.tiny_agent.surprise") == 4


def test_a_private_name_of_ray_is_found():
    assert private_ray_names("from ray.rllib.core import _hidden") == ["ray.rllib.core._hidden"]
    assert private_ray_names("import ray\nray.util._hidden.go()") == ["ray.util._hidden.go", "ray.util._hidden"]
    assert private_ray_names("from ray.rllib import Algorithm\nAlgorithm._step") == ["Algorithm._step"]
    assert private_ray_names("from vllm import _custom_ops\nimport ray\nray.__version__") == []
