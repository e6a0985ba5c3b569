"""Coaches: a private note from what a group of attempts met and missed (RG-SED, arXiv 2609.01058).

A coach sees the rubric, and its note goes to the policy whose distribution is distilled: what it may pass on is how to do
the task, not how it is scored. So a note may not quote the rubric. It holds for its group alone; there is no store.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Protocol, get_args

from arenarl.coach_prompt import MAX_WORDS, QUOTE_WORDS, Role, coach_messages
from arenarl.endpoint import Endpoint, Outage, Reply, open_endpoint
from arenarl.endpoint_budget import check_positive
from arenarl.errors import ConfigError
from arenarl.jsonl import clean_json
from arenarl.llm_judge import cost_of
from arenarl.rubric import ChecklistItem
from arenarl.types import Episode, EpisodeGroup

TOO_HARD, TOO_EASY = 0.4, 0.6  # pass rates below and above which the difficulty of written tasks is off
_CJK = re.compile("([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")


class Coach(Protocol):
    """Writes a note for further attempts at a group's task.

    It may also have ``begin_step(version)`` and ``async aclose()``, as a judge has.
    """

    async def advise(self, group: EpisodeGroup, items: Sequence[ChecklistItem]) -> str | Outage:
        """The note, as it is spliced into the prompt; empty if there is nothing to say; or why there is none.

        Args:
            group: has rewards, and its attempts their checklists; `EpisodeGroup.generated` is there if they wrote tasks.
            items: the rubric of the attempts. The note does not quote it.
        """
        ...


class RuleCoach:
    """Sentences for what was missed: deterministic, free, and as good as its rules.

    A fault is a `missed` item, or the refusal of a task that was written. It takes the first rule that it
    matches; the sentences of the faults that most attempts have are the note.

    Args:
        rules: sentence by regular expression, which is searched in the name and the text of a missed item and in a refusal.
        easier, harder: added if the written tasks have a mean pass rate below 0.4, or above 0.6.
        prefix: stands before the sentences. The note follows a message directly: begin with a newline.
        limit: sentences for faults, at most.

    Raises:
        ConfigError: a pattern is no regular expression, or the limit is not positive.
    """

    def __init__(
        self, rules: Mapping[str, str], *, easier: str = "", harder: str = "", prefix: str = "\nAdvice: ", limit: int = 3
    ) -> None:  # fmt: skip
        check_positive(int, limit=limit)
        try:
            self._rules = [(re.compile(pattern), sentence) for pattern, sentence in rules.items()]
        except re.error as error:
            raise ConfigError(f"the rule {error.pattern!r} is no regular expression: {error}") from error
        self._easier, self._harder, self._prefix, self._limit = easier, harder, prefix, limit

    async def advise(self, group: EpisodeGroup, items: Sequence[ChecklistItem]) -> str | Outage:
        attempts: Counter[str] = Counter()
        for member, episode in enumerate(group.episodes):
            faults = [f"{item.name}\n{item.text}" for item in missed(episode, items)]
            if group.generated and (refusal := group.generated[member].refusal):
                faults.append(refusal)
            attempts.update({sentence for fault in faults if (sentence := self._sentence(fault))})
        order = list(dict.fromkeys(sentence for _, sentence in self._rules))
        common = sorted(attempts, key=lambda sentence: (-attempts[sentence], order.index(sentence)))
        note = " ".join(filter(None, [*common[: self._limit], self._difficulty(group)]))
        return f"{self._prefix}{note}" if note else ""

    def _sentence(self, fault: str) -> str:
        return next((sentence for pattern, sentence in self._rules if pattern.search(fault)), "")

    def _difficulty(self, group: EpisodeGroup) -> str:
        rates = [rate for written in group.generated if (rate := written.pass_rate) is not None]
        if not rates or TOO_HARD <= fmean(rates) <= TOO_EASY:
            return ""
        return self._easier if fmean(rates) < TOO_HARD else self._harder


class LLMCoach:
    """A language model that reads the attempts and the rubric (arXiv 2609.01058: temperature 0.7, 500 tokens, 300 words).

    A note that is cut, empty, too long, or quotes the rubric is asked for again, with the reason; after that it is an outage
    of kind "protocol". Where nothing was missed there is no note, and the model is not asked.

    Attributes:
        name: of the endpoint.
        counts: notes that were "asked" for, the replies among them that were "refused", and "outages", those that end in
            refusals included.

    Args:
        endpoint: where the model is; None builds an `OpenAIEndpoint` from ``settings``, of which ``base_url`` and ``model``
            must be there. For sound figures it is not the model that judges the evaluation.
        role: whom it coaches: a "solver" of tasks, or a "generator" that writes them.
        max_tokens: of a reply. A model that thinks needs room for its thoughts.
        attempts: how often it is asked for a note that can be used. Outages are not asked again.
        attempt_chars: characters of each attempt that it sees.
        prefix: stands before the note. The note follows a message directly: begin with a newline.

    Raises:
        ConfigError: an argument is refused.
    """

    def __init__(
        self, *, endpoint: Endpoint | None = None, role: Role = "solver", temperature: float = 0.7,
        max_tokens: int = 500, attempts: int = 2, attempt_chars: int = 3000, prefix: str = "\n\nAdvice: ", **settings: Any,
    ) -> None:  # fmt: skip
        check_positive(int, max_tokens=max_tokens, attempts=attempts, attempt_chars=attempt_chars)
        if role not in get_args(Role):
            raise ConfigError(f"role={role!r} is refused; a coach is there for the 'solver' or the 'generator'")
        if type(temperature) not in (int, float) or not 0 <= temperature < math.inf:
            raise ConfigError(f"temperature={temperature!r} is refused; give 0 or more")
        if endpoint is not None and settings:
            raise ConfigError(f"{next(iter(settings))!r} is a setting of an endpoint, and one is given; set it there")
        self.endpoint = endpoint if endpoint is not None else open_endpoint(settings, "a coach")
        self.name, self.counts = self.endpoint.name, Counter[str](asked=0, refused=0, outages=0)
        self.role, self.temperature, self.max_tokens = role, temperature, max_tokens
        self.attempts, self.attempt_chars, self.prefix = attempts, attempt_chars, prefix

    async def advise(self, group: EpisodeGroup, items: Sequence[ChecklistItem]) -> str | Outage:
        if not self._worth_asking(group, items):
            return ""
        self.counts["asked"] += 1
        replies: list[Reply | Outage] = []
        refused = ""
        while len(replies) < self.attempts:
            reply = await self.endpoint.complete(
                coach_messages(group, items, self.role, self.attempt_chars, refused.partition(":")[0]),
                max_tokens=self.max_tokens, temperature=self.temperature, seed=len(replies),
            )  # fmt: skip
            replies.append(reply)
            if isinstance(reply, Outage):
                self.counts["outages"] += 1
                return replace(reply, **cost_of(*replies))
            note = _said(reply.text)
            refused = refusal(note, items, whole=reply.finish_reason == "stop")
            if not refused:
                return f"{self.prefix}{note}"
            self.counts["refused"] += 1
        self.counts["outages"] += 1
        return Outage(kind="protocol", detail=f"no note that can be used: {refused}", **cost_of(*replies))

    def begin_step(self, version: int) -> None:
        self.endpoint.begin_step(version)

    async def aclose(self) -> None:
        await self.endpoint.aclose()

    def _worth_asking(self, group: EpisodeGroup, items: Sequence[ChecklistItem]) -> bool:
        """Whether there is something to learn: a reward, and a fault or a task whose difficulty may be off."""
        scored = [e for e, reward in zip(group.episodes, group.rewards, strict=False) if reward is not None]
        return bool(scored) and (self.role == "generator" or not items or any(missed(e, items) for e in scored))


def missed(episode: Episode, items: Sequence[ChecklistItem]) -> list[ChecklistItem]:
    """The items that cost the attempt something: not wholly met, or, if the weight is negative, not wholly absent.

    Those that are undecided are not among them.
    """
    values = ((item, episode.checklist.get(item.name)) for item in items)
    return [item for item, value in values if value is not None and value != (item.weight > 0)]


def refusal(note: str, items: Sequence[ChecklistItem], *, whole: bool = True) -> str:
    """Why a note may not be used: the kind, a colon, details; empty if it may.

    Args:
        whole: the model ended it by itself.
    """
    if not whole:
        return f"cut: the reply reached its length after {len(note)} characters"
    if not (count := len(words(note))):
        return "empty: it has no words"
    if count > MAX_WORDS:
        return f"too long: {count} words, and at most {MAX_WORDS} are allowed"
    if quote := quotes(note, items):
        return f"a quote of the rubric: {quote!r}"
    return ""


def quotes(note: str, items: Sequence[ChecklistItem]) -> str | None:
    """The words, without case and punctuation, that the note takes from an item's text; None if it quotes none.

    A quote is a run of six words of an item, or the whole of an item of three to five.
    """
    said = f" {' '.join(words(note))} "
    for item in items:
        text = words(item.text)
        length = min(len(text), QUOTE_WORDS)
        if length < 3:
            continue
        for start in range(len(text) - length + 1):
            run = " ".join(text[start : start + length])
            if f" {run} " in said:
                return run
    return None


def words(text: str) -> list[str]:
    """Words as a reader counts them: no case, no punctuation, nothing unseen; a Chinese or Japanese character is one."""
    text = _CJK.sub(r" \1 ", unicodedata.normalize("NFKC", text).casefold())
    kinds = ((c, unicodedata.category(c)) for c in text)
    return "".join(c if kind[0] in "LMN" else "" if kind == "Cf" else " " for c, kind in kinds).split()


def _said(text: str) -> str:
    """The reply without a thought before it. The chat template may have opened the thought."""
    return clean_json(text).rpartition("</think>")[2].strip()
