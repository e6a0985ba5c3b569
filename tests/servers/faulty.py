"""A tool server whose tools misbehave in all the ways that the field reports tell of. Standard library only.

Command line: ``faulty.py [--start FAULT]``. Methods that it does not know it ignores, as some servers do. It
appends a line per start and per call to the file named by FAULTY_LOG, and one per message to that named by FAULTY_METHODS.
"""

import json
import os
import signal
import subprocess
import sys
import time

NAMES = (
    "echo echo_all exit exit_after hang bad_json no_newline log_lines not_utf8 surrogate big huge unknown_content no_content "
    "bare_string structured_only structured_list string_id twice close_stdout error_result rpc_error reserved_error bad_args "
    "string_error null_result nan infinity count image nested deep stderr ask_client ask_sampling progress logs grow raw vast "
    "structured_mismatch input_required mortal blank_lines echo_request flood replies"
).split()
count = replies = 0
grown = False
modern = False


def note(words, where="FAULTY_LOG"):
    if path := os.environ.get(where):
        with open(path, "a") as file:
            file.write(words + "\n")


def write(text):
    sys.stdout.buffer.write(text.encode() if isinstance(text, str) else text)
    sys.stdout.buffer.flush()


def send(message, end="\n"):
    write(json.dumps({"jsonrpc": "2.0", **message}) + end)


def text(words, **more):
    return {"content": [{"type": "text", "text": words}], **more}


def tools():
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    odd = [
        {"name": "no_schema"},
        {"name": "no_type", "inputSchema": {"properties": {"a": True, "b": None}, "required": True}},
        {"name": "null_words", "description": None, "inputSchema": None},
        {"name": "not_an_object", "inputSchema": {"type": "array"}},
        {"description": "no name"},
        "no tool at all",
    ]
    return [
        {
            "name": name,
            "description": name,
            "inputSchema": schema,
            "outputSchema": {"type": "object", "required": ["x"]},
            "annotations": {"readOnlyHint": name == "echo", "idempotentHint": name == "echo" or "yes"},
        }
        for name in NAMES + ["grown"] * grown
    ] + odd


