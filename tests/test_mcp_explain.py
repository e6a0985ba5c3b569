"""What a failed start says: one line with a remedy, no secrets, no control characters."""

from __future__ import annotations

import pytest

from arenarl.errors import McpServerError
from arenarl.mcp import McpSession, ServerSpec
from arenarl.mcp.explain import explain, secrets_of
from tests.processes import descendants
from tests.test_mcp import SERVERS, server

SECRET = "hunter2-hunter2"


async def failure(spec: ServerSpec) -> str:
    with pytest.raises(McpServerError) as caught:
        await McpSession(spec).start()
    return str(caught.value)


STARTS = [
    (server(command="no-such-program-here"), "cannot run its command ([Errno 2] No such file or directory)"),
    (server(command=str(SERVERS)), "cannot run its command ([Errno 13] Permission denied)"),
    (server(cwd=str(SERVERS / "missing")), "No such file or directory"),
    (
        server(command="cat", args=()),
        "answered the handshake with 'Method not found': it does not speak MCP",
    ),  # our own words
    (server("--start", "mute"), "exited with code 0 without serving; check that its args make it serve MCP"),
    (server("--start", "slow", start_timeout=0.3), "(start_timeout); raise limits.start_timeout"),
]


@pytest.mark.parametrize(("spec", "reason"), STARTS, ids=["no_command", "folder", "no_cwd", "echo", "mute", "slow"])
async def test_failed_start_is_one_error_in_one_line(spec: ServerSpec, reason: str):
    session = McpSession(spec)
    with pytest.raises(McpServerError) as caught:
        await session.start()
    assert str(caught.value).startswith("MCP server 'faulty' (") and "\n" not in str(caught.value)
    assert reason in str(caught.value)
    assert (await session.call("echo", {})).kind == "server_dead"
    assert not descendants()


@pytest.mark.parametrize("value", [SECRET, "${OUTER_KEY}", "${OUTER_KEY}\n${OUTER_KEY}"])
async def test_last_words_hide_what_came_from_env_and_show_no_escapes(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUTER_KEY", SECRET)
    said = await failure(server("--start", "loud", "on", "a-${OUTER_KEY}-b", env={"FAULTY_KEY": value}))
    assert SECRET not in said and said.isprintable()
    assert "bad key ***" in said and "['on', 'a-***-b']" in said and "'a-${OUTER_KEY}-b')" in said


async def test_secret_of_an_argument_that_the_server_repeats_is_hidden(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUTER_KEY", SECRET)
    spec = server(command="/missing/${OUTER_KEY}/bin", args=())
    assert "(/missing/${OUTER_KEY}/bin)".replace("(", "('").replace(")", "')") in (said := await failure(spec))
    assert SECRET not in said


ARGS = [
    (("--api-key", SECRET, "serve"), "x --api-key '***' serve"),
    (("-token", SECRET), "x -token '***'"),
    ((f"--db-password={SECRET}", "--port=5"), "x '--db-password=***' --port=5"),
    (("-e", f"GITHUB_TOKEN={SECRET}"), "x -e 'GITHUB_TOKEN=***'"),
    ((f"postgresql://me:{SECRET}@host/db",), "x 'postgresql://***@host/db'"),
    (("--keyboard", "de", "key", "door"), "x --keyboard de key door"),
]


@pytest.mark.parametrize(("args", "shown"), ARGS)
def test_command_hides_what_follows_the_name_of_a_secret(args: tuple[str, ...], shown: str):
    error = explain(ServerSpec(name="s", command="x", args=args), None, started=True)
    assert str(error) == f"MCP server 's' ({shown}) closed the connection"


def test_secrets_are_values_of_variables_env_and_headers_but_not_the_episodes():
    spec = ServerSpec(
        name="s", command="x", args=("${KEY}", "${WORKDIR}", "${SEED}"), env={"A": "first\nlast one", "B": "yes"}
    )
    variables = {"KEY": SECRET, "WORKDIR": "/tmp/episode", "SEED": "12345"}
    assert secrets_of(spec, spec.launch(variables), variables) == (SECRET, "last one", "first")
    far = ServerSpec(name="s", transport="http", url="http://far", headers={"Authorization": f"Bearer {SECRET}"})
    assert secrets_of(far, far.launch(), {}) == (f"Bearer {SECRET}", SECRET)


def test_error_of_the_server_is_one_clean_line_without_secrets():
    error = explain(
        ServerSpec(name="s", command="x"), ValueError(f"no\n\x1b[1m{SECRET}\x9b"), started=True, secrets=[SECRET]
    )
    assert str(error) == "MCP server 's' (x) failed: ValueError: no ***"
