"""What the tests of judges share: attempts, and replies of a model that judges them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arenarl.endpoint import OpenAIEndpoint, Outage, Reply
from arenarl.judge_rubrics import RUBRICS, Rubric
from arenarl.scoring import Services
from arenarl.types import Episode, Message, Outcome, Task, ToolCall, ToolEvent, ToolResult, Trajectory

TRAVEL, RESEARCH = RUBRICS["travel"]["en"], RUBRICS["research"]["en"]
TASK = Task(task_id="t", kind="search", prompt="Find the best rated cafe in Oslo.")
# By hand: A 0.6 * 7 + 0.4 * 6 = 6.6, B 0.6 * 4 + 0.4 * 9.5 = 6.2.
A_MARKS, B_MARKS = (8, 6, 7, 9, 5, 6, 4), (3, 3, 6, 10, 10, 9, 9)


def call(
    name: str, arguments: Mapping[str, Any], text: str, *, kind: str = "ok", turn: int = 0, raw: str = "", error: str | None = None
) -> ToolEvent:  # fmt: skip
    asked = ToolCall(id=f"call_{turn}", name=name, arguments=arguments, raw=raw, error=error)
    return ToolEvent(call=asked, result=ToolResult(kind=kind, text=text), turn=turn)


@dataclass
class Script:
    """An endpoint that gives these answers in turn, and keeps what it was asked."""

    answers: list[Reply | Outage]
    name: str = "scripted"
    asked: list[dict[str, Any]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    async def complete(self, messages: Sequence[Mapping[str, str]], **options: Any) -> Reply | Outage:
        self.asked.append({"messages": list(messages), **options})
        return self.answers[len(self.asked) - 1]

    def begin_step(self, version: int) -> None:
        self.steps.append(version)

    async def aclose(self) -> None:
        self.name = "closed"


def judged_by(judge: Any, **services: Any) -> Services:
    """The services of a worker with this judge; what a test does not name is not there."""
    return Services(**{"judge": judge, "play": None, "taskset": None, "renderer": None} | services)


def attempt(
    name: str, answer: str | None = "cafe: Lotus 12 usd", *events: ToolEvent, said: Sequence[str] = (), detail: str = ""
) -> Episode:
    """An episode whose turns said ``said`` and then the answer."""
    texts = [*said, *([] if answer is None else [answer])]
    messages = tuple(Message(role="assistant", content=text) for text in texts)
    return Episode(
        episode_id=name, task=TASK, member=0, greedy=False, segments=(), detail=detail,
        trajectory=Trajectory(messages=messages, events=events, answer=answer),
        outcome=Outcome.TRUNCATED if detail else Outcome.SCORED,
    )  # fmt: skip


async def ask(endpoint: OpenAIEndpoint, text: str = "Which is better?", **options: Any) -> Reply | Outage:
    return await endpoint.complete([{"role": "user", "content": text}], **{"max_tokens": 50, **options})


def kind(result: Reply | Outage) -> str:
    return result.kind if isinstance(result, Outage) else result.finish_reason


def reply_value(rubric: Rubric = TRAVEL, *sides: Sequence[Any]) -> dict[str, Any]:
    """A reply in the asked form with these marks, in the order of the rubric, for side A and, if given, side B."""
    value: dict[str, Any] = {}
    marks = [dict(zip(rubric.dimensions, side, strict=True)) for side in sides or (A_MARKS, B_MARKS)]
    for part in rubric.parts:
        value[part.name] = {
            "comments": {side: "fine" for side, _ in zip("AB", marks, strict=False)},
            "marks": {
                side: {name: row[f"{part.name}/{name}"] for name in part.dimensions}
                for side, row in zip("AB", marks, strict=False)
            },
        }
    return value


def reply_text(rubric: Rubric = TRAVEL, *sides: Sequence[Any]) -> str:
    return json.dumps(reply_value(rubric, *sides))