def call(key, name, arguments):
    global count, grown
    answer = lambda result: send({"id": key, "result": result})  # noqa: E731
    match name:
        case "echo":
            answer(text(arguments.get("text", "")))
        case "echo_all":
            answer(text(json.dumps(arguments)))
        case "exit":
            write('{"jsonrpc": "2.0", "id"')
            sys.stderr.write("out of luck\n")
            os._exit(7)
        case "exit_after":
            answer(text("last words"))
            os._exit(0)
        case "hang":
            time.sleep(1000)
        case "bad_json":
            write('{"jsonrpc": "2.0", "id": ' + str(key) + ', "result": {oops}}\n')
        case "no_newline":
            send({"id": key, "result": text("never ends")}, end="")
        case "log_lines":
            write(b"INFO started\n\n[1, 2]\n{'python': 'dict'}\n" + b'{"level": "info", "id": 1}\n' + b"\xff\xfe\n")
            answer(text("after the noise"))
        case "not_utf8":
            write(b'{"jsonrpc": "2.0", "id": %d, "result": {"content": [{"type": "text", "text": "caf\xe9"}]}}\n' % key)
        case "surrogate":
            answer(text("cut \ud800 here"))
        case "big":
            answer(text("x" * 5_000_000))
        case "huge":
            answer(text("x" * 9_000_000))
        case "unknown_content":
            answer({"content": [{"type": "hologram", "depth": 3}, {"type": "image"}, None, 5]})
        case "no_content":
            answer({})
        case "bare_string":
            send({"id": key, "result": "just text"})
        case "structured_only":
            answer({"structuredContent": {"y": 1}})
        case "structured_list":
            answer({"structuredContent": [1, 2]})
        case "string_id":
            send({"id": str(key), "result": text("same")})
        case "twice":
            answer(text("first"))
            answer(text("second"))
        case "close_stdout":
            os.close(1)
            time.sleep(1000)
        case "error_result":
            answer(text("no such city", isError=True))
        case "rpc_error":
            send({"id": key, "error": {"code": -32603, "message": "internal"}})
        case "reserved_error":
            send({"id": key, "error": {"code": -32000, "message": "busy"}})
        case "bad_args":
            send({"id": key, "error": {"code": -32602, "message": "text is missing"}})
        case "string_error":
            send({"id": key, "error": "plain"})
        case "null_result":
            send({"id": key, "result": None, "error": None})
        case "nan":
            answer({"structuredContent": {"price": float("nan")}})
        case "count":
            count += 1
            answer(text(str(count)))
        case "image":
            answer({"content": [{"type": "image", "data": "A" * 4000, "mimeType": "image/png"}]})
        case "nested":
            answer({"structuredContent": {"deep": json.loads("[" * 100 + "]" * 100)}})
        case "deep":
            write('{"jsonrpc": "2.0", "id": ' + f'{key}, "result": {{"content": {"[" * 100_000}{"]" * 100_000}}}}}\n')
        case "stderr":
            sys.stderr.write("warning: " + "y" * 100_000 + "\nthe end\n")
            sys.stderr.flush()
            answer(text("written"))
        case "ask_client":
            send({"id": "mine", "method": "roots/list"})
            answer(text("asked"))
        case "ask_sampling":  # and wait for the client's reply
            send({"id": 7, "method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}})
            answer(text(json.loads(sys.stdin.readline())["error"]["message"]))
        case "progress":
            for n in range(5000):
                token = {"progressToken": key, "progress": n}
                send({"method": "notifications/progress", "params": token})
            answer(text("done"))
        case "logs":
            send({"method": "notifications/message", "params": {"level": "shout", "data": ["x"]}})
            send({"method": "notifications/tools/list_changed", "params": 5})
            send({"method": 5})
            send({"id": {}, "method": "ping"})
            send({"id": 1.5, "method": "roots/list", "params": "none"})
            answer(text("logged"))
        case "grow":
            grown = True
            send({"method": "notifications/tools/list_changed"})
            answer(text("grown"))
        case "raw":  # the client says what to write; a good answer follows, in case that was none
            write(bytes.fromhex(arguments["hex"]).replace(b'"%ID%"', str(key).encode()) + b"\n")
            answer(text("fallback"))
        case "vast":
            write(f'{{"jsonrpc": "2.0", "id": {key}, "result": {{"content": [{{"type": "text", "text": "')
            for _ in range(50):
                write("x" * 1_000_000)
            write('"}]}}\n')
        case "structured_mismatch":
            answer(text("kept", structuredContent={"y": "no x"}))
        case "input_required":
            answer({"resultType": "input_required", "inputRequests": {}})
        case "mortal":  # dies after its third answer
            count += 1
            answer(text(str(count)))
            if count == 3:
                sys.stderr.write("worn out\n")
                os._exit(9)
        case "blank_lines":
            write("\n\r\n  \n")
            send({"id": key, "result": text("after blanks")}, end="\r\n")
        case "echo_request":  # like a terminal
            send({"id": key, "method": "tools/call", "params": {"name": name}})
            answer(text("echoed"))
        case "flood":  # does not read what it is answered before it has asked all
            for n in range(200):
                write("".join(f'{{"jsonrpc": "2.0", "id": {100 * n + k}, "method": "ping"}}\n' for k in range(100)))
            answer(text("flooded"))
        case "replies":
            answer(text(str(replies)))
        case "infinity":
            write(
                f'{{"jsonrpc": "2.0", "id": {key}, "result": {{"structuredContent": {{"n": [1e999, -1e999, 1e3]}}}}}}\n'
            )
        case _:
            send({"id": key, "error": {"code": -32602, "message": f"Unknown tool: {name}"}})


def start(fault):
    global modern
    if fault == "exit":
        sys.exit("missing API key")
    if fault == "exit_stdout":
        print("usage: faulty DIR")
        sys.exit(2)
    if fault == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if fault == "loud":  # tells its secrets, as colourful as some programs are
        sys.exit(f"\x1b[31mbad\x07 key {os.environ['FAULTY_KEY']} in {sys.argv[3:]}\x1b[0m")
    if fault in ("slow", "stubborn"):
        time.sleep(1000)
    if fault == "late":
        time.sleep(0.5)
    if fault == "log_first":
        send({"method": "notifications/message", "params": {"level": "info", "data": "loading"}})
        send({"id": "early", "method": "roots/list"})
    if fault == "modern":
        modern = True
    if fault == "banner":
        write("Welcome to the server!\nhttp://localhost:8080\n")
    if fault in ("ignore_eof", "ignore_all"):
        if fault == "ignore_all":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return True
    if fault == "family":  # a grandchild in the group, and a daemon that left it
        subprocess.Popen(["sleep", "1000"])
        subprocess.Popen(
            [sys.executable, "-c", "import os,time\nif os.fork(): os._exit(0)\nos.setsid(); time.sleep(1000)"]
        ).wait()
    return False


def main():
    global replies
    note("start")
    stay = start(sys.argv[2]) if sys.argv[1:2] == ["--start"] else False
    for line in sys.stdin:
        message = json.loads(line)
        key, method = message.get("id"), message.get("method")
        note(str(method), "FAULTY_METHODS")
        replies += method is None
        if method == "initialize" and modern:
            send({"id": key, "error": {"code": -32601, "message": "Method not found"}})
        elif method == "server/discover" and modern:
            send({"id": key, "result": {"supportedVersions": ["2026-07-28"]}})
        elif method == "initialize" and sys.argv[2:] == ["old"]:
            send({"id": key, "result": {"protocolVersion": "1999-01-01"}})
        elif method == "initialize" and sys.argv[2:] == ["mute"]:
            os._exit(0)
        elif method == "initialize":
            send({"id": key, "result": {"protocolVersion": "2025-06-18", "serverInfo": {"name": "faulty"}}})
        elif method == "tools/list":
            listing, page = tools(), int(message.get("params", {}).get("cursor", 0))
            send(
                {
                    "id": key,
                    "result": {
                        "tools": listing[page : page + 10],
                        "nextCursor": str(page + 10) if page + 10 < len(listing) else None,
                    },
                }
            )
        elif method == "tools/call":
            note(message["params"]["name"])
            call(key, message["params"]["name"], message["params"].get("arguments", {}))
    while stay:
        time.sleep(1000)


main()
