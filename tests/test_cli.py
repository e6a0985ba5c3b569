"""The command line: each bad input is one line that names the value and the remedy, exit code 2, and no process is left."""

import psutil
import pytest

from arenarl.cli import main, parse_overrides
from arenarl.errors import ConfigError

QUICKSTART = "experiments/quickstart.py"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["group_sise=4"], ["'group_sise'", "did you mean 'group_size'"]),
        (["model_path=no/such/folder"], ["'no/such/folder' does not exist", "give the path"]),
        (["env=tests.tasksets:MissingCommand"], ["ghost", "no-such-command-anywhere"]),
        (["env=tests.tasksets:ExitsAtStart"], ["broken", "3", "missing API key"]),
        (["env=tests.tasksets:NoTasks"], ["'travel' has no task in its 'train' split", "at least one"]),
        (["env=tests.tasksets:Missing"], ["'tests.tasksets:Missing'", "give 'module:Name'"]),
        (["group_size=1"], ["group_size=1", "set group_size to 2 or more"]),
        (["topology=even_grpah"], ["even_grpah", "even_graph"]),
        (["lr=-1"], ["lr=-1", "positive"]),
        (["max_staleness=-1"], ["max_staleness=-1", "0 (synchronous)"]),
        (["kv_cache_bytes=1000"], ["kv_cache_bytes=1000", "give at least"]),
        (["max_tools_tokens=5"], ["7 tools cost", "max_tools_tokens is 5", "allow-list (x-env.allow) for travel"]),
        (["max_result_tokens=0"], ["max_result_tokens=0", "positive"]),
        (["judge=nowhere:Judge"], ["'nowhere:Judge'", "give 'module:Name'"]),
        (["group_size"], ["'group_size'", "KEY=VALUE"]),
    ],
)
def test_bad_input_is_one_line_with_the_remedy_and_leaves_nothing_behind(overrides, says, capsys, tmp_path):
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    code = main(["train", QUICKSTART, "--run-dir", str(tmp_path / "run"), *overrides])
    error = capsys.readouterr().err
    assert code == 2
    assert error.count("\n") == 1 and all(part in error for part in says), error
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before


def test_a_missing_experiment_is_refused(capsys):
    assert main(["train", "nowhere.py"]) == 2
    assert "'nowhere.py' does not exist" in capsys.readouterr().err


def test_an_experiment_without_config_is_refused(tmp_path, capsys):
    file = tmp_path / "empty.py"
    file.write_text("x = 1\n")
    assert main(["plan", str(file)]) == 2
    assert "defines neither config() nor tuner()" in capsys.readouterr().err


def test_overrides_are_literals_where_they_read_as_one():
    assert parse_overrides(["lr=3e-4", "run_dir=None", "env=a.b:C", "judge_config={'noise': 0.1}", "x=a=b"]) == {
        "lr": 3e-4, "run_dir": None, "env": "a.b:C", "judge_config": {"noise": 0.1}, "x": "a=b",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_overrides(["=3"])


def test_plan_shows_configuration_resources_and_a_random_episode(capsys):
    assert main(["plan", QUICKSTART, "group_size=4", "groups_per_step=2", "num_steps=5"]) == 0
    out = capsys.readouterr().out
    for part in (
        "group_size",
        "episodes in all",
        "40",
        "wanted 1",
        "one episode of a random agent",
        "outcome",
        "7 tools, ",
    ):
        assert part in out


def test_env_check_passes_on_travel(capsys):
    assert main(["env", "check", "arenarl/Travel-v0", "--episodes", "2"]) == 0
    assert "check_env: 0 warnings" in capsys.readouterr().out


def test_arena_ranks_players_of_known_strength(capsys):
    assert main(["arena", "--topology", "round_robin", "--players", "6", "--noise", "0"]) == 0
    out = capsys.readouterr().out
    assert "15 games in 1 rounds" in out
    strengths = [float(line.split()[1]) for line in out.splitlines()[1:7]]
    assert strengths == sorted(strengths, reverse=True)
