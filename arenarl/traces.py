"""An episode as an MLflow trace: a span per model turn, tool call and judge game."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from arenarl.jsonl import dumps, plain
from arenarl.types import Abstention, Episode, EpisodeGroup, Mark, Outcome, Verdict

if TYPE_CHECKING:
    from mlflow.entities import Span, TraceInfo


@dataclass(frozen=True, kw_only=True)
class SpanRecord:
    """One bar of a trace. ``parent`` indexes the list it is in (None for the root); times are seconds since the start."""

    name: str
    kind: Literal["AGENT", "CHAT_MODEL", "TOOL", "CHAIN", "EVALUATOR"]
    parent: int | None
    start: float
    end: float
    inputs: Any
    outputs: Any
    error: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EpisodeTrace:
    """What a trace is made from. ``ended_ns`` is the time at which the last span ends, in ns of the Unix epoch."""

    episode: Episode
    group: EpisodeGroup
    reward: float | None
    advantage: float | None
    step: int
    ended_ns: int

    @property
    def title(self) -> str:
        greedy = " (greedy)" if self.episode.greedy else ""
        return f"{self.episode.task.task_id}, member {self.episode.member}{greedy}"


def episode_spans(trace: EpisodeTrace) -> list[SpanRecord]:
    """The root, a span per model turn and tool call, and a tournament with a span per game that the member played.

    Only coarse times are known, so the spans follow each other; the time to generate is shared out by length of text.
    """
    episode = trace.episode
    spans = _turn_spans(episode)
    spans += _game_spans(episode, trace.group, start=spans[-1].end if spans else 0.0, index=len(spans) + 1)
    root = SpanRecord(
        name=trace.title,
        kind="AGENT",
        parent=None,
        start=0.0,
        end=max((s.end for s in spans), default=0.0),
        inputs={"task": episode.task.prompt},
        outputs={
            "answer": episode.trajectory.answer,
            "result": {
                "outcome": str(episode.outcome),
                "detail": episode.detail,
                "score": episode.score,
                "reward": trace.reward,
                "advantage": trace.advantage,
            },
            "checklist": episode.checklist,
        },
        error=episode.detail if episode.outcome is Outcome.FAILED else "",
        attributes={
            "sampled_tokens": episode.num_sampled,
            "segments": len(episode.segments),
            "reforks": episode.reforks,
        },
    )
    return [root, *spans]


def _turn_spans(episode: Episode) -> list[SpanRecord]:
    messages, clock = episode.trajectory.messages, 0.0
    turns = [k for k, m in enumerate(messages) if m["role"] == "assistant"]
    letters = sum(len(messages[k]["content"]) for k in turns)
    spans: list[SpanRecord] = []

    def add(name: str, kind: Literal["CHAT_MODEL", "TOOL"], seconds: float, **what: Any) -> None:
        nonlocal clock
        spans.append(SpanRecord(name=name, kind=kind, parent=0, start=clock, end=clock + seconds, **what))
        clock += seconds

    for turn, k in enumerate(turns):
        share = len(messages[k]["content"]) / letters if letters else 1 / len(turns)
        asked, said = {"messages": messages[:k]}, {"choices": [{"message": messages[k]}]}
        add(f"turn {turn}", "CHAT_MODEL", share * episode.timing.get("generate", 0.0), inputs=asked, outputs=said)
        for event in (e for e in episode.trajectory.events if e.turn == turn):
            call, result = event.call, event.result
            add(
                call.name or "malformed call",
                "TOOL",
                result.seconds,
                inputs={"raw": call.raw, "error": call.error} if call.error else call.arguments,
                outputs={"text": result.text, "structured": result.structured} if result.structured else result.text,
                error="" if result.ok else f"{result.kind}: {result.text}",
                attributes={"server": result.server, "truncated": result.truncated},
            )
    return spans


def _game_spans(episode: Episode, group: EpisodeGroup, *, start: float, index: int) -> list[SpanRecord]:
    """The tournament, which will be at ``index`` of the whole list, and below it the games of the episode."""
    answers = {e.member: e.trajectory.answer for e in group.episodes}
    games, clock, won = [], start, {"won": 0, "tied": 0, "lost": 0, "no verdict": 0}
    for game in group.games:
        if episode.member not in (game.i, game.j):
            continue
        margin = game.margin
        if margin is None:
            result = "no verdict"
        else:
            margin = margin if episode.member == game.i else -margin
            result = "won" if margin > 0 else "lost" if margin < 0 else "tied"
        won[result] += 1
        games.append(
            SpanRecord(
                name=f"round {game.round}: {game.i} vs {game.j}",
                kind="EVALUATOR",
                parent=index,
                start=clock,
                end=clock + game.seconds,
                inputs={f"a: member {game.i}": answers.get(game.i), f"b: member {game.j}": answers.get(game.j)},
                outputs={**lean(game.result), f"member {episode.member}": result},
                error=game.result.reason if isinstance(game.result, Abstention) else "",
            )
        )
        clock += game.seconds
    if not games:
        return []
    players = {"member": episode.member, "group": group.group_id, "size": len(group.episodes)}
    name, count = "tournament", {"games": len(games), **won}
    return [
        SpanRecord(name=name, kind="CHAIN", parent=0, start=start, end=clock, inputs=players, outputs=count),
        *games,
    ]


def lean(answer: Verdict | Abstention | Mark) -> dict[str, Any]:
    """A judge's answer without its empty fields; a score of 0 stays."""
    return {name: value for name, value in plain(answer).items() if value or name.startswith("score")}


