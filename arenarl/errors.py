"""One root exception, one picklable class per boundary, `boundary()` to attribute what escapes, `near_name()` for the remedy.

ArenaError
├── ConfigError          a user's value is wrong: names the value and the remedy; the command line exits with 2
├── McpServerError       a tool server would not start, died, or spoke nonsense
├── EnvError             an environment could not set up or judge an episode
│   └── BrokenFile           what the agent left behind is not what its name promises
├── EngineError          the inference engine
│   ├── InvalidRequest       do not retry
│   ├── DeadlineExceeded     a wait had an end and it came
│   ├── EngineUnavailable    dead or suspect: rebuild before use
│   └── WeightUpdateFailed   the engine is poisoned until a full reload succeeds
├── JudgeError           a judge answered with something that is no verdict
├── LearnerError         the learner group lost a rank or saw a non-finite loss
└── CanaryError          engine and learner disagree about the weights after a push
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class ArenaError(Exception):
    """Root of everything this library raises on purpose. One string argument, so Ray can pickle it."""


class ConfigError(ArenaError, ValueError):
    """A value given by the user is refused. The message names the value and the remedy."""


class McpServerError(ArenaError):
    """A tool server failed to start, died, or broke the protocol."""


class EnvError(ArenaError):
    """An environment failed outside the policy's responsibility."""


class BrokenFile(EnvError):
    """A file that the agent left behind cannot be read as what it should be. That is the agent's work, not a fault of ours."""


class EngineError(ArenaError):
    """The inference engine failed."""


class InvalidRequest(EngineError, ValueError):
    """The request can never succeed; do not retry it."""


class DeadlineExceeded(EngineError, TimeoutError):
    """The engine did not answer before the deadline of the request."""


class EngineUnavailable(EngineError):
    """The engine is dead or suspect."""


class WeightUpdateFailed(EngineError):
    """New weights did not arrive whole. The engine must not serve until a full reload succeeds."""


class JudgeError(ArenaError):
    """A judge's answer is not a verdict."""


class LearnerError(ArenaError):
    """The learner group lost a rank, or a step produced something that is not a number."""


class CanaryError(ArenaError):
    """Engine and learner log-probabilities differ by more than the bound after a weight push."""


def near_name(name: object, known: Iterable[str]) -> str:
    """What to say about an unknown name: the nearest known one, or all of them."""
    near = difflib.get_close_matches(str(name), known := list(known), 1, 0.5)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"


@contextmanager
def boundary(cls: type[ArenaError], what: str) -> Iterator[None]:
    """Attribute whatever escapes the block to one boundary; our own errors pass unchanged.

    Raises:
        cls: with ``what`` and the original message, chained to the original exception.
    """
    try:
        yield
    except ArenaError:
        raise
    except Exception as error:
        raise cls(f"{what}: {type(error).__name__}: {error}") from error
