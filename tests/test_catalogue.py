"""The table of public servers and its locks. Whether the servers work is the affair of test_conformance."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from arenarl.errors import ConfigError
from arenarl.mcp.catalogue import CATALOGUE, Call, PublicServer, entry, find, is_installed, root
from arenarl.mcp.config import EPISODE_VARIABLES
from arenarl.mcp.install import install, main

servers = pytest.mark.parametrize("server", CATALOGUE.values(), ids=list(CATALOGUE))


def test_the_catalogue_has_both_registries_and_every_generation_of_server():
    assert len(CATALOGUE) >= 13
    assert {server.kind for server in CATALOGUE.values()} == {"npm", "pypi"}
    assert {server.sdk for server in CATALOGUE.values()} == {"python-1", "python-2", "fastmcp", "typescript"}


@servers
def test_a_lock_pins_every_package_and_names_no_host(server: PublicServer):
    text = server.lock.read_text()
    assert "http" + "://" not in text and "https" + "://" not in text and "resolved" not in text
    if server.kind == "pypi":
        pins = dict(line.split("==") for line in text.split())
        assert pins[server.package] == server.version
        major = {"python-1": "1", "python-2": "2"}.get(server.sdk, pins["mcp"][0])
        assert pins["mcp"].startswith(f"{major}.") and ("fastmcp" in pins) == (server.sdk == "fastmcp")
    else:
        packages = json.loads(text)["packages"]
        assert packages.pop("")["dependencies"] == {server.package: server.version}
        assert packages[f"node_modules/{server.package}"]["version"] == server.version
        assert all(re.fullmatch(r"\d+\.\d+\.\d+\S*", p["version"]) and p["integrity"] for p in packages.values())


def test_every_lock_is_of_a_server():
    folder = CATALOGUE["git"].lock.parent
    assert {path.name for path in folder.iterdir()} == {server.lock.name for server in CATALOGUE.values()}


@servers
def test_a_server_has_a_script_that_would_show_a_leak(server: PublicServer):
    assert (server.write is None) == (server.read is None)
    assert server.read is None or "{marker}" in server.read.expect
    assert server.write is None or "{marker}" in str(server.write.arguments)
    assert server.good.expect


def test_a_call_is_filled_at_any_depth():
    call = Call(tool="t", arguments={"{marker}": [{"p": "{root}/a", "n": 1}]}, expect="{marker}!")
    filled = call.filled(root="/r", marker="m")
    assert (filled.arguments, filled.expect) == ({"m": [{"p": "/r/a", "n": 1}]}, "m!")


def test_an_unknown_name_is_refused_with_the_nearest():
    for look in (entry, find, is_installed, lambda name: install([name])):
        with pytest.raises(ConfigError, match=r"no server 'filesytem'; did you mean 'filesystem'\?"):
            look("filesytem")


def test_the_folder_of_all_servers_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ARENARL_SERVERS", str(tmp_path / "here"))
    assert root() == tmp_path.resolve() / "here"
    assert not is_installed("git")
    with pytest.raises(ConfigError, match="'git' is not installed; run `arenarl env install git`"):
        find("git")


def put(server: PublicServer, folder: Path, stamp: str) -> None:
    """Make what `is_installed` looks at."""
    server.program(folder).parent.mkdir(parents=True, exist_ok=True)
    server.program(folder).touch()
    (folder / server.name / ".ready").write_text(stamp)


def test_only_a_whole_install_of_the_present_lock_counts(tmp_path: Path):
    git = CATALOGUE["git"]
    put(git, tmp_path, "the digest of an older lock")
    assert not git.is_installed(tmp_path)
    put(git, tmp_path, git.digest)
    assert git.is_installed(tmp_path)
    git.program(tmp_path).unlink()
    assert not git.is_installed(tmp_path)


def test_an_installed_server_is_left_alone(tmp_path: Path):
    put(CATALOGUE["git"], tmp_path, CATALOGUE["git"].digest)
    assert install(["git"], tmp_path) == {"git": 0.0}


def test_a_found_server_has_its_profile_and_the_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ARENARL_SERVERS", str(tmp_path))
    for name in CATALOGUE:
        put(CATALOGUE[name], tmp_path, CATALOGUE[name].digest)
        find(name).launch(dict.fromkeys(EPISODE_VARIABLES, "/w"))
    spec = find("memory", call_timeout=5.0)
    assert (spec.scope, spec.reset, spec.call_timeout) == ("pool", "files", 5.0)
    assert spec.env["MEMORY_FILE_PATH"] == "${WORKDIR}/memory.jsonl"
    assert spec.command == str(tmp_path.resolve() / "memory" / "node_modules" / ".bin" / "mcp-server-memory")
    assert (find("calculator").reset, find("calculator", scope="episode").reset) == ("none", "respawn")


def test_a_failed_install_names_server_and_reason_and_leaves_no_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("ARENARL_SERVERS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert main(["calculator"]) == 1
    reason = r"server 'calculator' \(mcp-server-calculator==0\.2\.1\) cannot be installed: .*ERROR: .*"
    assert re.fullmatch(reason, capsys.readouterr().err.strip())
    assert not is_installed("calculator")
    assert main(["calculater"]) == 2 and "did you mean" in capsys.readouterr().err
