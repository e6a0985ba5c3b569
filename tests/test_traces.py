"""An episode as spans: names, parents, times, and what is readable in them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tracking_samples import MESSAGES, TASK, TOOL, make_episode, make_group

from arenarl.traces import EpisodeTrace, episode_spans
from arenarl.types import EpisodeGroup, Outcome, Trajectory


def make_trace(group: EpisodeGroup, member: int) -> EpisodeTrace:
    episode, reward, advantage = group.episodes[member], group.rewards[member], group.advantages[member]
    return EpisodeTrace(episode=episode, group=group, reward=reward, advantage=advantage, step=3, ended_ns=10**18)


def test_spans_follow_each_other_and_share_the_generation_time_by_length() -> None:
    spans = episode_spans(make_trace(make_group(), 0))
    assert [(s.name, s.kind, s.parent) for s in spans] == [
        ("t1, member 0 (greedy)", "AGENT", None),
        ("turn 0", "CHAT_MODEL", 0),
        (TOOL, "TOOL", 0),
        ("malformed call", "TOOL", 0),
        ("turn 1", "CHAT_MODEL", 0),
        ("tournament", "CHAIN", 0),
        ("round 0: 0 vs 1", "EVALUATOR", 5),
        ("round 1: 2 vs 0", "EVALUATOR", 5),
    ]
    times = [(s.start, s.end) for s in spans]
    golden = [(0, 4.8), (0, 2), (2, 2.5), (2.5, 2.5), (2.5, 4.5), (4.5, 4.8), (4.5, 4.7), (4.7, 4.8)]
    assert times == [pytest.approx(t) for t in golden]


def test_spans_say_what_went_in_and_out() -> None:
    spans = episode_spans(make_trace(make_group(), 0))
    assert spans[0].inputs == {"task": TASK.prompt}
    assert spans[0].outputs["result"] | {"score": 0} == {
        "outcome": "scored", "detail": "", "score": 0, "reward": 0.1, "advantage": None}  # fmt: skip
    assert spans[4].inputs == {"messages": MESSAGES[:3]} and spans[4].outputs == {"choices": [{"message": MESSAGES[3]}]}
    assert (spans[2].inputs, spans[2].outputs, spans[2].error) == ({"city": "Évora"}, "1. Museu de Évora", "")
    assert (spans[3].inputs, spans[3].error) == ({"raw": "{", "error": "not JSON"}, "parse_error: say it again")
    assert spans[5].outputs == {"games": 2, "won": 0, "tied": 0, "lost": 1, "no verdict": 1}
    assert spans[6].outputs == {"score_a": 0.25, "score_b": 0.75, "member 0": "lost"}
    assert spans[7].error == "judge timed out"


def test_a_game_is_seen_from_the_member_of_the_trace() -> None:
    spans = episode_spans(make_trace(make_group(), 1))
    assert [s.outputs.get("member 1") for s in spans if s.kind == "EVALUATOR"] == ["won", "won"]


def test_an_episode_that_failed_before_its_first_turn_is_a_lone_error() -> None:
    lost = replace(
        make_episode(0),
        trajectory=Trajectory(messages=(), events=(), answer=None),
        outcome=Outcome.FAILED,
        detail="timeout",
    )
    (root,) = episode_spans(make_trace(make_group(episodes=(lost,), rewards=(None,), games=()), 0))
    assert (root.start, root.end, root.error, root.outputs["answer"]) == (0.0, 0.0, "timeout", None)
