"""Writing travel tasks: the seeds, what is refused, the demonstrations of both roles, and the model that learnt from them."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from playing import play

from arenarl.async_env import AsyncToolEnv
from arenarl.chat import ChatRenderer
from arenarl.coach import RuleCoach
from arenarl.env_runner import load_renderer
from arenarl.envs.travel import KINDS, TravelTasks, checklist
from arenarl.envs.travel_generator import TravelGenerator
from arenarl.envs.travel_rubrics import TravelGrader, world_truth
from arenarl.envs.travel_server import TravelTools
from arenarl.errors import ConfigError
from arenarl.generated import Refused, draft_task, read_draft, ungrounded
from arenarl.rubric import Checklist, items_from_data
from arenarl.tool_calls import HERMES
from arenarl.types import (
    Episode,
    EpisodeGroup,
    Generated,
    Memory,
    Message,
    Outcome,
    Task,
    ToolEvent,
    ToolResult,
    Trajectory,
)  # fmt: skip

TINY = Path(__file__).resolve().parent.parent / "experiments" / "tiny_agent"
GENERATOR = TravelGenerator()
TOOLS = TravelTools()
SEED = Task(task_id="s", kind="search", prompt="Write a search task for Seoul.", data={"cities": ["Seoul"]})
CAFES = {
    "name": "poi_search",
    "arguments": {"city": "Seoul", "category": "cafe"},
}  # world 0: Meadow 30, Breeze 23, Summit 34
TRIP = {"origin": "Seoul", "destination": "Busan", "day": "Friday"}


@pytest.fixture(scope="module")
def tiny() -> dict[str, ModuleType]:
    """The modules of the tiny agent's folder, by name."""
    sys.path.append(str(TINY))
    return {
        name: importlib.import_module(name)
        for name in ("advice", "demonstrations", "written_requests", "generator_demonstrations", "warm_start")
    }


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return load_renderer(str(TINY / "arise"))


def call(name: str, **arguments: str) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def written(prompt: str, *calls: dict[str, Any]) -> Task:
    return Task(task_id="t", kind="", prompt=prompt, data={"rubrics": [], "expected_tools": list(calls)})


def played(messages: Sequence[Message]) -> Trajectory:
    """The trajectory of a demonstration; each call is answered by the message after it."""
    events, answer = [], None
    for said, reply in zip(messages, [*messages[1:], None], strict=True):
        if said["role"] == "assistant":
            answer, calls = HERMES.parse(said["content"], first_id=len(events))
            for made in calls:
                kind = "ok" if made.error is None else "parse_error"
                result = ToolResult(kind=kind, text=reply["content"] if reply else "")
                events.append(ToolEvent(call=made, result=result, turn=len(events)))
    return Trajectory(messages=tuple(messages), events=tuple(events), answer=answer)


def verdict(trajectory: Trajectory, seed: Task) -> Task | str:
    """The task that was written, or why it is none."""
    draft = read_draft(trajectory.answer)
    refused = draft if isinstance(draft, Refused) else ungrounded(draft, trajectory.events)
    if refused or isinstance(draft, Refused):
        return str(refused)
    task = draft_task(draft, seed=seed, task_id="t")
    return GENERATOR.refuse(task, seed) or task


# --- seeds --------------------------------------------------------------------------------------------------------------


def test_seeds_take_the_kinds_in_turn_in_cities_of_their_split():
    seeds = GENERATOR.tasks("train", 40, seed=3)
    assert [s.kind for s in seeds] == list(KINDS) * 8
    assert len({s.prompt for s in seeds}) == len({s.task_id for s in seeds}) == 40
    cities = {city for s in seeds for city in s.data["cities"]}
    assert cities < set(GENERATOR.world.split("train"))
    assert all(city in s.prompt for s in seeds for city in s.data["cities"])
    assert all(len(set(s.data["cities"])) == 1 + (s.kind in ("compare", "multi_day")) for s in seeds)


def test_seeds_are_the_same_for_the_same_arguments_and_others_for_others():
    assert TravelGenerator(7).tasks("heldout", 20, seed=1) == TravelGenerator(7).tasks("heldout", 20, seed=1)
    assert GENERATOR.tasks("heldout", 20, seed=1) != GENERATOR.tasks("heldout", 20, seed=2)


