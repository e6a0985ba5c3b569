"""A streamable HTTP server that misbehaves on purpose. Standard library only; prints its port.

The path chooses how it starts (``/mcp`` is well), the tool how it answers. Old sessions are forgotten after "forget".
"""

import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

TOOLS = [
    {"name": "echo", "annotations": {"readOnlyHint": True}},
    {"name": "no_type", "inputSchema": {}},
    "no tool at all",
]
sessions: dict[str, bool] = {}
deleted: list[str] = []
replies: list[int] = []
taken = threading.Event()


def text(words, **more):
    return {"content": [{"type": "text", "text": words}], **more}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, body=b"", kind="application/json", length=None, **headers):
        self.send_response(status)
        if kind:
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def events(self, *events):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        for event in events:
            self.wfile.write(event if isinstance(event, bytes) else f"data: {json.dumps(event)}\r\n\r\n".encode())
        self.close_connection = True

    def do_GET(self):
        if urlsplit(self.path).path == "/away":  # the older transport, with a place to post to on another host
            return self.events(b"event: endpoint\ndata: http://127.0.0.1:9/steal\n\n")
        if urlsplit(self.path).path == "/short":  # ... whose stream ends
            return self.events(b"event: endpoint\ndata: /mcp\n\n")
        self.reply(405)

    def do_DELETE(self):
        deleted.append(self.headers["mcp-session-id"])
        sessions.pop(self.headers["mcp-session-id"], None)
        self.reply(204, kind=None)

    def do_POST(self):
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key, method, path = message.get("id"), message.get("method"), urlsplit(self.path).path
        if path.startswith("/status/"):
            return self.reply(int(path.rpartition("/")[2]), b"<html>\nsorry</html>", "text/html")
        if path in ("/html", "/nothing"):
            return self.reply(200, b"<html>", "text/html" if path == "/html" else None)
        if path == "/moved":
            return self.reply(307, Location="/mcp?" + urlsplit(self.path).query)
        if path.startswith("/moved/"):
            return self.reply(307, Location=path.replace("/moved/", "/status/404?key="))
        if path in ("/loop", "/elsewhere"):
            return self.reply(307, Location="/loop" if path == "/loop" else "http://localhost:9/mcp")
        if path == "/modern" and method == "initialize":
            error = {"code": -32022, "message": "Unsupported", "data": {"supported": ["2026-07-28"]}}
            return self.reply(400, json.dumps({"jsonrpc": "2.0", "id": key, "error": error}).encode())
        if method == "initialize":
            sessions[str(len(sessions) + len(deleted))] = True
            result = {"protocolVersion": "2025-06-18", "serverInfo": {}, "instructions": 5}
            body = json.dumps({"jsonrpc": "2.0", "id": key, "result": result}).encode()
            return self.reply(200, body, Mcp_Session_Id=list(sessions)[-1])
        if path != "/modern" and self.headers["mcp-session-id"] not in sessions:
            return self.reply(404, b'{"jsonrpc": "2.0", "id": null, "error": {"code": -32001, "message": "gone"}}')
        if method is None:  # a reply, which is not taken before "replies" was called
            replies.append(key)
            taken.wait(20)
        if key is None or method is None:
            return self.reply(202, kind=None)
        if method == "tools/call":
            return self.call(key, message["params"]["name"], message["params"].get("arguments", {}))
        result = {"tools": TOOLS} if method == "tools/list" else {"supportedVersions": ["2026-07-28"]}
        self.reply(200, json.dumps({"jsonrpc": "2.0", "id": key, "result": result}, indent=1).encode())

    def call(self, key, name, arguments):
        good = {"jsonrpc": "2.0", "id": key, "result": text(arguments.get("text", "good"))}
        match name:
            case "header":
                good["result"] = text(str(self.headers[arguments["name"]]))
            case "deleted":
                good["result"] = text(" ".join(deleted))
            case "not_utf8":
                return self.reply(200, json.dumps(good).encode().replace(b"good", b"caf\xe9"))
            case "surrogate":
                good["result"] = text("cut \ud800 here")
            case "nan":
                good["result"] = {"structuredContent": {"price": float("nan")}}
            case "mismatch":
                good["result"] = text("kept", structuredContent={"y": 1})
            case "hologram":
                good["result"] = {"content": [{"type": "hologram"}]}
            case "other_id":
                good["id"] = "server-error"
            case "huge":
                good["result"] = text("x" * 2_000_000)
            case "bad_json":
                return self.reply(200, b'{"jsonrpc": oops')
            case "html":
                return self.reply(200, b"<html>", "text/html")
            case "accepted":
                return self.reply(202, kind=None)
            case "status":
                return self.reply(arguments["code"], b"Internal Server Error: password=hunter2", "text/plain")
            case "error_in_400":
                error = {"code": -32602, "message": "text is missing"}
                return self.reply(400, json.dumps({"jsonrpc": "2.0", "id": key, "error": error}).encode())
            case "forget":
                sessions.clear()
            case "cut":  # says that more will come, and hangs up
                self.close_connection = True
                return self.reply(200, b'{"jsonrpc"', length=1000)
            case "die":
                os._exit(1)
            case "hang":
                time.sleep(1000)
            case "events":
                change = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
                noise = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": 1}}
                return self.events(b": ping\n\nid: 1\ndata:\n\n", noise, change, good | {"id": "other"})
            case "flood":
                return self.events(*({"jsonrpc": "2.0", "id": n, "method": "ping"} for n in range(300)), good)
            case "replies":
                good["result"] = text(str(len(replies)))
                taken.set()
            case "events_surrogate":
                return self.events(good | {"result": text("cut \ud800 here")})
            case "events_huge":
                return self.events(good | {"result": text("x" * 2_000_000)})
            case "events_bad_json":
                return self.events(b"data: {oops\n\n")
            case "events_unclosed":
                return self.events(f"data: {json.dumps(good)}".encode())
            case "events_end":
                return self.events(b": nothing\n\n")
        self.reply(200, json.dumps(good).encode())


class Server(ThreadingHTTPServer):
    def handle_error(self, *_):
        pass


server = Server(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
