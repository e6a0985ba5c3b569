"""Processes of a test: what it left behind, and how to make one stand still."""

import os
import signal

import psutil


def descendants() -> list[psutil.Process]:
    """Processes below this one, without Python's resource tracker, which lives as long as the interpreter that vLLM was used in."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "resource_tracker" not in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def freeze(pid: int) -> None:
    """Stop a child process, and return once it stands still: a signal is sent before it takes effect."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
