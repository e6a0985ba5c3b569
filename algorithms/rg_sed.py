"""RG-SED, reward-gated self-distillation, as one more stream for any algorithm. ARISE-RL, arXiv 2609.01058, section on RG-SED.

    y_s     k_s plain attempts, scored as ever: the group
    m       a coach's private note on them, which has seen the rewards and what was met or missed
    y_m     k_m attempts with m in the prompt: they only measure  Delta = mean r(y_m) - mean r(y_s)
    L_SED = sum_t KL( pi(. | y_s<t, p) || stop_grad pi(. | y_s<t, p + m) )        on the student's own tokens
    lambda_t = lambda_0 g(Delta) warm-up(t) decay(t)

    config.training(extra_streams=[RGSED(coach="arenarl.coach:LLMCoach", coach_config={...})])

Departures: the teacher's context is the student's token ids with those of m put in, so nothing else differs; the gate may weigh Delta by its
standard error; conditioned attempts are never in a baseline or in the policy loss, since they are no members of the group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from arenarl.arena import ANSWER_TIMEOUT_S
from arenarl.batching import Stream
from arenarl.chat import ChatRenderer
from arenarl.coach import Coach
from arenarl.endpoint import Outage
from arenarl.errors import ConfigError, JudgeError, boundary
from arenarl.functional import reward_gap, sed_coefficient, sed_gate
from arenarl.player import Job, derive_seed
from arenarl.rubric import ChecklistItem
from arenarl.scoring import Services
from arenarl.taskset import load_object
from arenarl.types import Episode, EpisodeGroup, Lesson, Memory, Message, Segment

GATES = ("stderr", "sigmoid", "threshold", "open")


@dataclass(kw_only=True)
class RGSED:
    """The term of the loss; built in an experiment, pickled into the workers, where it builds its coach.

    Attributes:
        coach, coach_config: "module:Class" of a `arenarl.coach.Coach` and its arguments.
        memory_rollouts: k_m.
        place: the note ends the system prompt (Solver) or the first user message (Generator).
        coefficient: lambda_0.
        gate: "stderr" and "sigmoid" weigh Delta smoothly, "threshold" is the paper's text; "open" lets every measured group through.
        tau, temperature: of the gate, in units of the reward.
        warmup, decay: learner steps; see `sed_coefficient`.
        tokens: distil all sampled tokens, or those of the last turn ("answer"), as the released code does.
    """

    coach: str
    coach_config: Mapping[str, Any] = field(default_factory=dict)
    memory_rollouts: int = 8
    place: Literal["system", "user"] = "system"
    coefficient: float = 0.5
    gate: Literal["stderr", "sigmoid", "threshold", "open"] = "stderr"
    tau: float = 0.05
    temperature: float = 0.0125
    warmup: int = 20
    decay: int = 120
    tokens: Literal["all", "answer"] = "all"
    _coach: Coach | None = field(default=None, repr=False, init=False)

    def __post_init__(self) -> None:
        for name, known in (("gate", GATES), ("place", ("system", "user")), ("tokens", ("all", "answer"))):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown: take one of {', '.join(known)}")
        least = 2 if self.gate == "stderr" else 1
        for name, low in (("memory_rollouts", least), ("warmup", 0), ("decay", 0)):
            if type(getattr(self, name)) is not int or getattr(self, name) < low:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a whole number, at least {low}")
        for name in ("coefficient", "temperature"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be above 0")

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, here or in another process: the coach stays where it was built, with its connections."""
        return {**vars(self), "_coach": None}

    def check(self, renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        """Build the coach once, and find the place of its note in the template. Raises ConfigError."""
        if not callable(getattr(self._build_coach(), "advise", None)):
            raise ConfigError(f"coach {self.coach!r} has no method advise(group, items); name a class that has")
        renderer.splice_point(messages, tools, self.place)

    def _build_coach(self) -> Coach:
        return load_object(self.coach, "coach", **self.coach_config)

    # -- in the worker ------------------------------------------------------------------------------------------------

    async def extend(self, group: EpisodeGroup, config: Any, services: Services) -> EpisodeGroup:
        """Ask the coach, play with its note, and measure what the note is worth."""
        said = await self._ask(group, services)
        if isinstance(said, Outage):
            return replace(group, lesson=Lesson(outage=f"coach {said.kind}: {said.detail}"))
        if not said:
            return group
        memory = Memory(text=said, place=self.place)
        job = Job(
            group_id=f"{group.group_id}/memory", task=group.task, group_size=self.memory_rollouts,
            sampling=config.sampling_params(), seed=derive_seed(config.seed, group.group_id, "memory"),
            version=group.version, memory=memory,
        )  # fmt: skip
        noted = await services.play(job)
        rewards, plain = await _comparable(group, noted, config, services)
        gap, stderr = reward_gap(plain, rewards)
        ids = tuple(services.renderer.encode_foreign(said))
        splice = splice_of(group.episodes, noted.episodes, ids)
        why = "rewards: none to compare" if gap is None else "tokens: no attempt to splice" if splice is None else ""
        lesson = Lesson(
            memory=memory, memory_ids=ids, splice=splice or 0, episodes=noted.episodes, rewards=rewards, gap=gap,
            stderr=stderr, outage=why,
        )  # fmt: skip
        return replace(group, lesson=lesson)

    async def _ask(self, group: EpisodeGroup, services: Services) -> str | Outage:
        """The note, or why there is none. A coach that raises, or says anything else, is an error of its code: JudgeError."""
        self._coach = self._coach or self._build_coach()
        items = services.taskset.checklist(group.task).items.values()
        with boundary(JudgeError, f"coach {self.coach} on {group.group_id}"):
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    said = await self._coach.advise(group, [item for item in items if isinstance(item, ChecklistItem)])
            except TimeoutError as error:
                return Outage(kind="timeout", detail=str(error) or f"no note after {ANSWER_TIMEOUT_S:g} s")
            if not isinstance(said, str | Outage):
                raise TypeError(f"advise() gave {said!r}, which is neither a text nor an Outage")
        return said

    def begin_step(self, version: int) -> None:
        if begin_step := getattr(self._coach, "begin_step", None):
            begin_step(version)

    async def aclose(self) -> None:
        coach, self._coach = self._coach, None
        if close := getattr(coach, "aclose", None):
            await close()

    # -- in the driver ------------------------------------------------------------------------------------------------

    def weight(self, lesson: Lesson, step: int) -> float:
        """lambda_t of a group at a learner step; 0 for a lesson that is not whole."""
        if lesson.outage or lesson.gap is None:
            return 0.0
        gate = (
            1.0 if self.gate == "open"
            else sed_gate(lesson.gap, tau=self.tau, temperature=self.temperature, stderr=lesson.stderr, kind=self.gate)
        )  # fmt: skip
        return gate * sed_coefficient(step, coefficient=self.coefficient, warmup=self.warmup, decay=self.decay)

    def stream(self, group: EpisodeGroup, step: int) -> Stream | None:
        """lambda_t at the student's tokens."""
        weight = self.weight(group.lesson, step) if group.lesson else 0.0
        if group.lesson is None or weight < NEGLIGIBLE:
            return None
        trained = zip(group.episodes, group.advantages, strict=True)
        weights = tuple(
            None if advantage is None or episode.greedy else tuple(self._weights(episode, weight))
            for episode, advantage in trained
        )
        return Stream(
            name="distillation", weights=weights, memory_ids=group.lesson.memory_ids, splice=group.lesson.splice
        )

    def _weights(self, episode: Episode, weight: float) -> list[NDArray[np.float32]]:
        rows = [np.where(s.mask, weight, 0.0).astype(np.float32) for s in episode.segments]
        if self.tokens == "answer" and rows:
            for row in rows[:-1]:
                row[:] = 0.0
            rows[-1][: last_turn(episode.segments[-1])] = 0.0
        return rows


NEGLIGIBLE = 1e-4
"""A lambda below this is not worth the forward pass that its teacher would cost."""


async def _comparable(
    group: EpisodeGroup, noted: EpisodeGroup, config: Any, services: Services
) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
    """Rewards of the conditioned attempts and of the group's own, on one scale. Ranks of two groups have none; checklist scores do.

    All of them were sampled: what a greedy member earned says nothing about the note.
    """
    sampled = [n for n, episode in enumerate(group.episodes) if not episode.greedy]
    if config.algo_class.rewards_compare:
        rewards = (await config.algo_class.score_group(noted, config, services)).rewards
        return rewards, tuple(group.rewards[n] for n in sampled)
    scores = [tuple(e.score if e.rankable else None for e in side.episodes) for side in (noted, group)]
    return scores[0], tuple(scores[1][n] for n in sampled)


def last_turn(segment: Segment) -> int:
    """Where the last run of sampled tokens begins; the length of the segment if there is none."""
    sampled = [n for n, own in enumerate(segment.mask) if own]
    if not sampled:
        return len(segment.mask)
    return next(n for n in range(sampled[-1], -1, -1) if n == 0 or not segment.mask[n - 1])


def splice_of(plain: Sequence[Episode], noted: Sequence[Episode], memory_ids: tuple[int, ...]) -> int | None:
    """How many ids of the plain prompt stand before the note, read off the record: the conditioned prompt must be the plain one with the
    note put in and nothing else. None if an attempt with tokens is missing on either side, or if no such place exists.
    """
    first = [next((e.segments[0] for e in side if e.segments), None) for side in (plain, noted)]
    if first[0] is None or first[1] is None:
        return None
    prompt, other = (segment.token_ids[: _prompt_length(segment)] for segment in first if segment)
    for splice in range(len(prompt), -1, -1):
        if other == prompt[:splice] + memory_ids + prompt[splice:]:
            return splice
    return None


def _prompt_length(segment: Segment) -> int:
    return next((n for n, sampled in enumerate(segment.mask) if sampled), len(segment.mask))
