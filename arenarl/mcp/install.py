"""Install the public servers of the catalogue: ``python -m arenarl.mcp.install [NAME...]``."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from arenarl.errors import ArenaError, ConfigError, McpServerError, boundary
from arenarl.mcp import catalogue
from arenarl.mcp.catalogue import PublicServer

_AT_ONCE = 2  # an install is one busy thread and much disk
_STEP_SECONDS = 600.0
_PIP = (sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check")
_QUIET_NPM = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error")


def install(
    names: Sequence[str] | None = None,
    root: Path | None = None,
    report: Callable[[str, float], None] = lambda name, seconds: None,
) -> dict[str, float]:
    """Give each server an environment of its own below ``root``, with exactly the packages of its lock.

    Scripts of npm packages are not run. A server that is there already is left alone; a half-made one is made anew.

    Args:
        names: catalogue names; all if None.
        root: `catalogue.root()` if None.
        report: called with name and seconds for each server that is done.

    Returns:
        Seconds per server, 0 for one that was there.

    Raises:
        ConfigError: for an unknown name, or if npm is missing.
        McpServerError: naming the server and the last words of pip or npm.
    """
    entries = [catalogue.entry(name) for name in (names if names else catalogue.CATALOGUE)]
    folder = (root or catalogue.root()).resolve()
    with boundary(ConfigError, f"server folder {str(folder)!r} cannot be made; set ARENARL_SERVERS to another"):
        folder.mkdir(parents=True, exist_ok=True)
    took: dict[str, float] = {}

    with open(folder / ".lock", "w") as lock, tempfile.TemporaryDirectory(dir=folder, prefix=".wheels-") as wheels:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another install into the same folder waits
        store = _Wheels(Path(wheels))

        def one(server: PublicServer) -> None:
            took[server.name] = _install(server, folder, store)
            report(server.name, took[server.name])

        with ThreadPoolExecutor(_AT_ONCE) as threads:
            try:
                for future in [threads.submit(one, server) for server in entries]:
                    future.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
    return took


class _Wheels:
    """Packages of this run. Most servers need the same ones, and looking one up takes pip longer than installing it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()

    def fetch(self, server: PublicServer) -> None:
        """Download what the server's lock names and is not there."""
        with self._lock:
            have = {_pin(*path.name.split("-")[:2]) for path in self.folder.iterdir()}
            pins = [_pin(*line.split("==")) for line in server.lock.read_text().split()]
            if missing := [pin for pin in pins if pin not in have]:
                options = ("--no-deps", "--only-binary", ":all:", "--dest", str(self.folder))
                _run(server, [*_PIP, "download", *options, *missing])


def _pin(name: str, version: str) -> str:
    return f"{re.sub('[-_.]+', '-', name).lower()}=={version}"


def _install(server: PublicServer, root: Path, wheels: _Wheels) -> float:
    if server.is_installed(root):
        return 0.0
    began, target = time.monotonic(), root / server.name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    if server.kind == "pypi":
        _run(server, [sys.executable, "-m", "venv", "--without-pip", str(target)])
        wheels.fetch(server)
        # The lock is complete, so pip resolves nothing. Byte code is made by the first start, of what it imports only.
        _run(server, [
            *_PIP, "--python", str(target / "bin" / "python"), "install", "--no-deps", "--no-compile", "--no-index",
            "--find-links", str(wheels.folder), "--requirement", str(server.lock),
        ])  # fmt: skip
    else:
        if shutil.which("npm") is None:
            raise ConfigError(f"server {server.name!r} needs npm; install Node.js 20 or later")
        (target / "package.json").write_text(server.package_json())
        shutil.copyfile(server.lock, target / "package-lock.json")
        _run(server, ["npm", "ci", "--prefix", str(target), *_QUIET_NPM])
    (target / catalogue.STAMP).write_text(server.digest)  # last, so it vouches for the whole
    return time.monotonic() - began


def _run(server: PublicServer, command: list[str]) -> None:
    """Run one step; on failure or after its time no process of it is left."""
    step = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = step.communicate(timeout=_STEP_SECONDS)
    except subprocess.TimeoutExpired:
        raise McpServerError(f"server {server.name!r}: {command[0]} did not end in {_STEP_SECONDS:g} s") from None
    finally:
        if step.poll() is None:
            os.killpg(step.pid, signal.SIGKILL)
            step.communicate()
    if step.returncode:
        words = " | ".join(line.strip() for line in output.splitlines() if line.strip())[-800:]
        raise McpServerError(f"server {server.name!r} ({server.pin}) cannot be installed: {words}")


def main(names: Sequence[str]) -> int:
    """Install and print a line per server. Returns the exit status."""
    try:
        install(names, report=lambda name, seconds: print(f"{name:20s} {seconds:6.1f} s", flush=True))
    except ArenaError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
