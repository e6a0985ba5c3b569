"""The command line: ``arenarl train | eval | plan | env ... | chat check | arena ... | pool show``. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from arenarl import __version__
from arenarl.cli_env import add_env_commands
from arenarl.errors import ArenaError, ConfigError, boundary

if TYPE_CHECKING:
    from arenarl.config import AgentConfig

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, as everything else here does."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 0 done, 2 for input that is refused (one line on stderr), 1 for a run that failed, 130 stopped."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two torch threads on two busy cores are many times slower than one
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # "module:Class" may be a file of the user's, here
    try:
        arguments = _arguments(argv)
        return arguments.run(arguments)
    except ConfigError as error:
        return _complain(error, BAD_INPUT)
    except ArenaError as error:
        from arenarl.errors import McpServerError

        return _complain(error, BAD_INPUT if isinstance(error, McpServerError) else FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse gives up on positional arguments that follow an option
        arguments.overrides += rest
    return arguments


def _complain(error: object, code: int) -> int:
    print(f"arenarl: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="arenarl", description="Train tool-using agents on the ranking of a tournament.")
    parser.add_argument("--version", action="version", version=f"arenarl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Any, text: str, parent: Any = commands) -> argparse.ArgumentParser:
        command = parent.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    def experiment(command: argparse.ArgumentParser) -> None:
        command.add_argument("experiment", help="Python file with a function config() or tuner()")
        command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="fields of the configuration")

    train = add("train", run_train, "train, evaluate, save")
    experiment(train)
    train.add_argument("--run-dir", help="folder of the run (default: runs/EXPERIMENT-TIME)")
    _add_eval_options(add, experiment)
    experiment(add("plan", run_plan, "show what a run would do, and play one episode with a random agent"))
    add_env_commands(add)
    _add_arena_commands(add)
    _add_pool_commands(add)
    return parser


def _add_eval_options(add: Any, experiment: Any) -> None:
    evaluate = add("eval", run_eval, "play the held-out tasks with a model, and compare it with another or with a file")
    experiment(evaluate)
    evaluate.add_argument("--against", metavar="MODEL", help="model folder of the other side")
    evaluate.add_argument(
        "--reference", metavar="FILE", help="stored attempts as the other side, as --save writes them"
    )
    evaluate.add_argument("--attempts", type=int, default=1, metavar="K", help="attempts of a model at each task")
    evaluate.add_argument(
        "--judge", action="append", default=[], metavar="module:Class{JSON}",
        help="one more judge, with its arguments as JSON; may be repeated",
    )  # fmt: skip
    evaluate.add_argument(
        "--success", type=float, default=1.0, help="score that counts as a success in pass@k and pass^k"
    )
    evaluate.add_argument("--save", metavar="FILE", help="store our attempts for a later --reference")
    evaluate.add_argument("--out", metavar="FILE", help="also write the report as JSON")


def _add_arena_commands(add: Any) -> None:
    arena = add("arena", None, "tournaments").add_subparsers(required=True, metavar="COMMAND")
    simulate = add("simulate", run_arena_simulate, "how well each tournament ranks under a simulated judge", arena)
    simulate.add_argument("--topology", nargs="+", default=None, metavar="NAME", help="default: all of them")
    simulate.add_argument("--estimator", nargs="+", default=None, metavar="NAME", help="default: all that fit")
    simulate.add_argument("--players", type=int, nargs="+", default=[16], metavar="N", help="players in a group")
    simulate.add_argument(
        "--judge", nargs="+", default=["margin"], metavar="KIND", help="margin, coarse, lapse, binary"
    )
    simulate.add_argument("--theta", type=float, nargs="+", default=[1.5], help="sharpness of the judge")
    simulate.add_argument("--groups", type=int, default=200, help="simulated groups for each row")
    simulate.add_argument("--orders", type=int, choices=(1, 2), default=None, help="how often each pair is asked")
    simulate.add_argument("--missing", type=float, default=0.0, help="share of games without a verdict")
    simulate.add_argument("--seed", type=int, default=0)
    simulate.add_argument("--out", metavar="FILE", help="also write the rows as JSON")
    show = add("show", run_arena_show, "draw the tournaments of a step of a run", arena)
    show.add_argument("folder", metavar="RUN", help="run folder")
    show.add_argument("step", type=int, nargs="?", default=None, help="default: the last step")
    show.add_argument("--out", metavar="FILE", help="HTML file (default: RUN/arena/step-N.html)")


def _add_pool_commands(add: Any) -> None:
    pool = add("pool", None, "generated tasks").add_subparsers(required=True, metavar="COMMAND")
    show = add("show", run_pool_show, "list the tasks of a pool, or show one with its rubric and its sources", pool)
    show.add_argument("file", metavar="FILE", help="pool of tasks (.parquet)")
    show.add_argument("task", nargs="?", default=None, metavar="TASK", help="id of a task, or its beginning")
    show.add_argument("--limit", type=int, default=20, metavar="N", help="rows at most")


# -- experiments ----------------------------------------------------------------------------------------------------------


def load_experiment(path: str) -> ModuleType:
    """Import an experiment file. Raises ConfigError if it is missing or defines neither config() nor tuner()."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"experiment file '{path}' does not exist; give the path of a Python file with a config() function"
        )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    with boundary(ConfigError, f"experiment file '{path}' cannot be run"):
        spec.loader.exec_module(module)
    if not (hasattr(module, "config") or hasattr(module, "tuner")):
        raise ConfigError(f"experiment file '{path}' defines neither config() nor tuner(); add one")
    return module


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE pairs; a value is a Python literal if it reads as one (``3e-4``, ``None``, ``{'noise': 0.1}``), else text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {pair!r} is not of the form KEY=VALUE")
        try:
            values[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # all that literal_eval raises
            values[key] = text
    return values


def load_config(path: str, overrides: Sequence[str]) -> AgentConfig:
    """The configuration of an experiment with overrides, validated."""
    module = load_experiment(path)
    if not hasattr(module, "config"):
        raise ConfigError(f"experiment file '{path}' has no config(); this command needs one")
    with boundary(ConfigError, f"config() of experiment file '{path}' fails"):
        config = module.config()
    config = config.update_from_dict(parse_overrides(overrides))
    config.validate()
    return config


def check_outputs(paths: Mapping[str, str | None]) -> None:
    """What takes minutes shows first that its results, by option, can be written, and that they replace nothing.

    Raises:
        ConfigError: a path exists, has no folder, or is given twice.
    """
    seen: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        with boundary(ConfigError, f"{option} {path!r} cannot be a file"):
            file = Path(path).resolve()
            exists, has_folder = file.exists(), file.parent.is_dir()
        if exists:
            raise ConfigError(f"{option} {path!r} exists already; name another file or remove it")
        if not has_folder:
            raise ConfigError(
                f"{option} {path!r} is in a folder that does not exist; make {str(Path(path).parent)!r} first"
            )
        if file in seen:
            raise ConfigError(f"{seen[file]} and {option} are both {path!r}; name two files")
        seen[file] = option


def start_ray() -> None:
    """A cluster of our own on this machine, or the one that RAY_ADDRESS names."""
    import logging

    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "local")
    own = {"num_cpus": max(2, os.cpu_count() or 2), "include_dashboard": False} if address == "local" else {}
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=True, **own)


