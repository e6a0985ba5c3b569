"""How much of the latency of tool servers shows in wall time: ``python benchmarks/env_latency.py [--episodes 32]``.

Episodes in flight wait side by side, so of the latency that they would have one after another ("serial") only a small
share may show. Rounds alternate between the latencies; medians are compared. Exits with 1 if a share is above 0.1.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from arenarl.async_env import AsyncToolEnv
from arenarl.mcp import ServerHub, ServerSpec
from arenarl.rubric import Checklist, ChecklistItem
from arenarl.types import Task

LATENCIES_S = (0.0, 0.05, 0.2)
CALLS = 4
BOUND = 0.1
SERVER = str(Path(__file__).with_name("slow_server.py"))
CALL = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'


class Waiting:
    name, system_prompt, max_turns = "waiting", "Wait.", CALLS + 1

    def __init__(self, seconds: float) -> None:
        self.seconds = str(seconds)

    def servers(self) -> tuple[ServerSpec, ...]:
        command = ("-I", "-S", SERVER, self.seconds, self.seconds)
        return (ServerSpec(name="slow", command=sys.executable, args=command),)

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        return [Task(task_id=f"{split}-{seed}", kind="wait", prompt="Wait.")] * count

    def checklist(self, task: Task) -> Checklist:
        return Checklist([ChecklistItem(name="answered", check=lambda trajectory: trajectory.answer == "done")])


async def wall_time(seconds: float, episodes: int) -> float:
    """Seconds for so many episodes in flight, from the first reset to the last end; servers end outside the clock."""
    hub = ServerHub()

    async def episode(n: int) -> None:
        env = AsyncToolEnv(Waiting(seconds), hub=hub)
        await env.reset(seed=n)
        for _ in range(CALLS):
            await env.step(CALL)
        assert (await env.step("done")).reward == 1.0

    try:
        started = time.perf_counter()
        await asyncio.gather(*map(episode, range(episodes)))
        return time.perf_counter() - started
    finally:
        await hub.aclose()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    walls: dict[float, list[float]] = {seconds: [] for seconds in LATENCIES_S}
    for _ in range(arguments.rounds):
        for seconds in LATENCIES_S:
            walls[seconds].append(asyncio.run(wall_time(seconds, arguments.episodes)))
    table = Table("latency ms", "wall s (median)", "all rounds", "extra s", "serial s", "share", box=None)
    median = {seconds: statistics.median(values) for seconds, values in walls.items()}
    worst = 0.0
    for seconds in LATENCIES_S:
        serial, extra = arguments.episodes * (1 + CALLS) * seconds, median[seconds] - median[0.0]
        share = extra / serial if serial else 0.0
        worst = max(worst, share)
        rounds = " ".join(f"{value:.2f}" for value in walls[seconds])
        row = (
            f"{1000 * seconds:.0f}",
            f"{median[seconds]:.2f}",
            rounds,
            f"{extra:.2f}",
            f"{serial:.1f}",
            f"{share:.3f}",
        )
        table.add_row(*row)
    Console().print(table)
    print(f"{arguments.episodes} episodes in flight, {CALLS} calls each; worst share {worst:.3f}, bound {BOUND}")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
