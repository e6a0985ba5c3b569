"""Several judges as one: all are asked at once, and a quorum of them must decide."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from arenarl.errors import ConfigError, JudgeError
from arenarl.judge import Judge
from arenarl.llm_judge import Cost, cost_of
from arenarl.taskset import load_object
from arenarl.types import Abstention, Episode, Mark, Task, Verdict

T = TypeVar("T", Verdict, Mark)


class Panel:
    """The mean of what its members say, each on a scale from 0 to 1, so that none has more of a voice by larger marks.

    A member's `scale` is what its marks reach at most: 10 for `LLMJudge`, and 1 for a judge that does not say. The
    verdict keeps what every member said: ``dimensions`` has "judge/overall" and "judge/<its own dimension>", on its
    own scale; ``raw`` has its words.

    A member that fails as judges may (`JudgeError`, `TimeoutError`, a mark that is not finite) abstains, and the quorum
    decides. Any other exception is a fault of the program or of the configuration: it ends the panel's answer.

    Args:
        judges: judges, or how to build them: ``{"judge": "module:Class", "config": {...}}``.
        quorum: how many must decide; with fewer the panel abstains, whatever they said. None: more than half.

    Raises:
        ConfigError: no judges, a quorum that cannot be met or asks for nobody, or a judge that cannot be built.
    """

    name = "panel"
    scale = 1.0

    def __init__(self, judges: Sequence[Judge | Mapping[str, Any]], quorum: int | None = None) -> None:
        if not judges:
            raise ConfigError("judges=[] is no panel; give at least one judge")
        self.quorum = len(judges) // 2 + 1 if quorum is None else quorum
        if type(self.quorum) is not int or not 1 <= self.quorum <= len(judges):
            raise ConfigError(f"quorum={quorum} is refused for {len(judges)} judges; give 1 to {len(judges)}")
        self.judges: dict[str, Judge] = {}
        for entry in judges:
            judge = _build(entry) if isinstance(entry, Mapping) else entry
            if not hasattr(judge, "compare"):
                raise ConfigError(f"member {entry!r} of the panel is no judge; it needs a method compare(a, b, task)")
            name = str(getattr(judge, "name", type(judge).__name__))
            names = (name, *(f"{name}#{k}" for k in range(2, len(judges) + 2)))
            self.judges[next(name for name in names if name not in self.judges)] = judge
        self._scales = {name: _scale(name, judge) for name, judge in self.judges.items()}

    async def compare(self, a: Episode, b: Episode, task: Task) -> Verdict | Abstention:
        answers = await self._ask(lambda judge: judge.compare(a, b, task))
        decided = {name: answer for name, answer in answers.items() if isinstance(answer, Verdict)}
        if len(decided) < self.quorum:
            return self._no_quorum(answers)
        dimensions: dict[str, tuple[float, float]] = {}
        for name, verdict in decided.items():
            dimensions[f"{name}/overall"] = (verdict.score_a, verdict.score_b)
            dimensions |= {f"{name}/{dimension}": marks for dimension, marks in verdict.dimensions.items()}
        return Verdict(
            score_a=self._mean({name: verdict.score_a for name, verdict in decided.items()}),
            score_b=self._mean({name: verdict.score_b for name, verdict in decided.items()}),
            dimensions=dimensions, raw=_words(answers), judge=self.name, **_together(answers),
        )  # fmt: skip

    async def mark(self, a: Episode, task: Task, repeat: int = 0) -> Mark | Abstention:
        answers = await self._ask(lambda judge: _mark(judge, a, task, repeat))
        decided = {name: answer.score for name, answer in answers.items() if isinstance(answer, Mark)}
        if len(decided) < self.quorum:
            return self._no_quorum(answers)
        return Mark(score=self._mean(decided), judge=self.name, **_together(answers))

    def begin_step(self, version: int) -> None:
        for judge in self.judges.values():
            if begin := getattr(judge, "begin_step", None):
                begin(version)

    async def aclose(self) -> None:
        """Close every member, also when one of them fails to."""
        async with AsyncExitStack() as stack:
            for judge in self.judges.values():
                if close := getattr(judge, "aclose", None):
                    stack.push_async_callback(close)

    async def _ask(self, ask: Callable[[Judge], Awaitable[T | Abstention]]) -> dict[str, T | Abstention]:
        """What each member says. Who raises what no judge may ends the others and is the caller's to handle."""

        async def one(name: str, judge: Judge) -> T | Abstention:
            try:
                answer = await ask(judge)
            except (JudgeError, TimeoutError) as error:
                return Abstention(reason=f"failed: {type(error).__name__}: {error}", judge=name)
            return answer if _finite(answer) else Abstention(reason=f"nan: {answer}", judge=name)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = {name: group.create_task(one(name, judge)) for name, judge in self.judges.items()}
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return {name: task.result() for name, task in tasks.items()}

    def _mean(self, scores: Mapping[str, float]) -> float:
        return sum(score / self._scales[name] for name, score in scores.items()) / len(scores)

    def _no_quorum(self, answers: Mapping[str, Verdict | Abstention] | Mapping[str, Mark | Abstention]) -> Abstention:
        lost = {name: answer.reason for name, answer in answers.items() if isinstance(answer, Abstention)}
        reasons = "; ".join(f"{name}: {reason}" for name, reason in lost.items())
        return Abstention(
            reason=f"quorum: {len(answers) - len(lost)} of {len(answers)} decided, {self.quorum} must ({reasons})",
            raw=_words(answers), judge=self.name, **_together(answers),
        )  # fmt: skip


def _build(entry: Mapping[str, Any]) -> Judge:
    path, config = entry.get("judge"), entry.get("config") or {}
    if unknown := set(entry) - {"judge", "config"}:
        raise ConfigError(f"a member of a panel has no {min(unknown)!r}; give judge ('module:Class') and config")
    if not isinstance(path, str) or not isinstance(config, Mapping):
        raise ConfigError(f"member {dict(entry)!r} is no judge; give judge ('module:Class') and config (a mapping)")
    return load_object(path, "judge", **config)


def _scale(name: str, judge: Judge) -> float:
    scale = float(getattr(judge, "scale", 1.0))
    if not 0 < scale < math.inf:
        raise ConfigError(f"judge {name!r} has scale {scale}; it must be positive")
    return scale


def _finite(answer: Verdict | Mark | Abstention) -> bool:
    if isinstance(answer, Verdict):
        return math.isfinite(answer.score_a) and math.isfinite(answer.score_b)
    return isinstance(answer, Abstention) or math.isfinite(answer.score)


async def _mark(judge: Judge, a: Episode, task: Task, repeat: int) -> Mark | Abstention:
    if mark := getattr(judge, "mark", None):
        return await mark(a, task, repeat)
    return Abstention(reason="no_mark: the judge only compares")


def _words(answers: Mapping[str, Verdict | Abstention] | Mapping[str, Mark | Abstention]) -> str:
    """What the members wrote, each under its name."""
    raw = {name: getattr(answer, "raw", "") for name, answer in answers.items()}
    return "\n".join(f"[{name}]\n{text}" for name, text in raw.items() if text)


def _together(answers: Mapping[str, Verdict | Abstention] | Mapping[str, Mark | Abstention]) -> Cost:
    """The cost of requests that ran side by side: sums, but the time of the slowest."""
    return {**cost_of(*answers.values()), "seconds": max(answer.seconds for answer in answers.values())}
