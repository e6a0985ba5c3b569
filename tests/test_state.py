"""What verifiers may read of an episode's directory, and that nothing there can lead them out or make them run things."""

from __future__ import annotations

import sqlite3
import subprocess
from pathlib import Path

import pytest

from arenarl.errors import BrokenFile, EnvError
from arenarl.state import EpisodeState


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=A", "-c", "user.email=a@b.c", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_files_are_listed_and_read(tmp_path: Path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c.txt").write_text("deep")
    (tmp_path / "z.bin").write_bytes(b"caf\xe9")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("")
    state = EpisodeState(tmp_path)
    assert state.paths() == ["a/b/c.txt", "z.bin"]
    assert (state.read("a/b/c.txt"), state.read("z.bin")) == ("deep", "caf\ufffd")
    assert [state.read(path) for path in ("missing", "a", "a\0b", "")] == [None] * 4


def test_links_do_not_lead_out(tmp_path: Path):
    inside, secret = tmp_path / "inside", tmp_path / "secret.txt"
    inside.mkdir()
    secret.write_text("secret")
    (inside / "link").symlink_to(secret)
    (inside / "up").symlink_to(tmp_path)
    (inside / "real.txt").write_text("mine")
    (inside / "alias").symlink_to(inside / "real.txt")
    state = EpisodeState(inside)
    assert [state.read(p) for p in ("link", "up/secret.txt", "../secret.txt", str(secret))] == [None] * 4
    assert state.read("alias") == "mine" and state.paths() == ["real.txt"]
    assert state.rows("link", "select 1") is None


def test_a_file_is_read_byte_for_byte_and_nothing_is_told_from_something(tmp_path: Path):
    (tmp_path / "dos.txt").write_bytes(b"x\r\ny\r\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken").symlink_to("nowhere")
    state = EpisodeState(tmp_path)
    assert state.read("dos.txt") == "x\r\ny\r\n"
    assert [state.exists(name) for name in ("dos.txt", "folder", "broken", "nothing")] == [True, True, True, False]


def test_a_locked_database_is_no_broken_one(tmp_path: Path):
    with sqlite3.connect(tmp_path / "data.db") as holder:
        holder.execute("create table t (n integer)")
    holder.execute("begin exclusive")
    with pytest.raises(EnvError, match="locked") as caught:
        EpisodeState(tmp_path).rows("data.db", "select n from t")
    holder.close()
    assert not isinstance(caught.value, BrokenFile)
    with pytest.raises(BrokenFile, match="no such table"):
        EpisodeState(tmp_path).rows("data.db", "select n from u")


def test_sqlite_rows_are_read_and_never_written(tmp_path: Path):
    with sqlite3.connect(tmp_path / "data.db") as connection:
        connection.execute("create table t (n integer, word text)")
        connection.executemany("insert into t values (?, ?)", [(1, "one"), (2, "two")])
    connection.close()
    state = EpisodeState(tmp_path)
    assert state.rows("data.db", "select word from t where n > ? order by n", (0,)) == [("one",), ("two",)]
    assert state.rows("other.db", "select 1") is None
    with pytest.raises(EnvError, match="readonly"):
        state.rows("data.db", "delete from t")
    (tmp_path / "text.db").write_text("no database, only a text that is long enough to be looked at")
    with pytest.raises(BrokenFile, match=r"'text.db' cannot be read with 'select 1 from t'"):
        state.rows("text.db", "select 1 from t")


def test_git_history_is_read_without_running_what_the_repository_configures(tmp_path: Path):
    git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "f.txt").write_text("x")
    git(tmp_path, "add", "f.txt")
    git(tmp_path, "commit", "-q", "-m", "first")
    trap = tmp_path / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\n")
    trap.chmod(0o755)
    for key in (
        "core.fsmonitor",
        "diff.external",
        "diff.trap.textconv",
        "filter.trap.clean",
        "core.pager",
        "core.sshCommand",
    ):
        git(tmp_path, "config", key, str(trap))
    (tmp_path / ".gitattributes").write_text("*.txt diff=trap filter=trap\n")
    (tmp_path / "f.txt").write_text("y")
    state = EpisodeState(tmp_path)
    assert state.git("log", "--format=%s") == "first\n"
    assert state.git("status", "--porcelain", "-uno") == " M f.txt\n"
    assert "-x\n" in (state.git("diff", "f.txt") or "") and "+x" in (state.git("show", "HEAD") or "")
    assert state.git("show", "no-such-revision") is None
    assert not (tmp_path / "sprung").exists()


def test_no_repository_is_not_the_one_above(tmp_path: Path):
    git(tmp_path, "init", "-q")
    (tmp_path / "inside").mkdir()
    assert EpisodeState(tmp_path / "inside").git("rev-parse", "--git-dir") is None


def test_an_environment_without_a_directory_says_so():
    for read in (EpisodeState().paths, lambda: EpisodeState().read("x"), lambda: EpisodeState().git("log")):
        with pytest.raises(EnvError, match=r"no working directory; name \$\{WORKDIR\}"):
            read()
