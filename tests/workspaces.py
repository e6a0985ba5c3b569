"""Hubs and servers for the tests of `arenarl.mcp`, in a folder where they must leave nothing."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from arenarl.mcp import ServerHub, ServerSpec, Workspace
from tests.processes import descendants

SERVERS = Path(__file__).parent / "servers"
FAULTY = str(SERVERS / "faulty.py")
FILES = str(SERVERS / "files.py")
PYTHON = (sys.executable, "-I", "-S")


def server(*args: str, **changes: Any) -> ServerSpec:
    values = {"name": "faulty", "command": PYTHON[0], "args": (*PYTHON[1:], FAULTY, *args), "call_timeout": 20.0}
    return ServerSpec(**(values | changes))


def files(**changes: Any) -> ServerSpec:
    values = {"name": "files", "command": PYTHON[0], "args": (*PYTHON[1:], FILES, "${WORKDIR}"), "close_grace": 0.2}
    return ServerSpec(**(values | changes))


@pytest.fixture(name="folder", autouse=True)
def clean_folder(tmp_path: Path) -> Iterator[Path]:
    """Where the directories of workspaces are, and must not be any more in the end."""
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path / "arena")
    (tmp_path / "arena").mkdir()
    yield tmp_path / "arena"
    tempfile.tempdir = before
    assert not left(tmp_path / "arena")


@contextlib.asynccontextmanager
async def a_hub(**options: Any):
    hub = ServerHub(**options)
    try:
        yield hub
    finally:
        await hub.aclose()


async def say(workspace: Workspace, tool: str, server: str = "files", **arguments: Any) -> str:
    return (await workspace.call(server, tool, arguments, timeout=20.0)).text


async def episode(hub: ServerHub, spec: ServerSpec, *tools: str, **options: Any) -> tuple[Path | None, list[str]]:
    """The root of a workspace, and what some tools say in it."""
    workspace = await hub.open([spec], **options)
    said = [await say(workspace, tool) for tool in tools]
    hub.put(workspace)
    return workspace.root, said


def left(folder: Path) -> list[Any]:
    """Directories and processes that are still there."""
    return [*folder.iterdir(), *descendants()]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something is so."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (what other processes do sets no event)
            await asyncio.sleep(0.01)