def column_text(value: object, limit: int) -> str:
    """Text that every database takes: no lone surrogates, no NUL, and cut with a mark if it is longer than ``limit``."""
    text = value if isinstance(value, str) else dumps(value)
    text = text.encode("utf-8", "replace").decode().replace("\0", "\N{SYMBOL FOR NULL}")
    mark = f" ... ({len(text)} characters)"
    return text if len(text) <= limit else text[: limit - len(mark)] + mark


def write_trace(trace: EpisodeTrace, *, tracking_uri: str, experiment_id: str, run_id: str) -> str:
    """Writes the trace through MLflow's tracing client, which needs no global state and raises what goes wrong.

    Returns:
        The trace's id.
    """
    from mlflow.tracing.client import TracingClient

    spans = episode_spans(trace)
    number = int.from_bytes(os.urandom(16))
    begin = trace.ended_ns - int(spans[0].end * 1e9)
    client = TracingClient(tracking_uri)
    info = client.start_trace(_trace_info(trace, f"tr-{number:032x}", begin, spans[0].end, experiment_id, run_id))
    client.log_spans(experiment_id, [_mlflow_span(s, k, number, begin) for k, s in enumerate(spans)])
    return info.trace_id


def _trace_info(
    trace: EpisodeTrace, trace_id: str, begin: int, seconds: float, experiment_id: str, run_id: str
) -> TraceInfo:
    from mlflow.entities import Feedback, TraceInfo, TraceLocation, TraceState

    episode, group = trace.episode, trace.group
    marks = {
        "reward": trace.reward,
        "advantage": trace.advantage,
        "score": episode.score,
        **{f"task: {k}": v for k, v in episode.checklist.items()},
    }
    sampled, total = episode.num_sampled, episode.num_tokens
    usage = {"input_tokens": total - sampled, "output_tokens": sampled, "total_tokens": total}
    tags = {
        "mlflow.traceName": trace.title,
        "step": str(trace.step),
        "version": str(group.version),
        "group": group.group_id,
        "task": episode.task.kind,
        "outcome": str(episode.outcome),
    }
    return TraceInfo(
        trace_id=trace_id,
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=begin // 1_000_000,
        execution_duration=int(seconds * 1e3),
        state=TraceState.ERROR if episode.outcome is Outcome.FAILED else TraceState.OK,
        request_preview=column_text(episode.task.prompt, 1000),
        response_preview=column_text(episode.trajectory.answer or f"({episode.outcome}: {episode.detail})", 1000),
        client_request_id=column_text(episode.episode_id, 50),
        trace_metadata={"mlflow.sourceRun": run_id, "mlflow.trace.tokenUsage": dumps(usage)},
        tags={k: column_text(v, 250) for k, v in tags.items()},
        assessments=[Feedback(name=column_text(k, 50), value=v) for k, v in marks.items() if v is not None],
    )


def _mlflow_span(record: SpanRecord, index: int, trace: int, begin: int) -> Span:
    """A finished span of the trace with the 128-bit number ``trace``, which began at ``begin`` ns of the Unix epoch."""
    from mlflow.entities import Span
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import SpanContext, Status, StatusCode

    attributes = {
        "mlflow.traceRequestId": f"tr-{trace:032x}",
        "mlflow.spanType": record.kind,
        "mlflow.spanInputs": record.inputs,
        "mlflow.spanOutputs": record.outputs,
        **record.attributes,
    }
    start = begin + int(record.start * 1e9)
    return Span(
        ReadableSpan(
            name=column_text(record.name, 250),
            context=SpanContext(trace_id=trace, span_id=index + 1, is_remote=False),
            parent=None if record.parent is None else SpanContext(trace, record.parent + 1, is_remote=False),
            resource=Resource.get_empty(),
            attributes={k: dumps(v).encode("utf-8", "replace").decode() for k, v in attributes.items()},
            start_time=start,
            end_time=max(start + 1000, begin + int(record.end * 1e9)),
            status=Status(StatusCode.ERROR, column_text(record.error, 250)) if record.error else Status(StatusCode.OK),
            events=[Event("exception", {"exception.message": column_text(record.error, 1000)}, start)]
            if record.error
            else (),
        )
    )
