"""A language model as grader of checklists, behind any OpenAI-compatible endpoint: many assertions in one request.

The model sees what the tools returned, so that what an answer makes up can be told from what was found (the grader of ARISE's
released code for research sees the answer alone). What it does not answer stays undecided, and so does all that an outage
kept it from: neither is ever a no.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from arenarl.arena import together
from arenarl.endpoint import Endpoint, Outage, open_endpoint
from arenarl.errors import ConfigError
from arenarl.grader_prompt import build_prompt, reminder
from arenarl.judge_prompt import Prompt
from arenarl.judge_reply import MAX_CHARS
from arenarl.judge_rubrics import LANGUAGES, Language
from arenarl.rubric import ChecklistItem
from arenarl.strict_json import Unreadable, read_object
from arenarl.types import Task, Trajectory


class LLMGrader:
    """Says which assertions a trajectory meets.

    Attributes:
        name: of the endpoint.
        counts: items by what became of them, summed up since the grader was built: "asked"; of these "unanswered", for which
            a reply came but held no answer (true, false and "cannot tell" are answers), and "outages", for which none came.
        last_outage: kind and details of the latest outage; empty if there was none.

    Args:
        language: of the prompt: "en" or "zh".
        endpoint: where the model is; None builds an `OpenAIEndpoint` from ``settings``, of which ``base_url`` and ``model`` must
            be there. With ``cache`` the same items of the same trajectory are asked once.
        max_tokens: of a reply. A model that thinks needs room for its thoughts.
        attempts: how often one request is made until its reply can be read. Outages are not asked again: the endpoint has its
            own retries.
        trajectory_chars: characters of the trajectory that the model sees.
        max_items: assertions in one request; more make several, at the same time.
        grade_timeout_s: for all requests of one trajectory. Below the ``verdict_timeout`` of the environment, or an outage
            costs the checklist its other items too.

    Raises:
        ConfigError: an argument is refused.
    """

    def __init__(
        self, *, endpoint: Endpoint | None = None, language: Language = "en", max_tokens: int = 2048, attempts: int = 2,
        trajectory_chars: int = 16_000, max_items: int = 20, grade_timeout_s: float = 50.0, **settings: Any,
    ) -> None:  # fmt: skip
        if language not in LANGUAGES:
            raise ConfigError(f"language={language!r} is refused; use one of {', '.join(LANGUAGES)}")
        least = {"max_tokens": 1, "attempts": 1, "trajectory_chars": 500, "max_items": 1}
        for name, value in zip(least, (max_tokens, attempts, trajectory_chars, max_items), strict=True):
            if type(value) is not int or value < least[name]:
                raise ConfigError(f"{name}={value!r} is refused; give a whole number, at least {least[name]}")
        if type(grade_timeout_s) not in (int, float) or not 0 < grade_timeout_s < math.inf:
            raise ConfigError(f"grade_timeout_s={grade_timeout_s!r} is refused; give a positive number of seconds")
        if endpoint is not None and settings:
            raise ConfigError(f"{next(iter(settings))!r} is a setting of an endpoint, and one is given; set it there")
        self.endpoint = endpoint if endpoint is not None else open_endpoint(settings, "a grader")
        self.name = self.endpoint.name
        self.language, self.max_tokens, self.attempts = language, max_tokens, attempts
        self.trajectory_chars, self.max_items, self.grade_timeout_s = trajectory_chars, max_items, grade_timeout_s
        self.counts: Counter[str] = Counter(asked=0, unanswered=0, outages=0)
        self.last_outage = ""

    async def grade(self, items: Sequence[ChecklistItem], trajectory: Trajectory, task: Task) -> list[bool | None]:
        """One entry for each item; None where the model cannot tell, gave no answer, or could not be reached.

        An assertion about an answer that is not there is not met, whoever reads it: the model is not asked.
        """
        answered = bool((trajectory.answer or "").strip())
        asked = [n for n, item in enumerate(items) if answered or item.scope != "answer"]
        chunks = [asked[start : start + self.max_items] for start in range(0, len(asked), self.max_items)]
        found = await together(self._chunk([items[n] for n in chunk], trajectory, task) for chunk in chunks)
        met: list[bool | None] = [False] * len(items)  # where nothing is asked
        for chunk, results in zip(chunks, found, strict=True):
            for n, result in zip(chunk, results, strict=True):
                met[n] = result
        return met

    def begin_step(self, version: int) -> None:
        self.endpoint.begin_step(version)

    async def aclose(self) -> None:
        await self.endpoint.aclose()

    async def _chunk(self, items: Sequence[ChecklistItem], trajectory: Trajectory, task: Task) -> list[bool | None]:
        prompt = build_prompt(task, items, trajectory, language=self.language, trajectory_chars=self.trajectory_chars)
        self.counts["asked"] += len(items)
        try:
            async with asyncio.timeout(self.grade_timeout_s):
                result = await self._ask(prompt, len(items))
        except TimeoutError:
            result = Outage(kind="timeout", detail=f"no grades within grade_timeout_s={self.grade_timeout_s}")
        if isinstance(result, Outage):
            self.counts["outages"] += len(items)
            self.last_outage = f"{result.kind}: {result.detail}"
            return [None] * len(items)
        self.counts["unanswered"] += len(items) - len(result)
        return [result.get(number) for number in range(1, len(items) + 1)]

    async def _ask(self, prompt: Prompt, count: int) -> dict[int, bool | None] | Outage:
        """Answers by number, none if no reply could be read."""
        messages = prompt.messages()
        for attempt in range(self.attempts):
            reply = await self.endpoint.complete(
                messages, schema=prompt.schema, max_tokens=self.max_tokens, temperature=0.0, seed=attempt
            )
            if isinstance(reply, Outage):
                return reply
            answers = read_grades(reply.text, reply.finish_reason, count)
            if not isinstance(answers, str):
                return answers
            messages = prompt.messages(postscript=reminder(self.language, answers))
        return {}


def read_grades(text: str, finish_reason: str, count: int) -> dict[int, bool | None] | str:
    """The answers that a reply holds, by number of the assertion from 1 to ``count``. Never raises.

    A number that is missing, out of range or given twice, or whose "met" is not true, false or null, has no answer.

    Returns:
        the answers; or, if there is none at all, in a word why: one of `arenarl.judge_reply` and `arenarl.strict_json`, or "no_items".
    """
    if finish_reason == "length":
        return "truncated"
    if len(text) > MAX_CHARS:
        return "too_long"
    try:
        value = read_object(text)
    except Unreadable as reason:
        return reason.kind
    entries = value.get("items") if isinstance(value, dict) else None
    entries = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    times = Counter(entry["number"] for entry in entries if type(entry.get("number")) is int)
    answers: dict[int, bool | None] = {}
    for entry in entries:
        number, met = entry.get("number"), entry.get("met", "missing")
        once = type(number) is int and 1 <= number <= count and times[number] == 1
        if once and (met is None or isinstance(met, bool)):
            answers[number] = met
    return answers or "no_items"
