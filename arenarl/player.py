"""One episode: engine and environment take turns on one token record. `arenarl.rollout` plays many of them at once."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from arenarl.async_env import AsyncToolEnv
from arenarl.chat import ChatRenderer
from arenarl.engine import Engine
from arenarl.errors import DeadlineExceeded, EnvError, McpServerError
from arenarl.mcp.hub import ServerHub
from arenarl.taskset import TaskSet
from arenarl.types import Completion, Episode, Memory, Outcome, SamplingParams, Segment, Task, Trajectory


@dataclass(frozen=True, kw_only=True)
class Job:
    """One group to play.

    Attributes:
        greedy_first: decode member 0 at temperature 0 (ArenaRL's anchor).
        version: weight version of the learner when the group was admitted.
        memory: a note that every member sees in every prompt. It is no part of the task: judges and checklists read the
            trajectory, and it is not there.
    """

    group_id: str
    task: Task
    group_size: int
    sampling: SamplingParams
    seed: int = 0
    greedy_first: bool = False
    version: int = 0
    memory: Memory | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutLimits:
    """Bounds of one worker: assistant turns, tokens of a tool result, seconds of a generation and of an episode, episodes at
    once; and how many pooled workspaces it has ready when its engine is.
    """

    max_turns: int | None = None
    max_result_tokens: int = 2048
    generate_timeout_s: float = 300.0
    episode_timeout_s: float = 600.0
    max_episodes: int = 256
    prewarm: int = 0


class SegmentBuilder:
    """Grows the token record of one episode. Sampled ids enter once, as the engine gave them."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.done: list[Segment] = []
        self._open(prompt_ids)

    def _open(self, prompt_ids: Sequence[int]) -> None:
        self.token_ids = list(prompt_ids)
        self._mask = [False] * len(prompt_ids)
        self._logprobs = [0.0] * len(prompt_ids)
        self._versions = [-1] * len(prompt_ids)

    def sampled(self, completion: Completion) -> None:
        self.token_ids += completion.token_ids
        self._mask += [True] * len(completion.token_ids)
        self._logprobs += completion.logprobs
        self._versions += completion.versions

    def glue(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self._mask += [False] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)
        self._versions += [-1] * len(token_ids)

    def fork(self, prompt_ids: Sequence[int]) -> None:
        """The template rewrote what was said: close the segment and begin a new one."""
        self.done.append(self._segment())
        self._open(prompt_ids)

    def segments(self) -> tuple[Segment, ...]:
        return (*self.done, self._segment())

    def _segment(self) -> Segment:
        return Segment(
            token_ids=tuple(self.token_ids),
            mask=tuple(self._mask),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
        )


def derive_seed(*key: object) -> int:
    """A seed in [0, 2**31) that depends on all of the key and on nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "big") >> 1


class EpisodePlayer:
    """Plays one episode: engine and environment take turns on one token record."""

    def __init__(
        self, engine: Engine, renderer: ChatRenderer, taskset: TaskSet, hub: ServerHub, limits: RolloutLimits
    ) -> None:
        self.engine, self.renderer, self.taskset, self.hub, self.limits = engine, renderer, taskset, hub, limits

    async def play(self, job: Job, member: int) -> Episode:
        """One attempt at the job's task. Faults of tools, servers and deadlines end up in its outcome, and so does a prompt
        that the context cannot hold.

        Raises:
            ConfigError: the template has no place for the job's memory.
            EngineError: the engine is gone or refuses what we built; the worker must not go on.
        """
        env = AsyncToolEnv(
            self.taskset,
            hub=self.hub,
            max_turns=self.limits.max_turns,
            episode_timeout=self.limits.episode_timeout_s,
            max_result_tokens=self.limits.max_result_tokens,
            token_offsets=self.renderer.token_offsets,
            parser=self.renderer.parser,
        )
        try:
            return await self._play(env, job, member)
        finally:
            await env.aclose()

    async def _play(self, env: AsyncToolEnv, job: Job, member: int) -> Episode:
        greedy = job.greedy_first and member == 0
        timing = {"generate": 0.0, "tools": 0.0}
        cached = 0
        try:
            history, info = await env.reset(seed=job.seed, options={"task": job.task})
        except (McpServerError, EnvError) as error:
            return _failed(job, member, greedy, f"reset: {error}")
        tools = info["tools"]
        record = SegmentBuilder(self.renderer.prompt(history, tools, job.memory))
        if self._full(record):  # nothing that the policy did
            return _failed(job, member, greedy, f"context: a prompt of {len(record.token_ids)} tokens leaves no room")
        while True:
            sampling = self._sampling(job, member, greedy, len(history))
            started = time.monotonic()
            try:
                completion = await self.engine.generate(
                    record.token_ids, sampling, request_id=f"{job.group_id}/{member}/{len(history)}",
                    deadline_s=self.limits.generate_timeout_s,
                )  # fmt: skip
            except DeadlineExceeded:
                return _failed(job, member, greedy, "generate: deadline", segments=record.segments())
            timing["generate"] += time.monotonic() - started
            cached += completion.num_cached_tokens
            record.sampled(completion)
            if completion.finish_reason == "abort":  # the engine's doing, not the policy's
                return _failed(job, member, greedy, "generate: aborted", segments=record.segments())
            if completion.finish_reason != "stop":
                full = len(record.token_ids) >= self.engine.max_model_len
                await env.truncate("context" if full else completion.finish_reason)
                break
            said = self.renderer.decode(completion.token_ids)
            started = time.monotonic()
            result = await env.step(said)
            timing["tools"] += time.monotonic() - started
            if result.terminated or result.truncated:
                break
            history = [*history, {"role": "assistant", "content": said}]
            glue = self.renderer.glue(history, result.messages, tools)
            history = [*history, *result.messages]
            if glue is None:
                record.fork(self.renderer.prompt(history, tools, job.memory))
            else:
                record.glue(glue)
            if self._full(record):
                await env.truncate("context")
                break
        return Episode(
            episode_id=f"{job.group_id}/{member}", task=job.task, member=member, greedy=greedy,
            segments=record.segments(), trajectory=env.trajectory(), outcome=env.outcome, detail=env.detail,
            checklist=env.checklist_results, score=env.score, reforks=len(record.done), num_cached_tokens=cached,
            timing=timing,
        )  # fmt: skip

    def _full(self, record: SegmentBuilder) -> bool:
        return len(record.token_ids) >= self.engine.max_model_len - 1

    @staticmethod
    def _sampling(job: Job, member: int, greedy: bool, turn: int) -> SamplingParams:
        temperature = 0.0 if greedy else job.sampling.temperature
        return replace(job.sampling, temperature=temperature, seed=derive_seed(job.seed, job.group_id, member, turn))


def _failed(job: Job, member: int, greedy: bool, detail: str, segments: tuple[Segment, ...] = ()) -> Episode:
    return Episode(
        episode_id=f"{job.group_id}/{member}", task=job.task, member=member, greedy=greedy, segments=segments,
        trajectory=Trajectory(messages=(), events=(), answer=None), outcome=Outcome.FAILED, detail=detail,
    )  # fmt: skip
