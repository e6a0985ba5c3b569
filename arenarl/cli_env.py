"""The commands of environments: ``arenarl env list | check | play | record | install`` and ``arenarl chat check``."""

from __future__ import annotations

import argparse
from typing import Any

from arenarl.errors import ConfigError

FAILED = 1


def add_env_commands(add: Any) -> None:
    env = add("env", None, "environments").add_subparsers(required=True, metavar="COMMAND")

    def target(command: argparse.ArgumentParser, **options: Any) -> None:
        command.add_argument("target", help="Gymnasium id, module:TaskSetClass, or path of an mcp.json", **options)
        command.add_argument("--tasks", metavar="FILE", help="JSON Lines file with tasks for an mcp.json")

    model = {"metavar": "DIR", "help": "count tokens as this model's tokenizer does (default: 4 characters are one)"}
    replay = {"metavar": "TAPE", "help": "take tool results from a recorded tape; no server is started"}
    listing = add(
        "list", run_env_list, "list the environments shipped, or start one's servers and list their tools", env
    )
    target(listing, nargs="?")
    listing.add_argument("--model", **model)
    check = add(
        "check", run_env_check, "check an environment: servers, Gymnasium's test, a random agent, isolation", env
    )
    target(check)
    check.add_argument("--episodes", type=int, default=5, help="episodes of the random agent, whose calls are real")
    check.add_argument("--model", **model)
    check.add_argument("--replay", **replay)
    play = add("play", run_env_play, "be the agent yourself, in the terminal", env)
    target(play)
    play.add_argument("--split", choices=("train", "heldout"), default="train")
    play.add_argument("--seed", type=int, default=0, help="picks the task")
    play.add_argument("--replay", **replay)
    record = add("record", run_env_record, "play episodes and put the tool results on a tape", env)
    target(record)
    record.add_argument("--out", required=True, metavar="TAPE", help="file to make, or to add to")
    record.add_argument("--episodes", type=int, default=5)
    record.add_argument("--agent", choices=("random", "oracle"), default="random")
    install = add("install", run_env_install, "install public servers, each in an environment of its own", env)
    install.add_argument("names", nargs="*", metavar="NAME", help="names of the catalogue (default: all)")
    chat = add("chat", None, "chat formats").add_subparsers(required=True, metavar="COMMAND")
    chat_check = add(
        "check", run_chat_check, "check that a model's chat template can be trained on token by token", chat
    )
    chat_check.add_argument("model", metavar="MODEL", help="folder with a tokenizer")


def run_env_list(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from arenarl.env_commands import list_shipped, list_target, load_target, token_counter

    if arguments.target is None:
        if arguments.tasks or arguments.model:
            raise ConfigError("--tasks and --model need a TARGET, such as mcp.json")
        list_shipped(Console())
        return 0
    taskset = load_target(arguments.target, arguments.tasks)
    return 0 if list_target(taskset, Console(), token_counter(arguments.model)) else FAILED


def run_env_check(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from arenarl.env_commands import check_environment, load_target, token_counter

    taskset, count = load_target(arguments.target, arguments.tasks), token_counter(arguments.model)
    passed = check_environment(
        taskset, Console(), episodes=arguments.episodes, count=count, replay=arguments.replay
    )  # fmt: skip
    return 0 if passed else FAILED


def run_env_play(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from arenarl.env_commands import load_target
    from arenarl.env_play import play

    taskset = load_target(arguments.target, arguments.tasks)
    return (
        0 if play(taskset, Console(), split=arguments.split, seed=arguments.seed, replay=arguments.replay) else FAILED
    )


def run_env_record(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from arenarl.env_commands import load_target, record_episodes

    taskset = load_target(arguments.target, arguments.tasks)
    done = record_episodes(
        taskset, Console(), out=arguments.out, episodes=arguments.episodes, agent=arguments.agent
    )  # fmt: skip
    return 0 if done else FAILED


def run_env_install(arguments: argparse.Namespace) -> int:
    from arenarl.mcp.install import install

    install(arguments.names or None, report=lambda name, seconds: print(f"{name:20s} {seconds:6.1f} s", flush=True))
    return 0


def run_chat_check(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from arenarl.chat_check import check_model

    return 0 if check_model(arguments.model, Console()) else FAILED
