"""What many concurrent episodes of a plain stdio server cost: time to start, memory, CPU of a call, time to close.

    python benchmarks/mcp_scale.py 256

Memory is the PSS of this process and all below it: what they hold, each shared page counted once. CPU is this process's
share of a step with one call, parsing and checks included, which is the same whatever the server does; "CPU s of all" counts every process from start to close, and
depends little on what else the machine does. Every server counts its own calls, and each is called another number of
times, in no order: an answer that is not its own count is a leak of state. Ends with code 1 if a bound is missed or a
process is left.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import sys
import time
from pathlib import Path

import psutil

from arenarl.async_env import AsyncToolEnv
from arenarl.mcp import ServerHub, ServerSpec
from arenarl.rubric import Checklist, ChecklistItem
from arenarl.types import Task

SERVER = Path(__file__).resolve().parent.parent / "tests" / "servers" / "plain.py"
CALL = '<tool_call>{"name": "count", "arguments": {}}</tool_call>'
BOUNDS = {"start s": 15.0, "PSS MB": 1500.0, "client CPU ms/call": 1.5, "leaks": 0, "processes left": 0}


def memory() -> float:
    """PSS in MB (10^6 bytes) of this process and its descendants."""
    me = psutil.Process()
    return sum(process.memory_full_info().pss for process in (me, *me.children(recursive=True))) / 1e6


class Counting:
    name, system_prompt, max_turns = "counting", "Count.", 1000

    def servers(self) -> tuple[ServerSpec, ...]:
        return (ServerSpec(name="plain", command=sys.executable, args=("-I", "-S", str(SERVER))),)

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        return [Task(task_id=f"{split}-{seed}", kind="count", prompt="Count.")] * count

    def checklist(self, task: Task) -> Checklist:
        return Checklist([ChecklistItem(name="answered", check=lambda trajectory: trajectory.answer is not None)])


async def calls(env: AsyncToolEnv, count: int) -> int:
    """Call so often; how many answers were not the episode's own count."""
    return sum([(await env.step(CALL)).messages[0]["content"] != str(n + 1) for n in range(count)])


async def measure(count: int, rounds: int) -> dict[str, float]:
    hub = ServerHub()
    episodes = [AsyncToolEnv(Counting(), hub=hub) for _ in range(count)]
    clock = time.monotonic()
    await asyncio.gather(*(env.reset(seed=n) for n, env in enumerate(episodes)))
    found = {"start s": time.monotonic() - clock}

    numbers = [n % (2 * rounds) + 1 for n in range(count)]
    random.Random(0).shuffle(numbers)
    cpu, clock = time.process_time(), time.monotonic()
    leaks = await asyncio.gather(*(calls(env, n) for env, n in zip(episodes, numbers, strict=True)))
    found["client CPU ms/call"] = 1000 * (time.process_time() - cpu) / sum(numbers)
    found["calls/s"] = sum(numbers) / (time.monotonic() - clock)
    found["leaks"] = sum(leaks)
    found["PSS MB"] = memory()
    found["client MB"] = psutil.Process().memory_full_info().pss / 1e6
    found["descriptors"] = psutil.Process().num_fds()

    clock = time.monotonic()
    await hub.aclose()
    found["close s"] = time.monotonic() - clock
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    found["CPU s of all"] = sum(usage.ru_utime + usage.ru_stime for usage in spent)
    found["processes left"] = len(psutil.Process().children(recursive=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("episodes", type=int, nargs="?", default=256)
    parser.add_argument("--rounds", type=int, default=10, help="mean calls of an episode")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # four descriptors an episode
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = asyncio.run(measure(options.episodes, options.rounds))
    missed = [name for name, bound in BOUNDS.items() if found[name] > bound]
    for name, value in found.items():
        bound = f"  (at most {BOUNDS[name]:g}{', MISSED' if name in missed else ''})" if name in BOUNDS else ""
        print(f"{name:20}{value:10.2f}{bound}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
