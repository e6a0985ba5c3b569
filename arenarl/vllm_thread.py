"""Where vLLM's core lives: in a child process that ends with its parent, or, on CPU, in a thread of the caller.

`AsyncLLM` talks to its core over ipc sockets, so the core may live anywhere. In a thread it starts in half a second once vLLM is
imported. vLLM offers no such launcher: this module stands in for private names of one exact minor version. With any other, a
thread is refused in favour of a process. Threads take turns: several engines of a process share its core fairly.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCoreProc

T = TypeVar("T")

log = logging.getLogger(__name__)

SUPPORTED = (0, 32)
leftovers: set[str] = set()  # folders of the parent that the core's process removes if the parent is killed
_launching = threading.Lock()


class TurnLock:
    """A lock that is handed over in the order of arrival: who works without a pause cannot keep the others out."""

    def __init__(self) -> None:
        self._mutex, self._held = threading.Lock(), False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._mutex:
            if not self._held:
                self._held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False


_computing = TurnLock()
"""One core of the process computes at a time: vLLM's CPU kernels share one scratch buffer, and two at once corrupt the heap."""
_living: set[CoreThread] = set()  # changes by turns


def end_with_parent() -> None:
    """In the process of a core: watch the parent, and end when it has ended, however that was. Elsewhere: nothing."""
    parent = multiprocessing.parent_process()
    if parent is None or multiprocessing.current_process().name != "EngineCore":
        return

    def watch() -> None:
        parent.join()
        for folder in leftovers:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def run_core(*args: Any, **kwargs: Any) -> None:
    """Entry point of a core's process: vLLM's own, with the parent watched from the start."""
    end_with_parent()
    from vllm.v1.engine.core import EngineCoreProc

    EngineCoreProc.run_engine_core(*args, **kwargs)


class CoreThread:
    """Has the methods of vLLM's `CoreEngineProcManager` that its client calls, and runs one core in a daemon thread."""

    def __init__(self, **launch: Any) -> None:
        self.manager_stopped = threading.Event()
        self.failed_proc_name: str | None = None
        self._over = threading.Event()
        self._sentinel, self._life = socket.socketpair()  # the client polls the one for the end of the other
        self._core: EngineCoreProc | None = None
        self._thread = threading.Thread(target=self._run, args=(launch,), name="EngineCore", daemon=True)
        self._thread.start()

    def _run(self, launch: dict[str, Any]) -> None:
        import torch
        from vllm.v1.engine.core import EngineCoreProc

        launch = {
            k: v for k, v in launch.items() if k not in ("local_engine_count", "start_index", "local_start_index")
        }
        try:
            with _computing:  # it computes to measure itself
                set_num_threads = torch.set_num_threads
                try:
                    self._core = core = EngineCoreProc(**launch, engine_index=0)
                    _living.add(self)
                finally:
                    torch.set_num_threads = set_num_threads  # vLLM's CPU worker switches it off for the whole process
            core.step_fn = _in_turn(core.step_fn)
            if not self.manager_stopped.is_set():
                core.run_busy_loop()
        except SystemExit:
            pass
        except BaseException:
            self.failed_proc_name = "EngineCore thread"
            log.exception("the thread of the engine core died")
            if self._core is not None:
                self._core._send_engine_dead()
        finally:
            if self._core is not None:
                self._end(self._core)
            self._over.set()
            self._life.close()

    def _end(self, core: EngineCoreProc) -> None:
        """Take a core down. vLLM's parallel groups belong to the process: the last core alone takes them along."""
        from vllm.v1.engine import core as of_cores

        with _computing:
            _living.discard(self)
            cleanup = of_cores.cleanup_dist_env_and_memory
            if _living:
                of_cores.cleanup_dist_env_and_memory = lambda: None
            try:
                core.shutdown()
            finally:
                of_cores.cleanup_dist_env_and_memory = cleanup

    def shutdown(self, timeout: float | None = None) -> None:
        from vllm.v1.engine import EngineCoreRequestType
        from vllm.v1.engine.core import EngineShutdownState

        self.manager_stopped.set()
        if self._core is not None and not self._over.is_set():
            self._core.shutdown_state = EngineShutdownState.REQUESTED
            self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        self._thread.join(timeout)
        self._sentinel.close()

    def monitor_engine_liveness(self) -> None:
        self._over.wait()

    def sentinels(self) -> list[int]:
        return [self._sentinel.fileno()]

    def finished_procs(self) -> dict[str, int]:
        return {"EngineCore thread": 1} if self._over.is_set() else {}


def _in_turn(step: Callable[[], T]) -> Callable[[], T]:
    def taken() -> T:
        with _computing:
            return step()

    return taken


def build_llm(arguments: Mapping[str, Any], core: Literal["process", "thread"]) -> AsyncLLM:
    """An `AsyncLLM` from arguments of `AsyncEngineArgs`, its core in a process or a thread. Takes seconds.

    vLLM preloads libraries for its core; the processes that this one starts later, such as tool servers, do not inherit them.
    """
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    with core_in(core):  # one build at a time, so none keeps what another has preloaded
        preload = os.environ.get("LD_PRELOAD")
        try:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        finally:
            os.environ.pop("LD_PRELOAD", None)
            if preload is not None:
                os.environ["LD_PRELOAD"] = preload


@contextmanager
def core_in(place: Literal["process", "thread"]) -> Iterator[None]:
    """While the block builds an `AsyncLLM`, its core starts in a process or in a thread. One build at a time."""
    import vllm
    from vllm.v1.engine import utils
    from vllm.v1.engine.core import EngineCoreProc

    with _launching:
        if vllm.__version_tuple__[:2] != SUPPORTED:
            if place == "thread":
                log.warning("core='thread' needs vLLM %d.%d, not %s: using a process", *SUPPORTED, vllm.__version__)
            yield
            return
        manager, entry = utils.CoreEngineProcManager, EngineCoreProc.run_engine_core
        if place == "thread":
            utils.CoreEngineProcManager = CoreThread  # type: ignore[misc, assignment]
        EngineCoreProc.run_engine_core = staticmethod(run_core)  # pickled by name: the child has the original
        try:
            yield
        finally:
            utils.CoreEngineProcManager = manager  # type: ignore[misc]
            EngineCoreProc.run_engine_core = staticmethod(entry)
