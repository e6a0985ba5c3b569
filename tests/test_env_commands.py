"""``arenarl env`` and ``arenarl chat`` on small real servers: what they show, what they find, and how they end."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from arenarl.cli import main
from arenarl.env_play import Puzzled, parse_line
from arenarl.envs.mcp import McpTasks
from arenarl.mcp.schema import argument_problem
from arenarl.random_agent import random_call
from arenarl.types import Task
from tests.processes import descendants

SERVERS = Path(__file__).parent / "servers"
MODEL = "experiments/tiny_agent/model"


def server(script: str | Path, *args: str, **block: Any) -> dict[str, Any]:
    return {"command": sys.executable, "args": ["-I", "-S", str(SERVERS / script), *args], "x-env": block}


FILES = server("files.py", "${WORKDIR}", scope="pool", allow=["read_file", "list", "where", "write_file"])
PLAIN = server("plain.py")
SUM = {"prompt": "Write 3 into sum.txt.", "id": "sum", "split": "train", "expect": {"files": {"sum.txt": "3"}}}


class OracleTasks(McpTasks):
    """One that knows how it is done."""

    def __init__(self) -> None:
        super().__init__({"mcpServers": {"plain": PLAIN}})

    def oracle(self, task: Task) -> list[str]:
        return ['<tool_call>{"name": "count", "arguments": {}}</tool_call>', f"{task.task_id} is done."]


@pytest.fixture
def config(tmp_path: Path):
    def write(**servers: Any) -> str:
        path = tmp_path / "mcp.json"
        path.write_text(json.dumps({"mcpServers": servers}))
        return str(path)

    return write


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(SUM))
    return str(path)


@pytest.fixture
def arenarl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run a command on a terminal of 160 columns: (exit code, what it printed); no process may be left."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words: str) -> tuple[int, str]:
        code = main(words)
        printed = capsys.readouterr()
        assert not descendants()
        return code, printed.out + printed.err

    return run


def row(text: str, name: str) -> str:
    """The line of a table that begins with a word, blanks collapsed."""
    (found,) = [" ".join(line.split()) for line in text.splitlines() if line.split() and name in line.split()[:2]]
    return found


# --- list --------------------------------------------------------------------------------------------------------


def test_list_names_what_is_shipped(arenarl):
    code, out = arenarl("env", "list")
    assert code == 0
    assert row(out, "arenarl/Travel-v0").startswith("arenarl/Travel-v0 travel:TravelTasks Open-ended travel planning")
    assert "arenarl/Mcp-v0" in out


def test_list_shows_servers_with_tools_and_their_cost(arenarl, config):
    code, out = arenarl("env", "list", config(files=FILES, plain=PLAIN))
    assert code == 0
    assert row(out, "files").startswith("files stdio legacy scope pool reset files started in")
    assert row(out, "plain").startswith("plain stdio legacy scope episode reset respawn started in")
    listed = '{"type": "function", "function": {"name": "count", "description": "", "parameters": {"type": "object", "properties": {}}}}'
    assert row(out, "count") == f"count {-(-len(listed) // 4)}"
    assert row(out, "write_file").endswith("a tool for files below /workspace") and " yes " not in row(
        out, "write_file"
    )
    assert " yes " in row(out, "read_file")
    total = sum(int(row(out, name).split()[1]) for name in ("read_file", "list", "where", "write_file", "count"))
    assert f"2 servers, 5 tools: about {total} tokens in every prompt" in out


def test_list_counts_with_a_models_tokenizer(arenarl, config):
    import tokenizers

    listed = '{"type": "function", "function": {"name": "count", "description": "", "parameters": {"type": "object", "properties": {}}}}'
    expected = len(tokenizers.Tokenizer.from_file(f"{MODEL}/tokenizer.json").encode(listed, add_special_tokens=False))
    code, out = arenarl("env", "list", config(plain=PLAIN), "--model", MODEL)
    assert (code, row(out, "count")) == (0, f"count {expected}")


def test_a_server_that_does_not_start_is_shown_beside_those_that_do(arenarl, config):
    broken = {"command": sys.executable, "args": ["-c", "import sys; sys.exit('missing API key')"]}
    code, out = arenarl("env", "list", config(broken=broken, plain=PLAIN))
    assert code == 1
    assert "does not start" in out and "missing API key" in out and row(out, "count").startswith("count ")


# --- check -------------------------------------------------------------------------------------------------------


def verdict(out: str, point: str) -> str:
    """The verdict on a point, with its words."""
    (found,) = [" ".join(line.split()) for line in out.splitlines() if line.split()[1:2] == [point] and line.split()[0] in ("ok", "note", "FAILED")]  # fmt: skip
    return found


def test_check_passes_on_servers_that_keep_episodes_apart(arenarl, config, tasks):
    code, out = arenarl("env", "check", config(files=FILES, plain=PLAIN), "--tasks", tasks, "--episodes", "2")
    assert code == 0, out
    assert verdict(out, "gymnasium") == "ok gymnasium check_env: 0 warnings"
    assert verdict(out, "episodes") == "ok episodes 2 of a random agent, 0 failed"
    assert verdict(out, "latency").startswith("ok latency median ")
    assert verdict(out, "deterministic").startswith("ok deterministic the same seed gave the same")
    assert verdict(out, "files").startswith("ok files ") and " 0 paths" not in verdict(out, "files")
    assert verdict(out, "isolation").startswith("ok isolation 24 of 24 answers are the same")


def test_check_finds_a_shared_server_that_has_state(arenarl, config):
    code, out = arenarl("env", "check", config(plain=server("plain.py", scope="shared")), "--episodes", "1")
    assert code == 1
    words = "'count' of 'plain' answers 'ok 1' alone, 'ok 25' after another episode"
    assert verdict(out, "isolation") == f"FAILED isolation {words}"


def test_check_finds_a_directory_that_all_episodes_write_to(arenarl, config, tmp_path):
    (tmp_path / "common").mkdir()
    common = server("files.py", str(tmp_path / "common"), allow=["list", "write_file"])
    code, out = arenarl("env", "check", config(files=common, plain=PLAIN), "--episodes", "1")
    assert code == 1
    assert verdict(out, "isolation").startswith("FAILED isolation 'list' of 'files' answers 'ok "), out


STAMP = """
import json, os, sys
for line in sys.stdin:
    m = json.loads(line)
    if m["method"] == "initialize":
        r = {"protocolVersion": "2025-06-18", "serverInfo": {"name": "s", "version": "1"}, "capabilities": {"tools": {}}}
    elif m["method"] == "tools/list":
        r = {"tools": [{"name": "stamp", "inputSchema": {"type": "object", "properties": {}}}]}
    elif m["method"] == "tools/call":
        r = {"content": [{"type": "text", "text": os.urandom(8).hex()}]}
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": m["id"], "result": r}), flush=True)
"""


def test_check_says_what_differs_from_run_to_run_and_does_not_take_it_for_a_leak(arenarl, config, tmp_path):
    (tmp_path / "stamp.py").write_text(STAMP)
    code, out = arenarl("env", "check", config(stamp=server(tmp_path / "stamp.py")), "--episodes", "1")
    assert code == 0, out
    assert "note deterministic no: with the same seed, message " in verdict(out, "deterministic")
    assert verdict(out, "isolation").startswith("note isolation 0 of 24 answers are the same each time")


def test_check_fails_where_episodes_fail(arenarl, config):
    code, out = arenarl(
        "env", "check", config(files=server("files.py", "${WORKDIR}", allow=["crash"])), "--episodes", "1"
    )
    assert code == 1
    assert verdict(out, "episodes") == "FAILED episodes 1 of a random agent, 1 failed"


# --- record and replay -------------------------------------------------------------------------------------------


def test_a_recorded_tape_needs_no_server(arenarl, config, tasks, tmp_path):
    tape = str(tmp_path / "tape.jsonl")
    code, out = arenarl("env", "record", config(files=FILES), "--tasks", tasks, "--out", tape, "--episodes", "2")
    assert code == 0 and "random agent, seed 1: " in out
    absent = config(files=FILES | {"command": f"/nowhere/{Path(sys.executable).name}"})
    code, out = arenarl("env", "check", absent, "--tasks", tasks, "--replay", tape, "--episodes", "2")
    assert code == 0, out
    assert (
        verdict(out, "deterministic").startswith("ok")
        and verdict(out, "isolation") == "note isolation not probed on a tape"
    )


def test_a_call_that_is_not_on_the_tape_ends_the_command(arenarl, config, tasks, tmp_path):
    tape = str(tmp_path / "tape.jsonl")
    assert arenarl("env", "record", config(files=FILES), "--tasks", tasks, "--out", tape, "--episodes", "1")[0] == 0
    code, out = arenarl("env", "check", config(files=FILES), "--tasks", tasks, "--replay", tape, "--episodes", "9")
    assert code == 1 and "the calls differ from those that were recorded" in out


def test_an_oracle_is_recorded(arenarl, tmp_path):
    tape = tmp_path / "tape.jsonl"
    target = "tests.test_env_commands:OracleTasks"
    code, out = arenarl("env", "record", target, "--out", str(tape), "--episodes", "1", "--agent", "oracle")
    assert code == 0 and "oracle agent, seed 0: scored, 1 calls, score 1.00" in out
    assert json.loads(tape.read_text().splitlines()[-1])["result"]["text"] == "1"


# --- play --------------------------------------------------------------------------------------------------------

TYPED = """
/tools
/tool write_file
/help
write_fil {"path": 1}
write_file oops
write_file path=sum.txt "text=3"
count
It is done.
"""


def typing(text: str, *words: str) -> tuple[int, str]:
    """Exit code and output of the command with this on its standard input."""
    command = [sys.executable, "-m", "arenarl.cli", *words]
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    return done.returncode, done.stdout


def test_a_person_plays(config, tasks):
    code, out = typing(TYPED, "env", "play", config(files=FILES, plain=PLAIN), "--tasks", str(tasks))
    assert code == 0, out
    for part in (
        "user Write 3 into sum.txt.",
        "no tool is called 'write_fil'; did you mean 'write_file'?",
        "write write_file argument=value or write_file {",
        "tool written to /workspace/sum.txt",
        "tool 1",
        "outcome scored, score 1.00",
        "yes  file sum.txt",
    ):
        assert part in out


@pytest.mark.parametrize("typed", ["count\n/quit\n", "count\n"])
def test_one_can_stop_early(config, typed):
    code, out = typing(typed, "env", "play", config(plain=PLAIN), "--seed", "4", "--split", "heldout")
    assert code == 0
    assert "outcome truncated quit, score 0.50" in out and "no   answered" in out and "yes  calls_valid" in out


TOOLS: Sequence[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "put",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer"}, "text": {"type": "string"}, "any": {}},
            },
        },
    }
]


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("put", {}),
        ('put {"n": 1, "x": [2]}', {"n": 1, "x": [2]}),
        ("put n=1 text=2 any=3 other=true", {"n": 1, "text": "2", "any": 3, "other": True}),
        ("put n=one any=[1,2] text='a b=c'", {"n": "one", "any": [1, 2], "text": "a b=c"}),
        ("put text=", {"text": ""}),
    ],
)
def test_a_line_that_begins_with_a_tool_is_a_call(line: str, arguments: dict[str, Any]):
    assert parse_line(line, TOOLS) == {
        "content": "",
        "tool_calls": [{"function": {"name": "put", "arguments": arguments}}],
    }


@pytest.mark.parametrize("line", ["hello", "puts it", "The answer is {1}", "x=1"])
def test_any_other_line_is_the_answer(line: str):
    assert parse_line(f" {line} ", TOOLS) == {"content": line}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("put {oops", "the arguments are not JSON"),
        ("put it there", "write put argument=value"),
        ("put text='a", "cannot be read: No closing quotation"),
        ('putt {"n": 1}', "no tool is called 'putt'; did you mean 'put'"),
    ],
)
def test_a_puzzling_line_is_not_sent(line: str, message: str):
    with pytest.raises(Puzzled, match=message):
        parse_line(line, TOOLS)


# --- the end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["play", "check"])
def test_ctrl_c_leaves_no_server(config, command, tmp_path):
    log = tmp_path / "log"
    hanging = server("files.py", "${WORKDIR}", allow=["hang"]) | {"env": {"FILES_LOG": str(log)}}
    run = subprocess.Popen(
        [sys.executable, "-m", "arenarl.cli", "env", command, config(files=hanging)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite in the background has it ignored
    )  # fmt: skip
    assert run.stdin is not None
    if command == "play":
        run.stdin.write("hang\n")
        run.stdin.flush()
    try:
        while not (log.exists() and "\nhang" in log.read_text()):
            assert run.poll() is None
            time.sleep(0.02)
        running = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130 and "arenarl: interrupted" in err, out + err
    assert running and not psutil.wait_procs(running, timeout=10)[1]


BAD_INPUT = [
    (["list", "nowhere.json"], "'nowhere.json' cannot be read: No such file"),
    (["list", "--model", MODEL], "need a TARGET"),
    (["list", "CONFIG", "--model", "nowhere"], "model folder 'nowhere' has no tokenizer.json"),
    (["list", "tests.tasksets:NoTasks"], "task set 'travel' has no task in its 'train' split"),
    (["check", "arenarl/Nowhere-v0"], "environment 'arenarl/Nowhere-v0' names no task set"),
    (["check", "tests.tasksets:Missing"], "environment 'tests.tasksets:Missing' cannot be built"),
    (["check", "tests.tasksets:NoTasks", "--tasks", "x"], "--tasks 'x' goes with the path of an mcp.json"),
    (["check", "CONFIG", "--tasks", "nowhere.jsonl"], "task file 'nowhere.jsonl' cannot be read"),
    (["check", "CONFIG", "--episodes", "0"], "episodes=0 is refused"),
    (["check", "CONFIG", "--replay", "nowhere.jsonl"], "there is no tape 'nowhere.jsonl'"),
    (["play", "CONFIG", "--replay", "nowhere.jsonl"], "there is no tape 'nowhere.jsonl'"),
    (["record", "CONFIG", "--out", "tape", "--agent", "oracle"], "task set 'mcp' has no oracle; use --agent random"),
    (["record", "CONFIG", "--out", "tape", "--episodes", "0"], "episodes=0 is refused"),
    (["install", "no-such-server"], "no-such-server"),
]


@pytest.mark.parametrize(("words", "message"), BAD_INPUT)
def test_bad_input_is_one_line(arenarl, config, words: list[str], message: str, tmp_path, caplog):
    target = config(plain=PLAIN)
    words = [{"CONFIG": target, "tape": str(tmp_path / "tape")}.get(word, word) for word in words]
    code, out = arenarl("env", *words)
    assert code == 2 and message in out and out.startswith("arenarl: ") and out.count("\n") == 1, out


def test_chat_check_refuses_a_missing_model(arenarl):
    code, out = arenarl("chat", "check", "no/such/model")
    assert code == 2 and "no/such/model" in out and out.count("\n") == 1


# --- the random agent --------------------------------------------------------------------------------------------

ORDER = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b"]},
        "items": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["n"]}},
        "target_path": {"type": "string"},
        "share": {"type": "number"},
    },
    "required": ["kind", "items"],
    "additionalProperties": False,
}  # fmt: skip


def test_random_arguments_fit_the_schema():
    tools, rng = [{"type": "function", "function": {"name": "order", "parameters": ORDER}}], random.Random(0)
    made = [random_call(tools, rng) for _ in range(50)]
    assert {name for name, _ in made} == {"order"}
    assert not [problem for _, arguments in made if (problem := argument_problem(json.dumps(ORDER), arguments))]
    assert {"share" in arguments for _, arguments in made} == {True, False}
    paths = [arguments["target_path"] for _, arguments in made if "target_path" in arguments]
    assert {path.startswith("/workspace") for path in paths} == {True, False}
    assert not [path for path in paths if ".." in path or (path.startswith("/") and not path.startswith("/workspace"))]
