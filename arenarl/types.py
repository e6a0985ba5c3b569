"""The values that flow through the library: frozen, plain, picklable, and free of heavy imports.

Shape legend, used in names and docstrings everywhere: B sequences, T tokens, G members of a group, V vocabulary.
A mask says True for tokens that the policy sampled; every other token is context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NotRequired, TypedDict

FLOAT_NOISE = 1e-9
"""Relative difference below which two judged or computed values are the same value."""


class Message(TypedDict):
    """One chat message as the template sees it. ``content`` of an assistant message is its raw text, tool calls included."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call the policy asked for. A malformed call keeps its raw text and carries ``error``; it is never dropped."""

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    raw: str = ""
    error: str | None = None


ToolResultKind = Literal[
    "ok", "tool_error", "invalid_args", "unknown_tool", "parse_error",  # the model's affair, shown to it
    "timeout", "server_dead", "protocol", "too_large", "start_failed",  # ours
]  # fmt: skip

INFRASTRUCTURE_KINDS: frozenset[str] = frozenset({"timeout", "server_dead", "protocol", "too_large", "start_failed"})


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """What came back. ``text`` is what the model reads; ``structured`` is the tool's structured content, if any.

    ``server`` and ``tool`` are the canonical names, whatever name the model used. ``cached`` says that no call was made.
    """

    kind: ToolResultKind
    text: str
    server: str = ""
    tool: str = ""
    structured: Any = None
    truncated: bool = False
    cached: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.kind == "ok"


@dataclass(frozen=True, kw_only=True)
class ToolEvent:
    """A call with its result, in the order in which the policy made them. ``turn`` counts assistant messages from 0."""

    call: ToolCall
    result: ToolResult
    turn: int


