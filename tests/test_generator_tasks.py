"""Any environment as a place to write tasks about: seeds from a file, and an episode that writes one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from arenarl.async_env import AsyncToolEnv
from arenarl.envs.generator_tasks import SEEDS, SYSTEM_PROMPT, GeneratorTasks
from arenarl.envs.travel import TravelTasks
from arenarl.errors import ConfigError
from arenarl.generated import Draft, read_draft, ungrounded
from arenarl.taskset import load_taskset
from arenarl.types import Outcome, Task
from tests.playing import play
from tests.processes import descendants

LOOK = '<tool_call>\n{"name": "poi_search", "arguments": {"city": "Hanoi", "category": "cafe"}}\n</tool_call>'
LOST = LOOK.replace("Hanoi", "Nowhere")


def written(quote: str, observation: int = 1, **changes: Any) -> str:
    texts = ("The cafe is open.", "The answer names a cafe.", "The cafe is cheap.")
    task = {
        "query": "Find a cafe in Hanoi.",
        "rubrics": [{"text": text, "observation": observation, "evidence": quote} for text in texts],
        "expected_tools": [{"name": "poi_search", "arguments": {"city": "hanoi", "category": "cafe"}}],
    }
    return json.dumps(task | changes)


def seeds(folder: Path, *lines: str | dict[str, Any], name: str = "seeds.jsonl") -> Path:
    path = folder / name
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def prompts(taskset: GeneratorTasks, split: str) -> set[str]:
    return {task.prompt for task in taskset.tasks(split, 99, seed=0)}


@pytest.fixture(scope="module")
async def env() -> AsyncIterator[AsyncToolEnv]:
    env = AsyncToolEnv(GeneratorTasks(rounds=2), split="train")
    yield env
    await env.aclose()
    assert not descendants()


(ASK,) = GeneratorTasks().tasks("train", 1, seed=0)


async def test_an_episode_explores_the_other_environment_and_is_paid_for_a_grounded_task(env: AsyncToolEnv):
    assert await play(env, ASK, [LOST, LOOK, written("name usd rating", 2)]) == 1.0
    (lost, found), answer = env.trajectory().events, env.trajectory().answer
    assert (lost.result.ok, found.result.ok) == (False, True)
    draft = read_draft(answer)
    assert isinstance(draft, Draft) and ungrounded(draft, env.trajectory().events) is None
    assert env.trajectory().messages[0]["content"].startswith(SYSTEM_PROMPT)


@pytest.mark.parametrize(
    ("messages", "score"),
    [
        ([LOST, LOOK, written("name usd rating", 1)], 0.75),
        ([LOOK, written("name usd rating", rubrics=[])], 0.5),
        ([LOST, written("unknown city")], 0.5),
        (["I would rather not."], 0.0),
    ],
)
async def test_what_is_missing_costs_its_share(env: AsyncToolEnv, messages: list[str], score: float):
    assert await play(env, ASK, messages) == score


async def test_there_are_so_many_rounds_and_one_turn_for_the_task(env: AsyncToolEnv):
    assert (GeneratorTasks(rounds=2).max_turns, GeneratorTasks().max_turns) == (3, 7)
    await env.reset(options={"task": ASK})
    for _ in range(3):
        await env.step(LOOK)
    assert env.outcome is Outcome.TRUNCATED


def test_the_servers_are_those_of_the_base_with_its_settings():
    taskset = GeneratorTasks("arenarl.envs.travel:TravelTasks", {"seed": 5})
    assert list(taskset.servers()) == list(TravelTasks(seed=5).servers()) != list(TravelTasks().servers())
    assert GeneratorTasks(system_prompt="Write.").system_prompt == "Write."
    assert load_taskset("arenarl.envs.generator_tasks:GeneratorTasks").name == "generator"


def test_without_a_file_there_are_seeds_to_try_it_out():
    taskset = GeneratorTasks()
    assert prompts(taskset, "train") == {text for split, text in SEEDS if split == "train"}
    assert prompts(taskset, "heldout") == {text for split, text in SEEDS if split == "heldout"}


def test_the_format_that_the_prompt_shows_is_the_one_that_is_read():
    example = SYSTEM_PROMPT[SYSTEM_PROMPT.index("{") : SYSTEM_PROMPT.index("\n\nRules")]
    draft = read_draft(example, min_items=1)
    assert isinstance(draft, Draft)
    assert (len(draft.items), len(draft.expected_tools), draft.items[0].evidence.quote) == (1, 1, "a quote")


def test_a_seed_of_a_file_has_kind_id_and_split(tmp_path: Path):
    path = seeds(
        tmp_path,
        {"prompt": "Write A.", "kind": "search", "id": "a1", "split": "train"},
        "",
        {"prompt": "B", "split": "heldout"},
    )
    taskset = GeneratorTasks(seeds=path)
    (task,) = taskset.tasks("train", 9, seed=0)
    assert task == Task(task_id="a1", kind="search", prompt="Write A.", seed=task.seed)
    assert prompts(taskset, "heldout") == {"B"}


def test_a_text_file_has_a_seed_a_line(tmp_path: Path):
    path = seeds(tmp_path, "Write A. ", "", *[f"Write {n}." for n in range(7)], name="seeds.txt")
    taskset = GeneratorTasks(seeds=path)
    assert (len(prompts(taskset, "train")), len(prompts(taskset, "heldout"))) == (6, 2)
    assert "Write A." in prompts(taskset, "train") | prompts(taskset, "heldout")


@pytest.mark.parametrize(("share", "held_out"), [(0.0, 0), (0.05, 1), (0.25, 2), (0.5, 5), (0.99, 9)])
def test_a_share_is_held_out_and_neither_split_is_empty(tmp_path: Path, share: float, held_out: int):
    path = seeds(tmp_path, *[f"Write {n}." for n in range(10)], name="seeds.txt")
    taskset = GeneratorTasks(seeds=path, heldout_share=share)
    assert len(prompts(taskset, "heldout")) == held_out
    assert len(prompts(taskset, "train") | prompts(taskset, "heldout")) == 10


def test_the_split_of_a_seed_does_not_hang_on_its_place(tmp_path: Path):
    lines = [f"Write {n}." for n in range(10)]
    there = GeneratorTasks(seeds=seeds(tmp_path, *lines, name="a.txt"))
    back = GeneratorTasks(seeds=seeds(tmp_path, *reversed(lines), name="b.txt"))
    assert prompts(there, "heldout") == prompts(back, "heldout")


def test_draws_are_distinct_and_follow_the_seed(tmp_path: Path):
    taskset = GeneratorTasks(seeds=seeds(tmp_path, *[f"Write {n}." for n in range(40)], name="seeds.txt"))
    drawn = taskset.tasks("train", 8, seed=3)
    assert len({task.task_id for task in drawn}) == 8
    assert drawn == taskset.tasks("train", 8, seed=3) != taskset.tasks("train", 8, seed=4)
    assert len(taskset.tasks("train", 99, seed=3)) == 30
    with pytest.raises(ConfigError, match="split 'test' is unknown"):
        taskset.tasks("test", 1, seed=0)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2: Expecting"),
        ("[" * 100_000, "line 2: "),
        ('"text"', "line 2: a seed must be an object, got str"),
        ({"prompt": " "}, "line 2: prompt must be a text that is not empty"),
        ({"prompt": "a", "kind": 3}, "line 2: kind must be a text"),
        ({"kind": "a"}, "line 2: a seed needs a prompt"),
        ({"prompt": "a", "spilt": "train"}, "line 2: a seed has the unknown key 'spilt'; did you mean 'split'?"),
        ({"prompt": "a", "split": "test"}, "line 2: split 'test' is unknown; use 'train' or 'heldout'"),
        ({"prompt": "first"}, "line 2: the id 'task-.*' was there before"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path: Path, line: str | dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=reason):
        GeneratorTasks(seeds=seeds(tmp_path, {"prompt": "first"}, line))


def test_a_file_without_seeds_for_training_is_refused(tmp_path: Path):
    for path in (seeds(tmp_path, ""), seeds(tmp_path, {"prompt": "a", "split": "heldout"})):
        with pytest.raises(ConfigError, match="holds no seed for training; write a line such as"):
            GeneratorTasks(seeds=path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        GeneratorTasks(seeds=tmp_path / "none.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        GeneratorTasks(seeds=tmp_path / "binary.txt")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"heldout_share": 1.0}, "heldout_share=1.0 must be at least 0 and below 1"),
        ({"rounds": 0}, "rounds=0 leaves no turn to call a tool"),
        ({"base": "arenarl.envs.nowhere:Tasks"}, "environment 'arenarl.envs.nowhere:Tasks' cannot be built"),
        ({"base_config": {"sed": 1}}, "cannot be built: .*'sed'"),
    ],
)
def test_a_bad_setting_is_refused(settings: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=reason):
        GeneratorTasks(**settings)


def test_half_characters_of_a_seed_are_replaced(tmp_path: Path):
    assert prompts(GeneratorTasks(seeds=seeds(tmp_path, '{"prompt": "Caf\\udce9"}')), "train") == {"Caf\ufffd"}
