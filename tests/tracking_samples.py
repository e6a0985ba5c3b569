"""A small group of episodes, used by the tests of the record, of the traces and of MLflow."""

from __future__ import annotations

from dataclasses import replace

from arenarl.types import (
    Abstention,
    Episode,
    EpisodeGroup,
    Game,
    Message,
    Outcome,
    Segment,
    Task,
    ToolCall,
    ToolEvent,
    ToolResult,
    Trajectory,
    Verdict,
)

TASK = Task(task_id="t1", kind="search", prompt="Find a museum in Évora.", data={"city": "Évora"})
TOOL = "get(x)@v1/é"
CALL = '<tool_call>{"name": "poi", "arguments": {}}</tool_call>'
MESSAGES = (
    Message(role="user", content=TASK.prompt),
    Message(role="assistant", content=CALL),
    Message(role="tool", content="1. Museu de Évora", tool_call_id="c1", name=TOOL),
    Message(role="assistant", content="x" * len(CALL)),
)
EVENTS = (
    ToolEvent(
        call=ToolCall(id="c1", name=TOOL, arguments={"city": "Évora"}),
        result=ToolResult(kind="ok", text="1. Museu de Évora", server="travel", tool="poi", seconds=0.5),
        turn=0,
    ),
    ToolEvent(
        call=ToolCall(id="c2", name="", raw="{", error="not JSON"),
        result=ToolResult(kind="parse_error", text="say it again"),
        turn=0,
    ),
)
ANSWER = MESSAGES[-1]["content"]


def make_episode(member: int, *, answer: str = ANSWER, logprob: float = -0.1) -> Episode:
    segment = Segment(token_ids=(5, 6, 7), mask=(False, True, True), logprobs=(0.0, logprob, -2.0), versions=(-1, 4, 5))
    return Episode(
        episode_id=f"e{member}",
        task=TASK,
        member=member,
        greedy=member == 0,
        segments=(segment,),
        trajectory=Trajectory(messages=MESSAGES, events=EVENTS, answer=answer),
        outcome=Outcome.SCORED,
        checklist={"museum named": True, "price grounded": False, "city right": None},
        score=0.5,
        timing={"generate": 4.0, "tools": 0.5, "judge": 0.3},
    )


def make_group(**changes: object) -> EpisodeGroup:
    games = (
        Game(i=0, j=1, round=0, result=Verdict(score_a=0.25, score_b=0.75), seconds=0.2),
        Game(i=1, j=2, round=0, result=Verdict(score_a=1.0, score_b=0.0), seconds=9.0),
        Game(i=2, j=0, round=1, result=Abstention(reason="judge timed out"), seconds=0.1),
    )
    group = EpisodeGroup(
        group_id="g7",
        task=TASK,
        episodes=tuple(make_episode(m) for m in range(3)),
        version=5,
        rewards=(0.1, 0.9, None),
        advantages=(None, 1.25, None),
        games=games,
    )
    return replace(group, **changes)