# -- commands -------------------------------------------------------------------------------------------------------------


def run_train(arguments: argparse.Namespace) -> int:
    module = load_experiment(arguments.experiment)
    if hasattr(module, "tuner"):
        if arguments.overrides:
            raise ConfigError(
                f"{arguments.experiment} makes a Tuner, which takes no KEY=VALUE; got {arguments.overrides[0]!r}"
            )
        start_ray()
        module.tuner().fit()
        return 0
    config = load_config(arguments.experiment, arguments.overrides)
    name = f"{Path(arguments.experiment).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    config.tracking(run_dir=arguments.run_dir or config.run_dir or str(Path("runs") / name))
    from arenarl.preflight import preflight
    from arenarl.training import train

    preflight(
        config, config.build_taskset()
    )  # refuse what can be refused before the cluster takes its seconds to start
    start_ray()
    return 0 if train(config) is not None else INTERRUPTED


def run_eval(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from arenarl.evaluation import plan_evaluation, run_evaluation

    check_outputs({"--save": arguments.save, "--out": arguments.out})
    plan = plan_evaluation(
        load_config(arguments.experiment, arguments.overrides), against=arguments.against, reference=arguments.reference,
        attempts=arguments.attempts, judges=arguments.judge, success=arguments.success, save=arguments.save,
        out=arguments.out,
    )  # fmt: skip
    start_ray()
    run_evaluation(plan, Console())
    return 0


def run_plan(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from arenarl.plan import show_plan

    show_plan(load_config(arguments.experiment, arguments.overrides), Console())
    return 0


def run_arena_simulate(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from arenarl.study import simulate

    check_outputs({"--out": arguments.out})
    if arguments.seed < 0:
        raise ConfigError(f"--seed {arguments.seed} is no seed; give 0 or more")
    simulate(
        Console(), topologies=arguments.topology, estimators=arguments.estimator, players=arguments.players,
        kinds=arguments.judge, thetas=arguments.theta, groups=arguments.groups, seed=arguments.seed,
        orders=arguments.orders, missing=arguments.missing, out=arguments.out,
    )  # fmt: skip
    return 0


def run_arena_show(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from arenarl.arena_show import show

    return show(Path(arguments.folder), arguments.step, Console(), out=Path(arguments.out) if arguments.out else None)


def run_pool_show(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from arenarl.pool_show import show

    if arguments.limit < 1:
        raise ConfigError(f"--limit {arguments.limit} shows nothing; give 1 or more")
    return show(Path(arguments.file), Console(), limit=arguments.limit, task=arguments.task)


if __name__ == "__main__":
    sys.exit(main())
