"""vLLM's own OpenAI server on CPU, its core in a thread, which saves a process and half of the start. Ends with its stdin."""

import os
import runpy
import sys
import threading

from arenarl.vllm_settings import cpu_environment

os.environ.update(cpu_environment() | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})


def end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=end_with_stdin, daemon=True).start()
    from arenarl.vllm_thread import core_in

    with core_in("thread"):
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
