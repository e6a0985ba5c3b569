"""End to end on real parts: Ray, vLLM, MCP server, tournament, Accelerate, MLflow. The slowest tests of the suite."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tracking_samples import make_episode

from arenarl.training import most_telling

QUICKSTART = "experiments/quickstart.py"
SMALL = ["group_size=4", "groups_per_step=2", "evaluation_duration=10", "max_num_seqs=32"]


def start(run: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "arenarl.cli", "train", QUICKSTART, *SMALL, *overrides, "--run-dir", str(run)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=dict(os.environ),
    )


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def survivors(processes: list[psutil.Process]) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=10)
    return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a short run of the quickstart."""
    run = tmp_path_factory.mktemp("runs") / "short"
    process = start(run, "num_steps=3", "seed=7")
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    return run, output


def test_a_run_writes_what_scripts_rely_on(finished):
    run, output = finished
    summary = json.loads((run / "summary.json").read_text())
    for key in (
        "win_rate",
        "win_rate_ci",
        "checklist_before",
        "checklist_after",
        "valid_calls_before",
        "valid_calls_after",
    ):
        assert key in summary
    assert (summary["steps"], summary["seed"]) == (3, 7) and summary["train_seconds"] > 0
    assert json.loads((run / "config.json").read_text())["group_size"] == 4
    assert [m["step"] for m in lines(run / "metrics.jsonl")] == [1, 2, 3]
    assert len(lines(run / "episodes.jsonl")) == 3 * 2 * 4
    assert "held-out tasks" in output and "mlflow ui" in output


def test_after_each_push_the_engine_has_the_learners_weights(finished):
    metrics = lines(finished[0] / "metrics.jsonl")
    assert [m["policy/version"] for m in metrics] == [1, 2, 3]
    assert all(m["policy/canary_gap"] < 1e-4 for m in metrics)
    assert all(m["policy/lag_max"] <= 1 for m in metrics)


def test_the_record_of_each_episode_is_complete(finished):
    for episode in lines(finished[0] / "episodes.jsonl"):
        for segment in episode["segments"]:
            sampled = [bool(m) for m in segment["mask"]]
            assert any(sampled) and len(sampled) == len(segment["token_ids"])
            assert all((v >= 0) == s for v, s in zip(segment["versions"], sampled, strict=True))
            assert all(p <= 1e-5 if s else p == 0 for p, s in zip(segment["logprobs"], sampled, strict=True))


