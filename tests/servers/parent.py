"""A process with open sessions, to be killed: prints its descendants as JSON, then waits. ``parent.py COUNT [fork]``.

Each server runs below a shell and has a grandchild and a daemon. With "fork" it first makes a copy of itself that holds
copies of every pipe and socket and stays alive.
"""

import asyncio
import json
import os
import shlex
import sys
import time
from pathlib import Path

import psutil

from arenarl.mcp import McpSession, ServerSpec

SERVER = shlex.join([sys.executable, "-I", "-S", str(Path(__file__).with_name("faulty.py")), "--start", "family"])


async def main() -> None:
    spec = ServerSpec(name="family", command="sh", args=("-c", f"{SERVER}; true"), start_timeout=200.0)
    sessions = await asyncio.gather(*(McpSession(spec).start() for _ in range(int(sys.argv[1]))))
    family = [child.pid for child in psutil.Process().children(recursive=True)]
    copy = 0
    if "fork" in sys.argv:
        copy = os.fork()
        if copy == 0:
            time.sleep(1000)  # noqa: ASYNC251
    print(json.dumps({"family": family, "copy": copy, "sessions": len(sessions)}), flush=True)
    await asyncio.sleep(1000)


asyncio.run(main())
