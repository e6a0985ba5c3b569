"""The package as others get it: the wheel, the editable install, and the links between the root folders and ``arenarl``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What `import arenarl` needs beyond the standard library. Only these are lent to the empty environment.
LENT = ("numpy", "gymnasium", "cloudpickle", "farama-notifications", "typing-extensions")
# First missing import of the modules that need more; each comes with a declared dependency (anyio with mcp).
HEAVY = {
    "torch",
    "ray",
    "vllm",
    "safetensors",
    "accelerate",
    "transformers",
    "mcp",
    "anyio",
    "mlflow",
    "pyarrow",
    "rich",
}


def run(*command: str | Path, cwd: Path) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shipped_files() -> list[str]:
    """What a clone of the tree as it stands would hold; without git, all but build outputs and dot files."""
    listed = shutil.which("git") and subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if listed and listed.returncode == 0:
        return [name for name in listed.stdout.split("\0") if name and os.path.lexists(ROOT / name)]
    left_out = ("__pycache__", "build", "dist", "runs", "mlruns")
    names: list[str] = []
    for folder, folders, files in os.walk(ROOT):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        names += [os.path.relpath(os.path.join(folder, name), ROOT) for name in files + links]
        folders[:] = [f for f in folders if f not in left_out and not f.startswith(".") and not f.endswith(".egg-info")]
    return names


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the tree, links copied as links."""
    copy = tmp_path_factory.mktemp("tree")
    for name in shipped_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", copy / "out", ".", cwd=copy)
    (built,) = (copy / "out").iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel, links to the distributions of LENT, and nothing else."""
    home = tmp_path_factory.mktemp("empty")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    options = ("--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=home)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    for name in LENT:
        distribution = metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            (site / top).symlink_to(str(distribution.locate_file(top)))
    return home


def python_files(folder: Path, prefix: str) -> set[str]:
    return {f"{prefix}/{path.name}" for path in folder.glob("*.py")}


# --- the source tree ---------------------------------------------------------------------------------------------


def test_packages_of_pyproject_are_the_folders_on_disk():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    walk = os.walk(ROOT / "arenarl", followlinks=True)
    folders = [Path(f).relative_to(ROOT) for f, _, files in walk if any(name.endswith(".py") for name in files)]
    assert sorted(settings["packages"]) == sorted(".".join(folder.parts) for folder in folders)
    mapped = {package: (ROOT / folder).resolve() for package, folder in settings["package-dir"].items()}
    assert mapped == {".".join(folder.parts): (ROOT / folder).resolve() for folder in folders}


def test_the_links_are_relative():
    assert os.readlink(ROOT / "arenarl" / "algorithms") == "../algorithms"
    assert os.readlink(ROOT / "arenarl" / "envs") == "../envs"


@pytest.mark.parametrize("name", ["algorithms", "envs"])
def test_a_root_folder_refuses_to_be_imported_by_its_bare_name(name: str):
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ImportError: import arenarl.{name}, not {name}"


def test_the_editable_install_serves_the_checkout(tmp_path: Path):
    code = """
import importlib.util, json
from importlib import metadata
url = json.loads(metadata.distribution("arenarl").read_text("direct_url.json"))
print(json.dumps([url["dir_info"], importlib.util.find_spec("arenarl.algorithms.grpo").origin]))
"""
    dir_info, origin = json.loads(run(sys.executable, "-I", "-c", code, cwd=tmp_path))
    assert dir_info == {"editable": True}
    assert Path(origin).resolve() == ROOT / "algorithms" / "grpo.py"


# --- the wheel ---------------------------------------------------------------------------------------------------


def test_the_wheel_has_every_module_and_nothing_else(wheel: Path):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = python_files(ROOT / "arenarl", "arenarl") | python_files(ROOT / "arenarl" / "mcp", "arenarl/mcp")
    expected |= python_files(ROOT / "algorithms", "arenarl/algorithms") | python_files(ROOT / "envs", "arenarl/envs")
    locks = {f"arenarl/mcp/locks/{file.name}" for file in (ROOT / "arenarl" / "mcp" / "locks").iterdir()}
    assert locks and names == expected | locks | {"arenarl/py.typed", "arenarl/envs/data/ecr_travel.jsonl"}
    assert {"arenarl/algorithms/grpo.py", "arenarl/envs/travel.py", "arenarl/mcp/hub.py"} <= names


def test_the_wheel_imports_and_what_it_lacks_is_declared(installed: Path):
    code = """
import importlib, json, pkgutil
import arenarl
missing, found = {}, []
for module in pkgutil.walk_packages(arenarl.__path__, "arenarl."):
    try:
        found.append(importlib.import_module(module.name).__name__)
    except ModuleNotFoundError as error:
        missing[module.name] = error.name
print(json.dumps([arenarl.__file__, found, missing]))
"""
    where, found, missing = json.loads(run(installed / "bin" / "python", "-I", "-c", code, cwd=installed))
    assert Path(where).is_relative_to(installed)
    assert {name.split(".")[0] for name in missing.values()} <= HEAVY, missing
    light = (
        "types errors functional jsonl chat rubric judge arena estimators batching env engine rollout traces tracking"
    )
    light += " evaluate metrics cli mcp.hub mcp.supervise algorithms envs.travel envs.travel_world"
    assert {f"arenarl.{name}" for name in light.split()} <= set(found)


def test_the_command_of_the_wheel_starts(installed: Path):
    assert "train" in run(installed / "bin" / "arenarl", "--help", cwd=installed)