def test_the_wording_of_seeds():
    seeds = GENERATOR.tasks("train", 5, seed=0)
    words = [s.prompt.replace(s.data["cities"][0], "A").replace(s.data["cities"][-1], "B") for s in seeds]
    assert words == [
        "Write a search task for A.", "Write a direction task for A.", "Write a compare task from A to B.",
        "Write a one day task for A.", "Write a multi day task for A from B.",
    ]  # fmt: skip


def test_a_split_that_there_is_not():
    with pytest.raises(ConfigError, match="'test' is unknown"):
        GENERATOR.tasks("test", 1, seed=0)


def test_a_whole_split_of_seeds():
    seeds = GENERATOR.tasks("heldout", 500, seed=0)
    assert len(seeds) == 120
    for kind in KINDS:
        assert {s.data["cities"][0] for s in seeds if s.kind == kind} == set(GENERATOR.world.split("heldout"))


# --- what is refused ----------------------------------------------------------------------------------------------------

RIDES = (call("search_flights", **TRIP), call("search_train_tickets", **TRIP))
WAY = call("direction", city="Seoul", origin="Meadow", destination="Breeze")


@pytest.mark.parametrize(
    ("kind", "prompt", "calls", "refusal"),
    [
        ("search", "Find a cafe in Seoul.", [CAFES], ""),
        ("search", "Find a cafe in seoul.", [CAFES], ""),
        ("search", "How is Seoul?", [call("weather", city="Seoul", day="Friday")], "missing_tool: search needs poi_search"),
        ("search", "Find a cafe in Seoul.", [], "missing_tool"),
        ("search", "Find a cafe in Busan.", [CAFES], "other_city: the request does not name Seoul"),
        ("search", "Find a cafe in Seoul.", [call("poi_search", city="Busan", category="cafe")], "other_city: no expected"),
        ("direction", "Which way in Seoul?", [WAY], ""),
        ("direction", "Which way in Seoul?", [CAFES], "missing_tool: direction needs direction"),
        (
            "direction", "Which way in Seoul?", [call("direction", city="Seoul", origin="Elm", destination=" ELM")],
            "same_ends: direction from 'elm'",
        ),
        ("one_day", "Plan Friday in Seoul.", [call("weather", city="Seoul", day="Friday")], "missing_tool"),
        ("one_day", "Plan Friday in Seoul.", [CAFES], ""),
    ],
)  # fmt: skip
def test_what_a_task_about_one_city_needs(kind: str, prompt: str, calls: list[dict[str, Any]], refusal: str):
    found = GENERATOR.refuse(written(prompt, *calls), replace(SEED, kind=kind))
    assert (found[: len(refusal)], bool(found)) == (refusal, bool(refusal))


@pytest.mark.parametrize(
    ("kind", "prompt", "calls", "refusal"),
    [
        ("compare", "Compare from Seoul to Busan.", RIDES, ""),
        ("compare", "Compare from Seoul to Busan.", RIDES[:1], "missing_tool: compare needs search_train_tickets"),
        ("compare", "Compare from Seoul to Jinan.", RIDES, "other_city: the request does not name Busan"),
        ("multi_day", "Go to Busan from Seoul.", (RIDES[1], CAFES), ""),
        ("multi_day", "Go to Busan from Seoul.", RIDES, "missing_tool: multi_day needs poi_search or around_search"),
        ("multi_day", "Go to Busan from Seoul.", (CAFES,), "missing_tool: multi_day needs search_flights or"),
    ],
)
def test_what_a_task_about_two_cities_needs(kind: str, prompt: str, calls: Sequence[dict[str, Any]], refusal: str):
    seed = replace(SEED, kind=kind, data={"cities": ["Seoul", "Busan"]})
    found = GENERATOR.refuse(written(prompt, *calls), seed)
    assert (found[: len(refusal)], bool(found)) == (refusal, bool(refusal))


def test_odd_arguments_are_refused_and_not_stumbled_over():
    odd = {"name": "poi_search", "arguments": {"city": None, "origin": ["a"], "destination": {"b": 1}, "n": 2}}
    assert (
        GENERATOR.refuse(written("Find a cafe in Seoul.", odd), SEED) == "other_city: no expected call asks about Seoul"
    )
    assert GENERATOR.refuse(written("Find it in Seoul.", {"name": "poi_search", "arguments": {}}), SEED) != ""


# --- an episode ---------------------------------------------------------------------------------------------------------

LOOKED_UP = '<tool_call>\n{"name": "poi_search", "arguments": {"city": "Seoul", "category": "cafe"}}\n</tool_call>'