@dataclass(frozen=True, kw_only=True)
class Task:
    """One thing to do. ``data`` is plain JSON that the environment's checklist reads; the policy sees only ``prompt``."""

    task_id: str
    kind: str
    prompt: str
    seed: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The readable half of an episode: all that a judge or a checklist may look at.

    ``answer`` is the text of the first assistant message without a tool call, or None if there was none.
    """

    messages: tuple[Message, ...]
    events: tuple[ToolEvent, ...]
    answer: str | None

    @property
    def num_turns(self) -> int:
        return sum(m["role"] == "assistant" for m in self.messages)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """vLLM's names and meanings. ``top_p`` and ``top_k`` are absent: training needs the log-probs of the full distribution."""

    temperature: float = 1.0
    max_tokens: int = 256
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What an engine sampled. The stop token, if one ended the text, is the last id.

    Attributes:
        token_ids: [T] sampled ids.
        logprobs: [T] natural log-probabilities under the distribution that was sampled (after temperature).
        versions: [T] weight version that produced each token.
        num_cached_tokens: prompt tokens that the prefix cache supplied.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: Literal["stop", "length", "abort"]
    num_cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A token-exact stretch of an episode: each turn extends the ids of the one before.

    Attributes:
        token_ids: [T] ids as the engine saw and sampled them, never rebuilt from text.
        mask: [T] True where the policy sampled the token.
        logprobs: [T] engine log-probs where mask is True, 0.0 elsewhere.
        versions: [T] weight version where mask is True, -1 elsewhere.
    """

    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.mask), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise ValueError(f"segment arrays must have one length, got {sorted(lengths)}")

    @property
    def num_sampled(self) -> int:
        return sum(self.mask)


class Outcome(StrEnum):
    """How an episode ended, kept apart up to the advantage. Nothing turns into a default score."""

    SCORED = "scored"  # finished by itself and has a checklist score
    ABSTAINED = "abstained"  # finished, but nobody could score it
    FAILED = "failed"  # the infrastructure failed; never ranked, never trained on
    TRUNCATED = "truncated"  # the policy ran into a limit; ranked with what it has


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One attempt at one task.

    Attributes:
        member: index in the group, 0 first.
        greedy: decoded at temperature 0 (ArenaRL's anchor); ranked, but not trained on.
        detail: kind of the failure or truncation ("timeout", "turns", "length", "context"), empty if scored.
        checklist: item name to how far it is met, in [0, 1] (True and False for a yes or no), or None if undecided.
        score: weighted share of the checklist that was met, in [0, 1]; None if missing.
        reforks: how often the exact-prefix rule forced a new segment.
        timing: seconds by phase: generate, tools, judge.
    """

    episode_id: str
    task: Task
    member: int
    greedy: bool
    segments: tuple[Segment, ...]
    trajectory: Trajectory
    outcome: Outcome
    detail: str = ""
    checklist: Mapping[str, float | None] = field(default_factory=dict)
    score: float | None = None
    reforks: int = 0
    num_cached_tokens: int = 0
    timing: Mapping[str, float] = field(default_factory=dict)

    @property
    def rankable(self) -> bool:
        """Whether it may meet others in a tournament: it ended by itself or at a limit of the policy's making.

        An abstained checklist does not stand in the way: a judge may read what no checklist can score.
        """
        return self.outcome is not Outcome.FAILED

    @property
    def num_sampled(self) -> int:
        return sum(s.num_sampled for s in self.segments)

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.segments)

    @property
    def valid_calls(self) -> tuple[int, int]:
        """(calls that reached a tool with valid arguments, calls attempted)."""
        bad = ("parse_error", "invalid_args", "unknown_tool")
        events = self.trajectory.events
        return sum(e.result.kind not in bad for e in events), len(events)

    def env_steps(self) -> int:
        """RLlib's name: assistant turns."""
        return self.trajectory.num_turns

    def agent_steps(self) -> int:
        return self.env_steps()

    def __len__(self) -> int:
        return self.env_steps()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A judge's marks for the two sides of one comparison, on any common scale; only the difference is used.

    Attributes:
        dimensions: mark of each side by dimension of the judge's rubric, ``name: (a, b)``; empty for a judge without.
        raw: what the judge wrote, comments included.
        judge: name of the judge.
        calls: requests that were sent for it; 0 if the verdict came from a cache.
        prompt_tokens, completion_tokens: of these requests.
        seconds: from the first request to the verdict, waits and retries included.
    """

    score_a: float
    score_b: float
    dimensions: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    raw: str = ""
    judge: str = ""
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    @property
    def margin(self) -> float:
        """`margin_of` the two scores."""
        return margin_of(self.score_a, self.score_b)


def margin_of(a: float, b: float) -> float:
    """a minus b, exactly 0.0, which is a tie, if they differ by float noise only."""
    return 0.0 if math.isclose(a, b, rel_tol=FLOAT_NOISE) else a - b


@dataclass(frozen=True, kw_only=True)
class Abstention:
    """A comparison that did not happen, and why. It removes a game; it never adds points.

    Attributes:
        reason: a short kind first ("timeout", "budget", "out_of_range", "no_json" ...), then a colon and the details.
        raw, judge, calls, prompt_tokens, completion_tokens, seconds: as in `Verdict`; a bad answer was paid for too.
    """

    reason: str
    raw: str = ""
    judge: str = ""
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        return self.reason.partition(":")[0]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A judge's mark for one attempt alone, on the judge's scale: what pointwise algorithms train on."""

    score: float
    judge: str = ""
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Game:
    """One comparison as played: player i on side a, player j on side b.

    Attributes:
        result: the verdict, i's marks first. Of a game that was asked in both orders it is the sum of the two answers, and an
            abstention if either half is one.
        halves: of a game asked in both orders the two answers as they were given: i on side a in the first, j on side a in
            the second. Empty otherwise.
    """

    i: int
    j: int
    round: int
    result: Verdict | Abstention
    halves: tuple[Verdict | Abstention, ...] = ()
    seconds: float = 0.0

    @property
    def margin(self) -> float | None:
        """`margin_of` the scores of i and j; None if the judge abstained."""
        return self.result.margin if isinstance(self.result, Verdict) else None

    @property
    def answers(self) -> tuple[Verdict | Abstention, ...]:
        """What the judge gave, one entry for each time that it was asked."""
        return self.halves or (self.result,)


