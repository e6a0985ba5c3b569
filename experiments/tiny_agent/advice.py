"""The advice that the warm-started agent understands: what a sentence is against, and when a coach should say it.

A demonstrator that was given a sentence does not make the slips it names. So the agent that imitates it has learnt to
follow a note, which distillation from a note needs (RG-SED, ARISE-RL, arXiv 2609.01058, section on self-distillation).
The rules are those of `arenarl.coach.RuleCoach`: a pattern on the name or text of an item that was missed, and the sentence.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

PREFIX = "\nAdvice: "
EASIER = "Make it easier."
HARDER = "Make it harder."

SOLVER: Mapping[str, tuple[str, ...]] = {
    "Call every tool needed.": ("skip", "invent"),
    "Compare all rows.": ("careless",),
    "Copy prices exactly.": ("misquote",),
    "Answer every line.": ("forget",),
    "Call each tool once.": ("repeat",),
    "Write valid calls.": ("malformed",),
}
"""Sentence to the slips (`demonstrations.Slips`) that it rules out."""

GENERATOR: Mapping[str, tuple[str, ...]] = {
    "Write valid JSON.": ("broken",),
    "Write more items.": ("few",),
    "Quote rows exactly.": ("misquote", "misnumber", "idle"),
    "Name the tools called.": ("unmatched", "forgotten"),
}
"""Sentence to the slips (`generator_demonstrations.WritingSlips`) that it rules out."""

SOLVER_RULES: Mapping[str, str] = {
    r"^called:|^tool\d+:|was called": "Call every tool needed.",
    r"^(best|cheap|fast):|^(choice|budget)\b|The total|takes the|The way is| is (not )?[A-Z]": "Compare all rows.",
    r"^grounded:| costs | celsius": "Copy prices exactly.",
    r"^complete\b|names a": "Answer every line.",
    r"^no_waste\b": "Call each tool once.",
    r"^valid_calls\b": "Write valid calls.",
}
"""Items of the travel environment's checklist, and assertions about a travel answer."""

GENERATOR_RULES: Mapping[str, str] = {
    r"^(json|no_answer|no_json|bad_json|extra_text|no_query)\b": "Write valid JSON.",
    r"^items\b": "Write more items.",
    r"^(grounded|ungrounded|no_observation)\b": "Quote rows exactly.",
    r"^(tools|unmatched_tool|missing_tool)\b": "Name the tools called.",
}
"""Items of `arenarl.generated.generator_checklist`, and the kinds of its refusals and of `TravelGenerator.refuse`."""


def note(sentences: Iterable[str]) -> str:
    """The text that is put behind a prompt."""
    return PREFIX + " ".join(sentences)


def draw(advice: Mapping[str, tuple[str, ...]], rng: random.Random, least: int = 1) -> list[str]:
    """``least`` to three sentences in random order."""
    return rng.sample(list(advice), rng.randint(least, 3))


def ruled_out(advice: Mapping[str, tuple[str, ...]], sentences: Iterable[str]) -> dict[str, float]:
    """Slips that the sentences rule out, each with probability 0: what to replace in a dataclass of slips."""
    return {slip: 0.0 for sentence in sentences for slip in advice.get(sentence, ())}