def task_text(quote: str = "Breeze 23", tools: Sequence[dict[str, Any]] = (CAFES,)) -> str:
    texts = ("The answer names a cafe.", "The cafe is Breeze.", "The cafe costs 23 usd.")
    rubrics = [{"text": text, "observation": 1, "evidence": quote} for text in texts]
    return json.dumps({"query": "Find the cheapest cafe in Seoul.", "rubrics": rubrics, "expected_tools": list(tools)})


@pytest.mark.parametrize(
    ("messages", "earned"),
    [
        ([LOOKED_UP, task_text()], 1.0),
        ([LOOKED_UP, task_text(quote="Breeze 24")], 0.75),
        ([LOOKED_UP, task_text(tools=RIDES)], 0.75),
        ([task_text()], 0.5),
        ([LOOKED_UP, task_text()[:-1]], 0.0),
    ],
)
async def test_an_episode_earns_by_format_and_grounding(messages: list[str], earned: float):
    env = AsyncToolEnv(GENERATOR)
    try:
        assert await play(env, SEED, messages) == earned
    finally:
        await env.aclose()


async def test_six_calls_and_the_task_fit_and_a_seventh_call_ends_the_episode():
    env = AsyncToolEnv(GENERATOR)
    try:
        assert await play(env, SEED, [*6 * [LOOKED_UP], task_text()]) == 1.0
        await env.reset(options={"task": SEED})
        *_, last = [await env.step(LOOKED_UP) for _ in range(7)]
        assert (last.truncated, env.detail) == (True, "turns")
    finally:
        await env.aclose()


# --- demonstrations -----------------------------------------------------------------------------------------------------


def write(
    tiny: dict[str, ModuleType], skill: float, hardness: float, count: int = 50, **slips: float
) -> list[Task | str]:
    """What a writer of this skill writes; without ``slips`` it may slip as it is wont to."""
    writing, rng = tiny["generator_demonstrations"], random.Random(1)
    kinds = writing.WritingSlips(**{f.name: slips.get(f.name, 0.0) for f in fields(writing.WritingSlips)})
    seeds = GENERATOR.tasks("train", count, seed=5)
    return [verdict(played(writing.Writer(TOOLS, rng, skill, kinds).play(seed, hardness)), seed) for seed in seeds]


@pytest.mark.parametrize("hardness", [0.0, 0.5, 1.0])
def test_a_skilled_writer_writes_valid_and_true_tasks(tiny: dict[str, ModuleType], hardness: float):
    tasks = [task for task in write(tiny, 1.0, hardness) if isinstance(task, Task)]
    assert len(tasks) == 50
    untrue = [task.prompt for task in tasks if not world_truth(task, GENERATOR.world)]
    assert untrue == []


@pytest.mark.parametrize(
    ("slip", "refusals"),
    [
        ("broken", {"bad_json"}), ("few", {"items"}), ("misquote", {"ungrounded"}), ("misnumber", {"ungrounded"}),
        ("idle", {"no_observation"}), ("unmatched", {"unmatched_tool"}), ("forgotten", {"missing_tool"}),
    ],
)  # fmt: skip
def test_each_slip_of_a_writer_is_found(tiny: dict[str, ModuleType], slip: str, refusals: set[str]):
    found = [w.partition(":")[0] for w in write(tiny, 0.0, 0.5, **{slip: 1.0}) if isinstance(w, str)]
    assert set(found) <= refusals
    assert len(found) >= (10 if slip == "forgotten" else 49)  # one of two calls may be forgotten without harm


def test_an_untrue_task_is_valid_and_cannot_always_be_met(tiny: dict[str, ModuleType]):
    tasks = [task for task in write(tiny, 0.0, 1.0, untrue=1.0) if isinstance(task, Task)]
    assert len(tasks) == 50
    assert sum(not world_truth(task, GENERATOR.world) for task in tasks) > 15


