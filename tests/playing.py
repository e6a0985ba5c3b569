"""Playing an episode with messages that are known beforehand."""

from __future__ import annotations

from collections.abc import Sequence

from arenarl.async_env import AsyncToolEnv
from arenarl.types import Outcome, Task


async def play(env: AsyncToolEnv, task: Task, messages: Sequence[str]) -> float | None:
    """The score of an episode of these assistant messages, the answer last."""
    await env.reset(options={"task": task})
    for message in messages:
        await env.step(message)
    assert env.outcome is Outcome.SCORED, env.error
    return env.score
