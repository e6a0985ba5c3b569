"""Which processes a test may have left behind."""

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
