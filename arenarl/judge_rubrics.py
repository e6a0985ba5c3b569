"""What a model judge marks: rubrics of two levels, parts with weights and dimensions with a text, in English and Chinese.

The dimensions and weights of `travel` and `research` are ArenaRL's (arXiv 2601.06487, judge prompts of the released
code); the texts are our own. Two things differ from that code: marks are added up here and never by the model, and a
judge that sees what the tools returned is told to check the answer against it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from arenarl.errors import ConfigError

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)

SCALE = 10.0
"""Marks are numbers from 0 to this."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One side of an attempt that is marked, such as its path or its answer.

    Attributes:
        name: letters, digits and underscores; a key of the reply.
        weight: share of the score, in (0, 1].
        text: what the judge must know about this part.
        dimensions: what is marked, ``name: text``. All count alike.
    """

    name: str
    weight: float
    text: str
    dimensions: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Rubric:
    """What an attempt is marked on.

    Raises:
        ConfigError: a name cannot be a key, is given twice, or the weights do not add up to 1.
    """

    name: str
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        names = [name for part in self.parts for name in (part.name, *part.dimensions)]
        if bad := [name for name in names if not _NAME.fullmatch(name)]:
            raise ConfigError(f"rubric {self.name!r}: {bad[0]!r} is no name; use letters, digits and underscores")
        if len({part.name for part in self.parts}) < len(self.parts):
            raise ConfigError(f"rubric {self.name!r} names a part twice; give each part a name of its own")
        if empty := [part.name for part in self.parts if not part.dimensions]:
            raise ConfigError(f"rubric {self.name!r}: part {empty[0]!r} has no dimensions; give it at least one")
        weights = [part.weight for part in self.parts]
        if not all(weight > 0 for weight in weights) or not math.isclose(sum(weights), 1.0, abs_tol=1e-6):
            raise ConfigError(f"rubric {self.name!r}: weights {weights} must be positive and add up to 1")

    @property
    def dimensions(self) -> tuple[str, ...]:
        """All that is marked, as "part/dimension"."""
        return tuple(f"{part.name}/{name}" for part in self.parts for name in part.dimensions)

    def score(self, marks: Mapping[str, float]) -> float:
        """The weighted sum over parts of the mean mark of the part, in [0, `SCALE`].

        Args:
            marks: a mark for each of `dimensions`.
        """
        means = (
            part.weight * math.fsum(marks[f"{part.name}/{name}"] for name in part.dimensions) / len(part.dimensions)
            for part in self.parts
        )
        return math.fsum(means)


def load_rubric(rubric: str | Path | Rubric, language: Language = "en") -> Rubric:
    """The rubric itself, the one of `RUBRICS` by that name, or the one that a JSON file holds.

    A file looks like ``{"name": "tidy", "parts": [{"name": "answer", "weight": 1, "text": "...", "dimensions":
    {"order": "..."}}]}``.

    Raises:
        ConfigError: no such rubric, file or language, or a file that holds something else.
    """
    if language not in LANGUAGES:
        raise ConfigError(f"language={language!r} is unknown; use one of {', '.join(LANGUAGES)}")
    if isinstance(rubric, Rubric):
        return rubric
    if str(rubric) in RUBRICS:
        return RUBRICS[str(rubric)][language]
    if Path(rubric).suffix != ".json":
        raise ConfigError(f"rubric={str(rubric)!r} is unknown; use one of {', '.join(RUBRICS)}, or a .json file")
    try:
        return _from_json(json.loads(Path(rubric).read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"rubric file {str(rubric)!r} cannot be read: {error.strerror}; check the path") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"rubric file {str(rubric)!r} is no rubric: {error!r}; see load_rubric") from error


def _from_json(value: Mapping[str, object]) -> Rubric:
    parts = value["parts"]
    if not isinstance(parts, Sequence) or set(value) - {"name", "parts"}:
        raise ValueError("a rubric has a name and a list of parts, and nothing else")
    return Rubric(name=str(value["name"]), parts=tuple(_part(**part) for part in parts))


def _part(*, name: str, weight: float, text: str, dimensions: Mapping[str, str]) -> Part:
    return Part(name=name, weight=float(weight), text=str(text), dimensions={k: str(v) for k, v in dimensions.items()})


_GROUNDS_EN = "A name, number or statement that no observation supports counts as invented."
_GROUNDS_ZH = "没有任何观察结果支持的名称、数字或说法一律视为编造。"

_TRAVEL_EN = Rubric(
    name="travel",
    parts=(
        Part(
            name="path",
            weight=0.6,
            text="Mark the tool calls alone. Take no account of what the analysis says about them.",
            dimensions={
                "breadth": "The calls gather every kind of fact that the request needs (places, routes, tickets, "
                "weather, events), and leave none out.",
                "relevance": "Each call asks about the places, days and wishes of this request. Calls that failed, "
                "were made twice or serve nothing count against it.",
                "detail": "The calls go deep enough to settle the choice: exact arguments, options to compare, a "
                "further call where a result left a gap.",
            },
        ),
        Part(
            name="answer",
            weight=0.4,
            text=f"Mark the final answer, and check it against the observations. {_GROUNDS_EN}",
            dimensions={
                "relevance": "It settles all that was asked, within the limits that were set, such as budget, day and wish.",
                "feasibility": "The traveller could act on it as it stands: times, order, distances and prices are "
                "true and fit together.",
                "details": "It gives the facts that acting on it takes: names, prices, times, how to get there.",
                "clarity": "It is well ordered and easy to read, without repetition or filler. Length alone earns nothing.",
            },
        ),
    ),
)

_TRAVEL_ZH = Rubric(
    name="travel",
    parts=(
        Part(
            name="path",
            weight=0.6,
            text="只评工具调用本身，不考虑分析文字中的说法。",
            dimensions={
                "breadth": "广度：调用覆盖了请求所需的各类信息（地点、路线、票务、天气、活动），没有遗漏。",
                "relevance": "相关性：每次调用都针对本请求的地点、日期和愿望；失败、重复或无用的调用应扣分。",
                "detail": "深度：调用足够深入，能够支持选择：参数准确，有可比较的选项，结果不足时继续查询。",
            },
        ),
        Part(
            name="answer",
            weight=0.4,
            text=f"评最终答案，并与观察结果核对。{_GROUNDS_ZH}",
            dimensions={
                "relevance": "相关性：完整回答所提的问题，并遵守预算、日期、愿望等限制。",
                "feasibility": "可行性：旅行者可以直接照做；时间、顺序、距离和价格真实且互相吻合。",
                "details": "细节：给出照做所需的具体信息：名称、价格、时间、到达方式。",
                "clarity": "清晰度：条理清楚，易读，没有重复和空话；篇幅长本身不加分。",
            },
        ),
    ),
)

_RESEARCH_EN = Rubric(
    name="research",
    parts=(
        Part(
            name="path",
            weight=0.5,
            text="Mark how the work was done: the plan that the steps show, and the calls.",
            dimensions={
                "framework": "The steps follow a plan that splits the question into sensible parts, and the plan "
                "changes when a finding asks for it.",
                "tool_usage": "The right tool with an exact query each time; failures are mended; no call is wasted.",
                "coverage": "The calls reach every important side of the question, and more than one source for what matters.",
            },
        ),
        Part(
            name="answer",
            weight=0.5,
            text=f"Mark the final answer, and check it against the observations. {_GROUNDS_EN}",
            dimensions={
                "relevance": "It answers the question that was asked, all of it, in the form that was asked for.",
                "accuracy": "Its statements agree with the observations and with each other, and it says what remains uncertain.",
                "depth": "It explains causes, weighs evidence and draws conclusions, where a weaker answer only lists.",
                "clarity": "It is well ordered and easy to read, without repetition or filler. Length alone earns nothing.",
            },
        ),
    ),
)

_RESEARCH_ZH = Rubric(
    name="research",
    parts=(
        Part(
            name="path",
            weight=0.5,
            text="评研究过程：各步骤体现的计划，以及工具调用。",
            dimensions={
                "framework": "框架：步骤遵循一个把问题合理拆分的计划，并根据发现及时调整。",
                "tool_usage": "工具使用：每次选对工具，查询准确；失败后有补救；没有浪费的调用。",
                "coverage": "覆盖面：调用涉及问题的所有重要方面，关键之处有不止一个来源。",
            },
        ),
        Part(
            name="answer",
            weight=0.5,
            text=f"评最终答案，并与观察结果核对。{_GROUNDS_ZH}",
            dimensions={
                "relevance": "相关性：完整回答所提的问题，并采用要求的形式。",
                "accuracy": "准确性：说法与观察结果一致、前后一致，并说明仍不确定之处。",
                "depth": "深度：解释原因、权衡证据、得出结论，而不只是罗列。",
                "clarity": "清晰度：条理清楚，易读，没有重复和空话；篇幅长本身不加分。",
            },
        ),
    ),
)

RUBRICS: Mapping[str, Mapping[Language, Rubric]] = {
    "travel": {"en": _TRAVEL_EN, "zh": _TRAVEL_ZH},
    "research": {"en": _RESEARCH_EN, "zh": _RESEARCH_ZH},
}