@dataclass(frozen=True, kw_only=True)
class Standings:
    """What a tournament made of its games, by member of the group [G]. None: no information, or not among the players.

    Attributes:
        orders: how often each pair was asked: 1, or 2 for both orders.
        scores: the estimator's, higher is better, in its own unit.
        stderr: standard errors of the scores, in the same unit.
        ranks: 0 is best; ties share the mean of their places. Members that were gated to the last place have theirs.
        gated: why a member did not play ("no_answer", "truncated", "invalid_calls", "failed" ...); empty for players.
    """

    topology: str
    estimator: str
    orders: int
    seed: int
    scores: tuple[float | None, ...]
    stderr: tuple[float | None, ...]
    ranks: tuple[float | None, ...]
    gated: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A private note for attempts at one task. It stands at the end of the system prompt or of the first user message.

    It enters the context as token ids, behind the content of that message; whatever else the policy sees is untouched.
    """

    text: str
    place: Literal["system", "user"] = "system"


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What a coach made of a group, and how much it helped: the ground of a distillation (RG-SED, arXiv 2609.01058).

    Attributes:
        memory: the coach's note.
        memory_ids: its token ids as the conditioned attempts saw them.
        splice: how many tokens of the prompt stand before the note.
        episodes: the attempts that saw the note. They are never trained on and are in no baseline.
        rewards: of these attempts, on the scale of the group's own rewards; None where missing.
        gap: mean reward with the note minus mean reward without it; None if either mean is missing.
        stderr: standard error of the gap; None if it cannot be estimated.
        outage: why there is no note, or nothing to measure it with; empty if the lesson is whole.
    """

    memory: Memory | None = None
    memory_ids: tuple[int, ...] = ()
    splice: int = 0
    episodes: tuple[Episode, ...] = ()
    rewards: tuple[float | None, ...] = ()
    gap: float | None = None
    stderr: float | None = None
    outage: str = ""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What became of an attempt to write a task (ARISE, arXiv 2609.01058, the Generator).

    Attributes:
        task: the task, ready to be played; None if what was written is none.
        refusal: why it earns nothing ("bad_json", "ungrounded", "duplicate" ...: the kind, a colon, details); empty if valid.
        successes: solver runs that met all of it; None if it was not solved (not valid, or the solver was not available).
        runs: solver runs that ended with a verdict.
        outage: why ``successes`` is missing though the task is valid.
    """

    task: Task | None = None
    refusal: str = ""
    successes: int | None = None
    runs: int = 0
    outage: str = ""

    @property
    def pass_rate(self) -> float | None:
        return None if self.successes is None or not self.runs else self.successes / self.runs


@dataclass(frozen=True, kw_only=True)
class EpisodeGroup:
    """Attempts at one task, with what the scorer made of them.

    Attributes:
        rewards: [G] None where an episode has no reward (failed, abstained, or all its games were lost to outages).
        advantages: [G] None exactly where the episode is not trained on.
        games: the record of the tournament, empty for algorithms without one. Indices are members.
        standings: what the tournament made of them; None for algorithms without one.
        marks: [G, K] what a judge gave each attempt alone; empty for algorithms that do not ask for it.
        generated: [G] the tasks that the attempts wrote; empty for algorithms that do not write tasks.
        lesson: what a coach made of the group; None without distillation.
        version: weight version when the group was admitted.
    """

    group_id: str
    task: Task
    episodes: tuple[Episode, ...]
    version: int
    rewards: tuple[float | None, ...] = ()
    advantages: tuple[float | None, ...] = ()
    games: tuple[Game, ...] = ()
    standings: Standings | None = None
    marks: tuple[tuple[Mark | Abstention, ...], ...] = ()
    generated: tuple[Generated, ...] = ()
    lesson: Lesson | None = None
    seconds: float = 0.0

    @property
    def flat(self) -> bool:
        """True if the group carries no signal: no advantage differs from zero."""
        return not any(a for a in self.advantages)