async def pass_rate(tiny: dict[str, ModuleType], kind: str, hardness: float) -> float:
    """Share of passes of demonstrators of any skill at written tasks of a kind."""
    writing, demos, passes = tiny["generator_demonstrations"], tiny["demonstrations"], 0
    slips = writing.WritingSlips(**{f.name: 0.0 for f in fields(writing.WritingSlips)})
    seeds = [seed for n in (6, 7) for seed in GENERATOR.tasks("train", 300, seed=n) if seed.kind == kind]
    for n, seed in enumerate(seeds):
        task = verdict(played(writing.Writer(TOOLS, random.Random(n), 1.0, slips).play(seed, hardness)), seed)
        rng = random.Random(n)  # once more, for the needs of the same request
        request = tiny["written_requests"].Requester(TOOLS.world, rng, hardness).request(kind, seed.data["cities"])
        assert isinstance(task, Task) and task.prompt == request.text
        attempt = played(demos.Demonstrator(TOOLS, rng, rng.random()).play(request.task(kind)))
        marks = await Checklist(items_from_data(task.data), grader=TravelGrader(), task=task).run(attempt)
        assert None not in marks.values()
        passes += all(marks.values())
    return passes / len(seeds)


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_has_easy_and_hard_tasks(tiny: dict[str, ModuleType], kind: str):
    easy, hard = await pass_rate(tiny, kind, 0.0), await pass_rate(tiny, kind, 1.0)
    assert easy > hard + 0.1


# --- advice -------------------------------------------------------------------------------------------------------------


def test_advice_speaks_of_slips_that_there_are(tiny: dict[str, ModuleType]):
    advice, writing, demos = tiny["advice"], tiny["generator_demonstrations"], tiny["demonstrations"]
    for sentences, slips in ((advice.SOLVER, demos.Slips), (advice.GENERATOR, writing.WritingSlips)):
        named = [slip for found in sentences.values() for slip in found]
        assert len(set(named)) == len(named)
        assert set(named) <= {f.name for f in fields(slips)}
    assert set(advice.SOLVER_RULES.values()) == set(advice.SOLVER)
    assert set(advice.GENERATOR_RULES.values()) == set(advice.GENERATOR)


def test_a_writer_that_heeds_advice_does_not_make_the_slip(tiny: dict[str, ModuleType]):
    advice, slips = tiny["advice"], dict.fromkeys(("broken", "few", "misquote", "unmatched"), 0.5)
    heeded = advice.ruled_out(advice.GENERATOR, ["Quote rows exactly.", "Write valid JSON.", "Make it easier."])
    assert heeded == {"misquote": 0.0, "misnumber": 0.0, "idle": 0.0, "broken": 0.0}
    kinds = {w.partition(":")[0] for w in write(tiny, 0.0, 0.5, **(slips | heeded)) if isinstance(w, str)}
    assert kinds == {"items", "unmatched_tool"}


def test_a_third_of_the_demonstrations_have_a_note_where_the_role_has_it(tiny: dict[str, ModuleType]):
    writing = tiny["generator_demonstrations"]
    for make, place in ((writing.generator_demonstrations, "user"), (writing.solver_demonstrations, "system")):
        memories = [memory for _, memory in make(100, seed=4) if memory]
        assert 20 <= len(memories) <= 50
        assert all(m.place == place and m.text.startswith("\nAdvice: ") and m.text.endswith(".") for m in memories)
        assert make(5, seed=4, advised=0.0) != make(5, seed=5, advised=0.0)


def group(marks: dict[str, bool], task: Task, refusal: str = "") -> EpisodeGroup:
    episode = Episode(
        episode_id="e", task=task, member=0, greedy=False, segments=(), outcome=Outcome.SCORED, checklist=marks,
        trajectory=Trajectory(messages=(), events=(), answer=None),
    )  # fmt: skip
    made = (Generated(task=None, refusal=refusal),) if refusal else ()
    return EpisodeGroup(group_id="g", task=task, episodes=(episode,), version=0, generated=made)


async def test_a_coach_has_a_sentence_for_whatever_a_solver_misses(tiny: dict[str, ModuleType]):
    coach = RuleCoach(tiny["advice"].SOLVER_RULES)
    items = [item for task in TravelTasks().tasks("train", 25, seed=1) for item in checklist(task).items.values()]
    data = json.loads(task_text())
    items += items_from_data({"rubrics": [{"text": r["text"]} for r in data["rubrics"]], "expected_tools": [CAFES]})
    notes = [await coach.advise(group({item.name: False}, SEED), [item]) for item in items]
    assert "" not in notes
    assert notes[-4:] == [
        "\nAdvice: Answer every line.", "\nAdvice: Compare all rows.", "\nAdvice: Copy prices exactly.",
        "\nAdvice: Call every tool needed.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("missed", "refusal", "note"),
    [
        ("json", "", "\nAdvice: Write valid JSON."),
        ("tools", "missing_tool: search needs poi_search", "\nAdvice: Name the tools called."),
        ("grounded", "ungrounded: r1", "\nAdvice: Quote rows exactly."),
        ("items", "items: found 2", "\nAdvice: Write more items."),
    ],
)
async def test_a_coach_has_a_sentence_for_whatever_a_generator_misses(
    tiny: dict[str, ModuleType], missed: str, refusal: str, note: str
):
    coach = RuleCoach(tiny["advice"].GENERATOR_RULES)
    items = list(GENERATOR.checklist(SEED).items.values())
    marks = {item.name: item.name != missed for item in items}
    assert await coach.advise(group(marks, SEED, refusal), items) == note


