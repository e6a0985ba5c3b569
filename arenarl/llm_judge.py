"""A language model as judge, behind any OpenAI-compatible endpoint.

    compare   both attempts in one prompt -> comments and marks -> weighted sums     (ArenaRL's arena judge)
    mark      one attempt alone, likewise                                            (what pointwise algorithms train on)

The model marks dimensions; the sums are ours. What cannot be read as marks is asked for once more and is then an
abstention, as is every outage: neither ever becomes a score.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from arenarl.endpoint import Endpoint, Outage, Reply, open_endpoint
from arenarl.errors import ConfigError
from arenarl.judge_prompt import Prompt, build_prompt, reminder
from arenarl.judge_reply import read_mark, read_verdict
from arenarl.judge_rubrics import SCALE, Language, Rubric, load_rubric
from arenarl.types import Abstention, Episode, Mark, Task, Verdict

T = TypeVar("T", Verdict, Mark)


class Cost(TypedDict):
    """What `Verdict`, `Abstention` and `Mark` say of the requests behind them."""

    calls: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float


class LLMJudge:
    """Marks attempts by a rubric of two levels.

    Attributes:
        name: of the endpoint.
        scale: marks are from 0 to this.

    Args:
        rubric: "travel", "research", the path of a JSON file, or a `Rubric`.
        language: of the prompt, and of a rubric by name: "en" or "zh".
        endpoint: where the model is; None builds an `OpenAIEndpoint` from ``settings``, of which ``base_url`` and
            ``model`` must be there. In training every environment runner builds a judge, and so an endpoint, of its own:
            concurrency and budgets of a step are those of one runner.
        max_tokens: of a reply. A model that thinks needs room for its thoughts.
        temperature: above 0 for independent marks of one attempt. At 0 the marks of one attempt are all alike, though
            each is paid for: who averages several (``marks`` of GRPO) sets about 0.7, or asks for one.
        seed: of the sampling.
        attempts: how often a pair is asked for until the reply can be read, each with a deadline of its own. Outages are
            not asked again: the endpoint has its own retries.
        attempt_chars: characters of each attempt that the model sees, half of them path and half answer.

    Raises:
        ConfigError: an argument is refused.
    """

    scale = SCALE

    def __init__(
        self, *, rubric: str | Path | Rubric = "travel", language: Language = "en", endpoint: Endpoint | None = None,
        max_tokens: int = 2048, temperature: float = 0.0, seed: int = 0, attempts: int = 2, attempt_chars: int = 16_000,
        **settings: Any,
    ) -> None:  # fmt: skip
        self.rubric = load_rubric(rubric, language)
        least = {"max_tokens": 1, "attempts": 1, "attempt_chars": 500, "seed": 0}
        for name, value in zip(least, (max_tokens, attempts, attempt_chars, seed), strict=True):
            if type(value) is not int or value < least[name]:
                raise ConfigError(f"{name}={value!r} is refused; give a whole number, at least {least[name]}")
        if type(temperature) not in (int, float) or not 0 <= temperature < math.inf:
            raise ConfigError(f"temperature={temperature!r} is refused; give 0 or more")
        if endpoint is not None and settings:
            raise ConfigError(f"{next(iter(settings))!r} is a setting of an endpoint, and one is given; set it there")
        self.endpoint = endpoint if endpoint is not None else open_endpoint(settings, "a judge")
        self.name = self.endpoint.name
        self.language, self.max_tokens, self.temperature = language, max_tokens, temperature
        self.seed, self.attempts, self.attempt_chars = seed, attempts, attempt_chars

    async def compare(self, a: Episode, b: Episode, task: Task) -> Verdict | Abstention:
        """Marks for both, a on side A. Two attempts that differ in nothing are equal, and the model is not asked."""
        if _content(a) == _content(b):
            return Verdict(score_a=SCALE / 2, score_b=SCALE / 2, raw="identical attempts", judge=self.name)
        return await self._ask(build_prompt(task, (a, b), *self._view), read_verdict, self.seed)

    async def mark(self, a: Episode, task: Task, repeat: int = 0) -> Mark | Abstention:
        """The mark of one attempt alone; ``repeat`` numbers marks that are sampled independently, if the temperature is above 0."""
        return await self._ask(build_prompt(task, (a,), *self._view), read_mark, self.seed + repeat * self.attempts)

    def begin_step(self, version: int) -> None:
        self.endpoint.begin_step(version)

    async def aclose(self) -> None:
        await self.endpoint.aclose()

    @property
    def _view(self) -> tuple[Rubric, Language, int]:
        return self.rubric, self.language, self.attempt_chars

    async def _ask(
        self, prompt: Prompt, read: Callable[[str, str, Rubric], T | Abstention], seed: int
    ) -> T | Abstention:
        replies: list[Reply | Outage] = []
        messages = prompt.messages()
        while True:
            reply = await self.endpoint.complete(
                messages, schema=prompt.schema, max_tokens=self.max_tokens, temperature=self.temperature,
                seed=seed + len(replies),
            )  # fmt: skip
            replies.append(reply)
            if isinstance(reply, Outage):
                return Abstention(reason=f"{reply.kind}: {reply.detail}", judge=self.name, **cost_of(*replies))
            result = read(reply.text, reply.finish_reason, self.rubric)
            if not isinstance(result, Abstention) or len(replies) == self.attempts:
                return replace(result, judge=self.name, **cost_of(*replies))
            messages = prompt.messages(postscript=reminder(self.language, result.kind))


def cost_of(*parts: Reply | Outage | Verdict | Abstention | Mark) -> Cost:
    """The sums over requests that were made one after the other."""
    return Cost(
        calls=sum(part.calls for part in parts),
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        completion_tokens=sum(part.completion_tokens for part in parts),
        seconds=sum(part.seconds for part in parts),
    )


def _content(episode: Episode) -> tuple[object, ...]:
    """All that could make a judge tell two attempts at a task apart, before anything is shortened."""
    t = episode.trajectory
    calls = [
        (e.turn, e.call.name, e.call.arguments, e.call.raw, e.call.error, e.result.kind, e.result.text)
        for e in t.events
    ]
    said = [(m["role"], m["content"]) for m in t.messages]
    return said, calls, t.answer, episode.outcome, episode.detail
