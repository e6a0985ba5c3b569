"""A real vLLM OpenAI server for the tests of judges, with the tiny travel agent as its model: the marks are noise, the rest is real."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY_AGENT = ROOT / "experiments" / "tiny_agent" / "model"
READY = "Application startup complete"


@dataclass(frozen=True)
class VLLMServer:
    base_url: str
    model: str


def command(port: int) -> list[str]:
    settings = {
        "--model": TINY_AGENT,
        "--served-model-name": "tiny",
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "float32",
        "--max-model-len": 8192,  # a judge's prompt is longer than anything that the agent was made for
        "--hf-overrides": '{"max_position_embeddings": 8192}',
        "--max-num-seqs": 16,
        "--block-size": 32,
        "--kv-cache-memory-bytes": 32 << 20,
        "--distributed-executor-backend": "uni",
        "--generation-config": "vllm",
        # a weak model writes white space to the end of its context where a grammar lets it
        "--structured-outputs-config": '{"backend": "xgrammar", "disable_any_whitespace": true}',
    }
    flags = ["--enforce-eager", "--no-enable-chunked-prefill", "--disable-log-stats"]
    words = [str(word) for item in settings.items() for word in item]
    return [sys.executable, "-m", "tests.servers.vllm_openai", *words, *flags]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def serving() -> Iterator[VLLMServer]:
    port, said, ready = free_port(), deque[str](maxlen=60), threading.Event()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command(port), cwd=ROOT, **pipes) as process:

        def listen() -> None:
            for line in process.stdout or ():
                said.append(line)
                if READY in line:
                    ready.set()
            ready.set()  # it has ended

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        try:
            assert ready.wait(240) and process.poll() is None, "".join(said)
            yield VLLMServer(f"http://127.0.0.1:{port}/v1", "tiny")
        finally:
            process.kill()
            listener.join()
