"""Which requests are new: exact and near duplicates by their words, and what kind of task one is by its tools.

Two requests are compared in two ways: the Jaccard overlap of the pairs of neighbouring words, and that of the facts, which
are numbers and the words that begin with a capital letter inside a sentence of either. Their similarity is the smaller of the two: a
request copied with another city or another budget asks for something new, and so does one about the same facts in other
words. Upper or lower case and punctuation never count. A Chinese or Japanese character is a word.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from itertools import pairwise

from arenarl.errors import ConfigError
from arenarl.expected_tools import ExpectedTool, tools_from_data
from arenarl.types import Task

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\d+(?:[.,:]\d+)*|[^\W\d_\u3040-\u30ff\u3400-\u9fff]+")
_SENTENCE_END = re.compile(r"[.!?:\n。]\W*$")
_CATEGORY_KEYS = frozenset({"category", "kind", "mode", "type"})


@dataclass(frozen=True)
class _Request:
    words: tuple[str, ...]
    pairs: frozenset[tuple[str, ...]]
    facts: frozenset[str]


class Novelty:
    """The requests seen so far, of which the latest ``keep`` count.

    Args:
        threshold: similarity in [0, 1] from which a request is a near duplicate.
        keep: how many are remembered.

    Raises:
        ConfigError: for a threshold outside (0, 1], or keep below 1.
    """

    def __init__(self, threshold: float = 0.8, keep: int = 4096) -> None:
        if not (0 < threshold <= 1 and keep >= 1):
            raise ConfigError(f"threshold={threshold} must be above 0 and at most 1, and keep={keep} at least 1")
        self.threshold, self.keep = threshold, keep
        self._seen: dict[tuple[str, ...], tuple[str, _Request]] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, query: str) -> None:
        """Remember a request; the oldest is forgotten if there are too many."""
        request = _read(query)
        self._seen.pop(request.words, None)
        self._seen[request.words] = query, request
        if len(self._seen) > self.keep:
            del self._seen[next(iter(self._seen))]

    def copy(self) -> Novelty:
        """One that remembers the same, and learns apart."""
        twin = Novelty(self.threshold, self.keep)
        twin._seen = dict(self._seen)
        return twin

    def nearest(self, query: str) -> tuple[float, str] | None:
        """Similarity in [0, 1] and text of the most similar request, the earliest of equals; None if none overlaps.

        Requests of the same words in the same order have similarity 1, whatever their facts.
        """
        request = _read(query)
        if same := self._seen.get(request.words):
            return 1.0, same[0]
        best, nearest = 0.0, ""
        for text, other in self._seen.values():
            # The pairs alone, which are a bound, settle most of them.
            if _jaccard(request.pairs, other.pairs) > best and (similarity := _similarity(request, other)) > best:
                best, nearest = similarity, text
        return (best, nearest) if best else None

    def is_duplicate(self, query: str) -> bool:
        """Whether a request is remembered, or nearly."""
        nearest = self.nearest(query)
        return nearest is not None and nearest[0] >= self.threshold


def _read(query: str) -> _Request:
    text = unicodedata.normalize("NFKC", query)
    words: list[str] = []
    facts: set[str] = set()
    for match in _WORD.finditer(text):
        word = match.group()
        opens = not words or _SENTENCE_END.search(text[max(0, match.start() - 9) : match.start()])
        words.append(word.casefold())
        if word[0].isdigit() or (word[0].isupper() and not opens):
            facts.add(words[-1])
    pairs = pairwise(words) if len(words) > 1 else [tuple(words)]
    return _Request(tuple(words), frozenset(pairs), frozenset(facts))


def _similarity(a: _Request, b: _Request) -> float:
    facts = a.facts | b.facts  # what is one to either is one to both, so that writing a name small is no way out
    return min(_jaccard(a.pairs, b.pairs), _jaccard(facts.intersection(a.words), facts.intersection(b.words)))


def _jaccard(a: frozenset[object], b: frozenset[object]) -> float:
    """|a and b| / |a or b|; two empty sets are the same."""
    shared = len(a & b)
    return shared / (len(a) + len(b) - shared) if a or b else 1.0


def signature(task: Task) -> str:
    """What sort of task one is, for counting how many sorts a pool has: its kind and its expected tools, sorted.

    Of a tool's arguments the names are given, and of a category (also a kind, mode or type) the value:
    ``one_day: poi_search(category=cafe, city) weather(city, day)``.

    Raises:
        ConfigError: if the task's data is malformed.
    """
    tools = sorted(map(_shape, tools_from_data(task.data, task_id=task.task_id)))
    return " ".join([f"{task.kind}:", *tools])


def _shape(tool: ExpectedTool) -> str:
    keys = (f"{key}={value}".casefold() if key in _CATEGORY_KEYS else key for key, value in tool.arguments.items())
    return f"{tool.name}({', '.join(sorted(keys))})"
