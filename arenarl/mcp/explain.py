"""Why a server failed, in one line for people: who, what happened, what to do, and its last words, without secrets."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from arenarl.errors import ArenaError, McpServerError
from arenarl.mcp.config import EPISODE_VARIABLES, Launch, ServerSpec
from arenarl.mcp.results import clean_text

if TYPE_CHECKING:
    from arenarl.mcp.remote import RemoteTransport
    from arenarl.mcp.transport import StdioTransport

_METHOD_NOT_FOUND = -32601  # JSON-RPC's
_SHORTEST_SECRET = 4  # characters; to hide "1" or "yes" wherever it stands would leave nothing to read
_SECRET_NAME = re.compile(r"-{0,2}[\w-]*(?:key|token|password|passwd|secret|credential)s?", re.IGNORECASE)


def explain(
    spec: ServerSpec,
    error: BaseException | None,
    *,
    started: bool,
    secrets: Iterable[str] = (),
    transport: StdioTransport | None = None,
    remote: RemoteTransport | None = None,
) -> BaseException:
    """An error that says it all; one that already does so (an `ArenaError`) is returned as it is.

    Args:
        error: what ended the session; None if the server only went away.
        started: whether the session was open before.
        secrets: see `secrets_of`; none of them is in the message.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ArenaError):
        return error
    secrets = tuple(secrets)
    if transport is not None and transport.spawn_error:
        why = _readable(transport.spawn_error, secrets)
        what = f"cannot run its command ({why}); check command, PATH and cwd"
    elif transport is not None and transport.ended and transport.exit_code is not None:
        code = transport.exit_code
        what = f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"
        if code == 0 and not started:
            what += " without serving; check that its args make it serve MCP over stdin and stdout"
    elif isinstance(error, TimeoutError) and started:
        what = "did not end in time"
    elif isinstance(error, TimeoutError):
        what = f"did not start within {spec.start_timeout:g} s (start_timeout); raise limits.start_timeout"
    elif remote is not None and remote.problem:
        what = _readable(remote.problem, secrets)
    elif not started and getattr(error, "code", None) == _METHOD_NOT_FOUND:
        era = "" if spec.era == "auto" else f", or not that of era {spec.era!r}"
        what = f"answered the handshake with {_readable(str(error), secrets)!r}: it does not speak MCP{era}"
    else:
        what = f"failed: {type(error).__name__}: {_readable(str(error), secrets)}" if error else "closed the connection"
    stream, text = "stderr", transport.stderr_tail if transport else ""
    if transport is not None and not text.strip():
        stream, text = "stdout", "\n".join(transport.stdout_log)
    words = [shown for line in text.splitlines() if (shown := _readable(line, secrets))][-5:]
    said = f"; last words on {stream}: {' | '.join(words)[-800:]}" if words else ""
    return McpServerError(f"MCP server {spec.name!r} ({_place(spec)}) {what}{said}")


def secrets_of(spec: ServerSpec, launch: Launch, variables: Mapping[str, str]) -> tuple[str, ...]:
    """What a message must not show of a launch, longest first: its variables' values, its env and its headers.

    A value of several lines is hidden line by line, and of a header also what follows its scheme ("Bearer ...").
    """
    names = spec.variables.difference(EPISODE_VARIABLES)
    values = [value for name in names if (value := variables.get(name) or os.environ.get(name))]
    values += [*launch.env.values(), *launch.headers.values()]
    values += [value.strip().rpartition(" ")[2] for value in launch.headers.values()]
    # What an episode sets is no secret, even as a variable of the environment, and to know the directory helps.
    known = {variables.get(name) for name in EPISODE_VARIABLES}
    lines = {line.strip() for value in values for line in value.splitlines()} - known
    return tuple(sorted((line for line in lines if len(line) >= _SHORTEST_SECRET), key=len, reverse=True))


def _readable(text: str, secrets: Iterable[str]) -> str:
    """Foreign text in one line: no terminal escapes, no control characters, no secrets, at most about 800 characters."""
    text = "".join(c if c.isprintable() else " " for c in clean_text(text))
    for secret in secrets:
        text = text.replace(secret, "***")
    return " ".join(text.split())[-800:]


def _place(spec: ServerSpec) -> str:
    """Where the server is, without secrets: variables stay unfilled, and a query and a password are left out."""
    if spec.url:
        parts = urlsplit(spec.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if not spec.command:
        return repr(spec.factory)
    shown, hide = [spec.command], False
    for arg in spec.args:
        name, equals, _ = arg.partition("=")
        secret = _SECRET_NAME.fullmatch(name) is not None
        if hide or (secret and equals):
            shown.append("***" if hide else f"{name}=***")
            hide = False
        else:
            shown.append(re.sub(r"//[^/@\s]*@", "//***@", arg))
            hide = secret and name.startswith("-")
    return shlex.join(shown)[:200]
