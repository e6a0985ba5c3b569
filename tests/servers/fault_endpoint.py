"""A chat completions server that misbehaves as its script says, on a real socket, in threads of its own.

Each request takes the next step of the script; the last step is repeated. A step is a function that answers one exchange.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATIENCE_S = 20.0


class Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultEndpoint
    asked: dict[str, Any]

    def log_message(self, *_: object) -> None:
        pass

    def send(self, status: int, body: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        server = self.server
        self.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            step = server.script[min(len(server.requests), len(server.script) - 1)]
            server.requests.append(self.asked)
            server.keys.append(self.headers["Authorization"])
            server.inside += 1
            server.most_at_once = max(server.most_at_once, server.inside)
        server.arrived.release()
        try:
            step(self)
        except ConnectionError:  # the client has hung up
            self.close_connection = True
        finally:
            with server.lock:
                server.inside -= 1


Step = Callable[[Exchange], None]


class FaultEndpoint(ThreadingHTTPServer):
    """Serves while its ``with`` block runs.

    Attributes:
        url: base URL for clients.
        requests: bodies in the order of arrival; ``keys``: their Authorization headers.
        most_at_once: requests that were inside together, at most.
        arrived: acquired once for each request that has arrived.
        over: set when the block ends; what stalls then ends.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *script: Step) -> None:
        super().__init__(("127.0.0.1", 0), Exchange)
        self.script = script or (reply(),)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.lock, self.over, self.arrived = threading.Lock(), threading.Event(), threading.Semaphore(0)
        self.inside = self.most_at_once = 0
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def __enter__(self) -> FaultEndpoint:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        pass


def completion(text: str | None, finish_reason: str | None = "stop", **message: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


def reply(text: str | None = "fine", finish_reason: str | None = "stop", **message: Any) -> Step:
    return body(json.dumps(completion(text, finish_reason, **message)).encode())


def body(content: bytes) -> Step:
    """Status 200 with any bytes."""
    return lambda exchange: exchange.send(200, content)


def status(code: int, message: str = "scripted", **headers: str) -> Step:
    """An error. Headers are written with underscores: ``Retry_After="1"``."""
    return lambda exchange: exchange.send(code, json.dumps({"error": {"message": message}}).encode(), **headers)


def cut(exchange: Exchange) -> None:
    """Says that more will come, and hangs up."""
    exchange.close_connection = True
    exchange.send(200, b'{"choices": [', length=1000)


def reset(exchange: Exchange) -> None:
    """Resets the connection without an answer."""
    exchange.close_connection = True
    exchange.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.close(exchange.connection.detach())


def stall(exchange: Exchange) -> None:
    """Says nothing as long as the server lives."""
    exchange.server.over.wait(PATIENCE_S)
    exchange.close_connection = True


def together(count: int) -> Step:
    """Answers only when ``count`` requests are inside at the same time."""
    barrier = threading.Barrier(count, timeout=PATIENCE_S)

    def step(exchange: Exchange) -> None:
        barrier.wait()
        reply()(exchange)

    return step


def refusing_formats(*kinds: str) -> Step:
    """400 for a `response_format` of one of these types, and a reply that names the type that was taken."""

    def step(exchange: Exchange) -> None:
        asked: Mapping[str, Any] = exchange.asked.get("response_format", {"type": "none"})
        if asked["type"] in kinds:
            return status(400, f"'response_format' of type '{asked['type']}' is not supported")(exchange)
        return reply(asked["type"])(exchange)

    return step
