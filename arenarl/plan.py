"""A look before the leap: what a run would do."""

from __future__ import annotations

import asyncio
from typing import Any

from rich.console import Console
from rich.table import Table

from arenarl.config import AgentConfig
from arenarl.preflight import check_listing, check_parts, training_tasks, wanted_resources
from arenarl.random_agent import play_random
from arenarl.taskset import check_tools


def show_plan(config: AgentConfig, console: Console) -> None:
    """The resolved configuration, derived numbers, resources wanted and found, and a random agent's episode.

    Raises:
        ArenaError: what the run itself would raise before its engine starts.
    """
    check_parts(config)
    taskset = config.build_taskset()
    tasks = training_tasks(config, taskset)
    console.print(_table("configuration", {k: repr(v) for k, v in config.public_fields().items()}))
    episodes = config.group_size * config.groups_per_step
    derived = {
        "episodes a step": episodes,
        "episodes in all": episodes * config.num_steps,
        "episodes in flight at most": config.episodes_in_flight,
        "passes over the training tasks": f"{config.groups_per_step * config.num_steps / len(tasks):.2f}",
        "tokens a step at most": episodes * config.max_model_len,
    }
    console.print(_table("derived", derived))
    console.print(_table("resources", _resources(config)))
    trajectory, env = asyncio.run(play_random(taskset, "train", config.seed or 0))
    check_tools(taskset, env.toolset)
    listing = check_listing(config, taskset, env.tools)
    console.print(f"{len(listing.schemas)} tools, {listing.tokens} tokens in every prompt")
    console.print("[bold]one episode of a random agent[/]")
    for message in trajectory.messages:
        console.print(f"[dim]{message['role']:>9}[/] ", end="")
        console.print(message["content"], markup=False, highlight=False)
    score = "none" if env.score is None else f"{env.score:.2f}"
    console.print(f"outcome {env.ending}, checklist score {score}")


def _resources(config: AgentConfig) -> dict[str, str]:
    """Wanted against found on this machine; a cluster is asked when the run starts."""
    import os

    import torch

    found = {"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}
    return {
        name: f"wanted {demand:g} (+ 1 for the driver), found {found[name]:g} here" if name == "CPU" else
        f"wanted {demand:g}, found {found[name]:g} here"
        for name, demand in wanted_resources(config).items()
    }  # fmt: skip


def _table(title: str, rows: dict[str, Any]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, show_header=False, padding=(0, 2, 0, 0)
    )
    for name, value in rows.items():
        table.add_row(f"[dim]{name}[/]", str(value))
    return table
