"""A tool server that keeps files in a directory and a counter in memory. Standard library only.

Command line: ``files.py [DIRECTORY]``, the current one if none is given. It appends a line per start and per call to the
file named by FILES_LOG, and makes the file FILES_AT_START when it starts. With FILES_NOTE_AT_START it notes what it then
finds in the directory. With FILES_WAIT=N it answers when N servers have
started. Relative paths are in the directory, absolute ones wherever they say.
"""

import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").absolute()
READS = ("read_file", "list", "where", "peek")
TOOLS = (
    *READS,
    "write_file",
    "count",
    "reset",
    "fail_reset",
    "crash",
    "hang",
    "slow_write",
    "add_tool",
    "detach",
    "variables",
)
state = {"count": 0, "tools": list(TOOLS), "reset_fails": False}


def note(words):
    if path := os.environ.get("FILES_LOG"):
        with open(path, "a") as file:
            file.write(words + "\n")


def send(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def listing():
    schema = {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}
    words = f"a tool for files below {ROOT}"
    return [
        {"name": n, "description": words, "inputSchema": schema, "annotations": {"readOnlyHint": n in READS}}
        for n in state["tools"]
    ]


def run(name, arguments):
    path = ROOT / arguments.get("path", ".")
    match name:
        case "read_file":
            return path.read_text()
        case "list":
            return "\n".join(sorted(str(p.relative_to(ROOT)) for p in ROOT.rglob("*")))
        case "where":
            return f"{ROOT} and {path}"
        case "peek":
            return str(state["count"])
        case "write_file" | "slow_write":
            if name == "slow_write":
                time.sleep(0.3)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(arguments["text"])
            return f"written to {path}"
        case "count":
            state["count"] += 1
            return str(state["count"])
        case "reset":
            if state["reset_fails"]:
                raise RuntimeError("cannot be reset")
            state["count"] = 0
            return "reset"
        case "fail_reset":
            state["reset_fails"] = True
        case "crash":
            os._exit(3)
        case "hang":
            time.sleep(1000)
        case "add_tool":
            state["tools"].append("one_more")
            send({"method": "notifications/tools/list_changed"})
        case "detach":  # another directory in the place of its own
            ROOT.rename(f"{ROOT}.old")
            ROOT.mkdir()
        case "variables":
            return " ".join(os.environ.get(key, "-") for key in ("SEED", "EPISODE"))
    return "done"


def main():
    note("start")
    while Path(os.environ.get("FILES_LOG", os.devnull)).read_text().split().count("start") < int(
        os.environ.get("FILES_WAIT", 0)
    ):
        time.sleep(0.01)  # for the others
    if os.environ.get("FILES_NOTE_AT_START"):
        note(f"finds {sorted(os.listdir(ROOT))}")
    if name := os.environ.get("FILES_AT_START"):
        (ROOT / name).write_text("made at the start")
    for line in sys.stdin:
        message = json.loads(line)
        key, method = message.get("id"), message.get("method")
        if method == "initialize":
            capabilities = {"tools": {"listChanged": True}}
            info = {"name": "files", "version": "1"}
            send(
                {
                    "id": key,
                    "result": {"protocolVersion": "2025-06-18", "capabilities": capabilities, "serverInfo": info},
                }
            )
        elif method == "tools/list":
            note("tools/list")
            send({"id": key, "result": {"tools": listing()}})
        elif method == "tools/call":
            name, arguments = message["params"]["name"], message["params"].get("arguments", {})
            note(f"{name} {arguments.get('path', '')}".strip())
            try:
                result = {"content": [{"type": "text", "text": run(name, arguments)}]}
            except Exception as error:
                result = {"content": [{"type": "text", "text": f"{error}"}], "isError": True}
            send({"id": key, "result": result})


main()
