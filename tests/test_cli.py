"""The command line: each bad input is one line that names the value and the remedy, exit code 2, and no process is left."""

import json

import psutil
import pytest
from tracking_samples import make_group

from arenarl.cli import main, parse_overrides
from arenarl.errors import ConfigError
from arenarl.tracking import RunFolder

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
    odd = ["{[]: 1}", "(" * 5000, "-" * 100_000 + "1"]
    assert [parse_overrides([f"x={text}"])["x"] for text in odd] == odd
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


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([], ["COMMAND", "arenarl --help"]),
        (["nonsense"], ["'nonsense'", "train", "arena"]),
        (["arena", "simulate", "--groups", "x"], ["--groups", "'x'", "arenarl arena simulate --help"]),
        (["arena", "simulate", "--groups", "1"], ["groups=1", "2 or more"]),
        (["arena", "simulate", "--seed", "-1"], ["--seed -1", "0 or more"]),
        (["arena", "simulate", "--orders", "3"], ["3", "1, 2"]),
        (["arena", "simulate", "--topology", "swis"], ["'swis'", "'swiss'"]),
        (["arena", "simulate", "--out", "tests"], ["--out 'tests' exists already", "name another"]),
        (["arena", "simulate", "all"], ["unrecognized", "all"]),
        (["arena", "show"], ["RUN", "arenarl arena show --help"]),
        (["arena", "show", "nowhere"], ["'nowhere' does not exist", "runs/NAME"]),
        (["arena", "show", "tests", "x"], ["step", "'x'"]),
        (["plan", QUICKSTART, "judge=nowhere:Judge"], ["'nowhere:Judge'", "'module:Name'"]),
    ],
)  # fmt: skip
def test_a_command_that_makes_no_sense_is_refused_in_one_line(command, says, capsys):
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("arenarl: ") and error.count("\n") == 1 and all(part in error for part in says), error


def test_an_experiment_whose_config_fails_is_refused(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("def config():\n    return 1 / 0\n")
    assert main(["plan", str(file)]) == 2
    assert "config() of experiment file" in capsys.readouterr().err


def test_arena_simulate_prints_and_writes_a_row_for_each_tournament(tmp_path, capsys):
    out = tmp_path / "rows.json"
    plans = ["--topology", "round_robin", "anchor", "--estimator", "paper", "--players", "4", "--groups", "20"]
    assert main(["arena", "simulate", *plans, "--judge", "binary", "--theta", "1000", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("| ")]
    rows = {row[0]: row for row in cells if row[0] in ("round_robin", "anchor")}
    assert (rows["round_robin"][2:6], rows["anchor"][2:6]) == (["2", "12", "6", "1"], ["2", "6", "3", "1"])
    # a judge that never errs: all pairs give the whole order; the anchor's games say only who is above it and who below
    assert rows["round_robin"][7] == "1.000 ± 0.000"
    assert 0.2 < float(rows["anchor"][7].split()[0]) < 0.95
    assert "4 players, binary judge, theta 1000" in printed and "20 groups, seed 0" in printed
    written = {row["method"]["topology"]: row["tau"]["value"] for row in json.loads(out.read_text())}
    assert written["round_robin"] == pytest.approx(1.0) and f"{written['anchor']:.3f}" == rows["anchor"][7].split()[0]


def test_arena_show_draws_the_games_of_a_step_of_a_run(tmp_path, capsys):
    run = RunFolder(tmp_path / "run")
    run.append_group(make_group(group_id="early"), step=1)
    run.append_group(make_group(group_id="late"), step=2)
    assert main(["arena", "show", str(run.path), "1"]) == 0
    assert "early" in (first := capsys.readouterr().out) and "late" not in first
    assert main(["arena", "show", str(run.path), "--out", str(tmp_path / "last.html")]) == 0
    assert "late" in capsys.readouterr().out and "late" in (tmp_path / "last.html").read_text()
    assert "early" in (run.path / "arena" / "step-1.html").read_text()
    assert main(["arena", "show", str(run.path), "3"]) == 2
    assert "step 3 is not in run" in capsys.readouterr().err