def test_the_saved_model_is_the_trained_one_and_loads(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved = AutoModelForCausalLM.from_pretrained(finished[0] / "model").state_dict()
    start = AutoModelForCausalLM.from_pretrained("experiments/tiny_agent/model").state_dict()
    assert saved.keys() == start.keys() and any(not saved[k].equal(start[k].float()) for k in saved)
    assert AutoTokenizer.from_pretrained(finished[0] / "model").chat_template


def test_mlflow_has_parameters_metrics_model_and_traces(finished):
    from mlflow import MlflowClient

    run = finished[0]
    client = MlflowClient(f"sqlite:///{run.parent / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "quickstart"]
    (logged,) = client.search_runs([experiment.experiment_id])
    assert logged.data.params["group_size"] == "4" and logged.info.status == "FINISHED"
    assert [m.step for m in client.get_metric_history(logged.info.run_id, "reward/score_mean")] == [1, 2, 3]
    assert any(f.path.endswith("model.safetensors") for f in client.list_artifacts(logged.info.run_id, "model"))
    assert len(client.search_traces(locations=[experiment.experiment_id])) == 3


def test_the_most_telling_task_has_both_scores():
    def attempts(*scores):
        return [replace(make_episode(0), score=score) for score in scores]

    assert most_telling(attempts(None, 0.5, 0.2), attempts(1.0, 0.6, 0.7)) == 2
    assert most_telling(attempts(0.1, None), attempts(None, 0.3)) == 0


def test_ctrl_c_saves_the_last_finished_step_and_leaves_no_process(tmp_path):
    run = tmp_path / "stopped"
    process = start(run, "num_steps=500")
    family: list[psutil.Process] = []
    try:
        for line in iter(process.stdout.readline, ""):
            if line.strip() and lines(run / "metrics.jsonl"):
                break
        assert process.poll() is None, "the run ended before it was stopped"
        family = psutil.Process(process.pid).children(recursive=True)
        assert any("EngineCore" in " ".join(p.cmdline()) or "VLLM" in p.name() for p in family) or len(family) > 4
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 130, output
        assert (run / "checkpoint" / "learner_group").is_dir() and (run / "model" / "model.safetensors").is_file()
        assert not (run / "summary.json").exists()
        assert not survivors(family)
    finally:
        for p in [*family, *([psutil.Process(process.pid)] if process.poll() is None else [])]:
            if p.is_running():
                p.kill()


def test_train_evaluate_save_and_restore_are_rllibs_own(tmp_path):
    import ray

    from arenarl.algorithms.arena_rl import ArenaRL
    from arenarl.cli import load_config

    ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False, ignore_reinit_error=True)
    config = load_config(QUICKSTART, [*SMALL, "num_env_runners=0", "max_staleness=0", "evaluation_duration=5"])
    algorithm = config.build_algo()
    try:
        result = algorithm.train()
        assert result["training_iteration"] == 1 and 0 <= result["reward"]["score_mean"] <= 1
        assert result["policy"]["lag_max"] == 0
        assert "score_mean" in algorithm.evaluate()["env_runners"]["reward"]
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        before, version = algorithm.learner_group.weights(), algorithm.learner_group.version
    finally:
        algorithm.stop()
    restored = ArenaRL.from_checkpoint(path)
    try:
        after = restored.learner_group.weights()
        assert all(before[name].equal(after[name]) for name in before)
        assert restored.learner_group.version >= version and restored.iteration == 1
        assert restored.env_runner.version == restored.learner_group.version
        assert restored.train()["training_iteration"] == 2
    finally:
        restored.stop()
        ray.shutdown()


EXPERIMENT = """
from arenarl.algorithms.arena_rl import ArenaRLConfig

def config():
    return (
        ArenaRLConfig()
        .environment("arenarl.envs.mcp:McpTasks", env_config={"config": "mcp.json", "tasks": "tasks.jsonl"})
        .agent(model_path="experiments/tiny_agent/model", max_model_len=768, max_tokens=16, max_turns=3)
        .training(group_size=2, groups_per_step=1, num_steps=1)
        .env_runners(num_env_runners=1)
    )
"""


def test_the_mcp_json_of_a_desktop_client_is_trained_on(tmp_path):
    server = {"command": sys.executable, "args": ["-I", "-S", os.path.abspath("tests/servers/files.py"), "${WORKDIR}"]}
    server["x-env"] = {"scope": "pool", "allow": ["list", "read_file"]}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"files": server}}) + "// from my client\n")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "What is there?", "files": {"a.txt": "1"}, "split": "train"}\n')
    (tmp_path / "mine.py").write_text(
        EXPERIMENT.replace('"mcp.json"', repr(str(tmp_path / "mcp.json"))).replace(
            '"tasks.jsonl"', repr(str(tmp_path / "tasks.jsonl"))
        )
    )
    command = [
        sys.executable,
        "-m",
        "arenarl.cli",
        "train",
        str(tmp_path / "mine.py"),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "2 tools, " in done.stdout and "mcp has no held-out tasks" in done.stdout
    episodes = lines(tmp_path / "run" / "episodes.jsonl")
    assert [episode["outcome"] in ("scored", "truncated") for episode in episodes] == [True, True]
    assert {tuple(sorted(episode["checklist"])) for episode in episodes} == {("answered", "calls_valid")}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["held_out_tasks"] == 0