# --- what the model reads -----------------------------------------------------------------------------------------------


def test_training_text_with_a_note_is_rollout_text_with_a_memory(tiny: dict[str, ModuleType], renderer: ChatRenderer):
    warm, writing = tiny["warm_start"], tiny["generator_demonstrations"]
    tools = warm.tool_schemas()
    for make in (writing.generator_demonstrations, writing.solver_demonstrations):
        messages, memory = next(demo for demo in make(40, seed=6) if demo[1])
        ids, mask = warm.encode_demonstration(renderer, tools, (messages, memory))
        prompt = renderer.prompt(messages[:2], tools, memory)
        assert (ids[: len(prompt)], mask[: len(prompt)]) == (prompt, [False] * len(prompt))
        plain, plain_mask = warm.encode_demonstration(renderer, tools, (messages, None))
        assert (ids[len(prompt) :], sum(mask)) == (plain[len(prompt) - len(ids) + len(plain) :], sum(plain_mask))


def test_a_row_drill_quotes_the_rows_that_it_is_asked_for(tiny: dict[str, ModuleType]):
    context, items = tiny["generator_demonstrations"].row_drill(random.Random(1), ["Elm", "Fig", "Oak", "Ivy"])
    assert context == "name usd rating\nIvy 36 8\nFig 19 9\nElm 67 6\ncheapest museum.\n"
    assert json.loads(items) == [{"text": "The museum is Fig.", "observation": 1, "evidence": "Fig 19"}]


def test_demonstrations_fit_the_contexts_of_the_roles(tiny: dict[str, ModuleType], renderer: ChatRenderer):
    warm, writing = tiny["warm_start"], tiny["generator_demonstrations"]
    tools = warm.tool_schemas()
    for make, limit in ((writing.generator_demonstrations, 600), (writing.solver_demonstrations, 450)):
        lengths = [len(warm.encode_demonstration(renderer, tools, demo)[0]) for demo in make(60, seed=8)]
        assert max(lengths) <= limit


def test_a_grown_vocabulary_keeps_every_old_id(tiny: dict[str, ModuleType], tmp_path: Path):
    from transformers import AutoTokenizer

    old = AutoTokenizer.from_pretrained(TINY / "model")
    text = "rubrics and rubrics rubrics"
    before = tiny["warm_start"].extend_tokenizer(TINY / "model", tmp_path, [text] * 3, len(old) + 2)
    new = AutoTokenizer.from_pretrained(tmp_path)
    assert {**new.get_vocab(), **old.get_vocab()} == new.get_vocab()
    assert sorted(before) == [len(old), len(old) + 1] and len(new) == len(old) + 2
    assert before[new.convert_tokens_to_ids("rubrics")] == old.encode("rubrics")
    assert len(new.encode(text)) == 4
    assert new.encode("rubrics") == [new.convert_tokens_to_ids("rubrics")]
    assert new.decode(new.encode(text)) == text
    assert new.encode("<tool_call>") == old.encode("<tool_call>") == [1220]


def test_the_model_folder_is_whole_and_small(renderer: ChatRenderer):
    folder = TINY / "arise"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 3_000_000
    assert len(renderer.tokenizer) == json.loads((folder / "config.json").read_text())["vocab_size"] == 1280
    ids = renderer.encode_foreign(
        '"rubrics": [{"text": "The cafe is Lotus.", "observation": 1, "evidence": "Lotus 12"}]'
    )
    assert len(ids) == 20


def test_a_memory_is_the_same_ids_in_training_and_rollout(renderer: ChatRenderer):
    note = Memory(text="\nAdvice: Copy prices exactly.", place="system")
    tokens = renderer.tokenizer.convert_ids_to_tokens(renderer.encode_foreign(note.text))
    assert tokens == ["Ċ", "Advice", ":", "ĠCopy", "Ġprices", "Ġexactly", "."]
