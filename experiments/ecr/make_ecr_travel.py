"""Write the embedded travel tasks in ECR format: ``python experiments/ecr/make_ecr_travel.py``.

24 requests of each of the five kinds about held-out cities of the world of seed 0. Each is rewritten as rubrics, in the
language of `arenarl.envs.travel_rubrics`, and expected tools: what the best answer says where the request wishes for
one, that a line is there where any will do, and that the budget is kept. As in ECR-Travel itself, a search of the web is
not among the expected tools: its query is free text. A rubric asks for it.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from arenarl.envs.rubric_tasks import EMBEDDED
from arenarl.envs.travel import Need, TravelTasks, world_rows
from arenarl.envs.travel_world import World
from arenarl.types import Task

PER_KIND = 24
SEED = 2609  # of the draw; the world's is 0
BEST = {"best": ("rating", -1), "cheap": ("usd", 1), "fast": ("minutes", 1)}


def lines() -> str:
    """The whole file; the same on every machine."""
    tasks = TravelTasks(seed=0)
    count: Counter[str] = Counter()
    text = ""
    for task in tasks.tasks("heldout", 5 * PER_KIND, SEED):
        count[task.kind] += 1
        text += json.dumps({"id": f"ecr-{task.kind}-{count[task.kind]:02d}", **record(task, tasks.world)}) + "\n"
    return text


def record(task: Task, world: World) -> dict[str, Any]:
    """A travel task in ECR format."""
    needs = [Need(**need) for need in task.data["needs"]]
    rubrics = [text for need in needs for text in assertions(need, world_rows(world, need))]
    if "take" in task.data:
        prices = {need.label: int(best(world_rows(world, need), need.wish)["usd"]) for need in needs}
        rubrics.append(f"The answer takes the {min(prices, key=lambda label: prices[label])}.")
    if "budget" in task.data:
        rubrics.append(f"The total is at most {task.data['budget']} usd.")
    calls = [{"name": need.tool, "arguments": need.arguments} for need in needs if need.tool != "web_search"]
    metadata = {"rubrics": rubrics, "expected_tools": calls, "task_type": task.kind}
    return {"query": task.prompt, "metadata": metadata}


def assertions(need: Need, rows: list[dict[str, str]]) -> list[str]:
    """What a good answer says about one need."""
    label = {"go by": "way"}.get(need.label, need.label)
    there = f"The answer names {'an' if label == 'event' else 'a'} {label}."
    if not need.wish and len(rows) > 1:
        return [there]
    row = best(rows, need.wish)
    facts = [f"The {label} is {next(iter(row.values()))}."]
    facts.append(
        f"The {label} is {row['celsius']} celsius." if "celsius" in row else f"The {label} costs {row['usd']} usd."
    )
    if need.tool == "web_search":
        return ["web_search was called.", *facts]
    return [there, *facts] if need.tool in ("poi_search", "around_search", "direction") else facts


def best(rows: list[dict[str, str]], wish: str) -> dict[str, str]:
    """The row that the wish wants; the only one if there is none."""
    column, sign = BEST.get(wish, ("", 1))
    return min(rows, key=lambda row: sign * int(row.get(column, 0)))


if __name__ == "__main__":
    EMBEDDED.parent.mkdir(exist_ok=True)
    EMBEDDED.write_text(lines(), encoding="utf-8", newline="\n")
    print(f"{EMBEDDED}: {5 * PER_KIND} tasks")
