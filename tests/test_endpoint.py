"""The chat endpoint against a server that misbehaves on a real socket."""

import asyncio
import email.utils
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from arenarl.endpoint import OpenAIEndpoint, Outage, Reply
from arenarl.endpoint_wire import backoff, guess_tokens, seconds_until
from arenarl.errors import ConfigError
from tests.judging import ask, kind
from tests.servers.fault_endpoint import (
    FaultEndpoint,
    body,
    completion,
    cut,
    refusing_formats,
    reply,
    reset,
    stall,
    status,
    together,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
DEEP = b"[" * 100_000
NESTED = "[" * 700 + "]" * 700  # which the parser takes, and what walks through it may not
KEY = "ARENARL_TEST_KEY"
ROOT = Path(__file__).resolve().parent.parent


def completion_with(**message: str) -> bytes:
    """A completion whose message has these members, given as JSON text."""
    text = ", ".join(f'"{name}": {value}' for name, value in message.items())
    return f'{{"choices": [{{"finish_reason": "stop", "message": {{{text}}}}}]}}'.encode()


@pytest.fixture
def key() -> Iterator[str]:
    """A key in the environment, with the line end that `cat` of a file leaves behind it."""
    os.environ[KEY] = "sk-very-secret\n"
    yield "sk-very-secret"
    del os.environ[KEY]


async def ask_once(*script, **settings) -> tuple[Reply | Outage, FaultEndpoint]:
    with FaultEndpoint(*script) as server:
        endpoint = OpenAIEndpoint(server.url, "judge", **settings)
        result = await ask(endpoint)
        await endpoint.aclose()
        return result, server


@pytest.mark.parametrize(
    ("script", "expected", "calls"),
    [
        ((reply(),), "stop", 1),
        ((reply(finish_reason="length"),), "length", 1),
        ((reply(finish_reason=None),), "stop", 1),
        ((status(429), reply()), "stop", 2),
        ((status(503), reply()), "stop", 2),
        ((status(408), status(500), reply()), "stop", 3),
        ((reset, reply()), "stop", 2),
        ((cut, reply()), "stop", 2),
        ((reply(finish_reason="abort"), reply()), "stop", 2),
        ((reply(finish_reason="error"), reply()), "stop", 2),
        ((status(404), reply()), "refused", 1),
        ((status(400, "the prompt is too long"), reply()), "refused", 1),
        ((status(429, "insufficient_quota"), reply()), "refused", 1),
        ((reply(None, refusal="I do not judge"), reply()), "refused", 1),
        ((reply("half", "content_filter"), reply()), "refused", 1),
        ((reply(None), reply()), "protocol", 1),
        ((body(b"<html>"), reply()), "protocol", 1),
        ((body(b'{"choices": [{"mess'), reply()), "protocol", 1),
        ((body(b"[]"), reply()), "protocol", 1),
        ((body(b'{"error": {"code": 502}}'), reply()), "protocol", 1),
        ((body(b'{"choices": [7]}'), reply()), "protocol", 1),
        ((body(b"\xff\xfe"), reply()), "protocol", 1),
        ((body(DEEP), reply()), "protocol", 1),
        ((body(b""), reply()), "protocol", 1),
        ((body(completion_with(content=NESTED)), reply()), "protocol", 1),
        ((body(completion_with(refusal=NESTED)), reply()), "refused", 1),
    ],
)
async def test_what_a_server_does_and_what_comes_of_it(script, expected, calls):
    result, server = await ask_once(*script)
    assert (kind(result), result.calls, len(server.requests)) == (expected, calls, calls)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(status(429), "rate_limited"), (status(502), "unavailable"), (reset, "unavailable"), (stall, "timeout")],
)
async def test_who_fails_to_the_end_is_asked_max_attempts_times(step, expected):
    result, server = await ask_once(step, max_attempts=2, request_timeout_s=0.2 if step is stall else 30.0)
    assert (kind(result), result.calls, len(server.requests)) == (expected, 2, 2)


async def test_nobody_at_home_is_an_outage():
    with FaultEndpoint() as server:
        pass
    result = await ask(OpenAIEndpoint(server.url, "judge", max_attempts=1))
    assert kind(result) == "unavailable" and server.url in result.detail


async def test_the_account_of_a_reply_covers_its_retries():
    result, _ = await ask_once(status(503), reply("well"))
    assert (result.text, result.prompt_tokens, result.completion_tokens, result.calls) == ("well", 100, 20, 2)
    assert result.seconds > 0.2 and not result.cached


async def test_tokens_are_guessed_where_the_server_does_not_count():
    silent = completion("x" * 40)
    del silent["usage"]
    result, _ = await ask_once(body(json.dumps(silent).encode()))
    assert (result.prompt_tokens, result.completion_tokens) == (1 + len("Which is better?") // 4, 10)


def test_a_character_that_is_not_ascii_counts_as_a_token():
    assert guess_tokens([{"content": "a" * 9}, {"content": "预算 100 元"}]) == 1 + 9 // 4 + 3 + 5 // 4


async def test_all_was_spent_on_thinking():
    result, _ = await ask_once(reply(None, "length"))
    assert isinstance(result, Reply) and (result.text, result.finish_reason) == ("", "length")


async def test_a_server_that_asks_for_patience_gets_it():
    result, _ = await ask_once(status(429, Retry_After="1"), reply())
    assert isinstance(result, Reply) and result.seconds >= 1.0


@pytest.mark.parametrize("after", ["31", "1e400", email.utils.formatdate(time.time() + 3600, usegmt=True)])
async def test_a_wait_beyond_the_deadline_is_not_begun(after):
    result, server = await ask_once(status(429, Retry_After=after), deadline_s=30.0)
    assert kind(result) == "rate_limited" and len(server.requests) == 1 and "HTTP 429" in result.detail


def test_retry_after_is_a_number_or_a_date():
    assert seconds_until("2") == 2.0
    assert 50 < seconds_until(email.utils.formatdate(time.time() + 60, usegmt=True)) <= 60
    assert seconds_until(email.utils.formatdate(time.time() - 60)) == 0.0
    assert [seconds_until(x) for x in (None, "", "-5", "nan", "soon", "Mon, 99 Foo 2026")] == [0.0] * 6


def test_waits_double_up_to_a_bound():
    for failures, longest in [(1, 0.5), (2, 1.0), (3, 2.0), (7, 30.0), (5000, 30.0)]:
        waits = [backoff(failures) for _ in range(50)]
        assert longest / 2 <= min(waits) < max(waits) <= longest


async def test_the_deadline_ends_a_request_and_a_wait_for_a_slot():
    with FaultEndpoint(stall) as server:
        endpoint = OpenAIEndpoint(server.url, "judge", max_concurrency=1, deadline_s=0.3)
        sent, queued = await asyncio.gather(ask(endpoint, "first"), ask(endpoint, "second"))
        assert (kind(sent), sent.calls, kind(queued), queued.calls) == ("timeout", 1, "timeout", 0)
        assert "waiting for its turn" in queued.detail


async def test_the_server_never_sees_more_than_max_concurrency_requests():
    with FaultEndpoint(together(3)) as server:
        endpoint = OpenAIEndpoint(server.url, "judge", max_concurrency=3)
        results = await asyncio.gather(*(ask(endpoint) for _ in range(9)))
        assert [kind(r) for r in results] == ["stop"] * 9 and server.most_at_once == 3
        await endpoint.aclose()


@pytest.mark.parametrize(
    ("refused", "taken"),
    [((), "json_schema"), (("json_schema",), "json_object"), (("json_schema", "json_object"), "none")],
)
async def test_auto_finds_out_once_what_the_server_takes(refused, taken):
    with FaultEndpoint(refusing_formats(*refused)) as server:
        endpoint = OpenAIEndpoint(server.url, "judge", max_attempts=1)
        at_once = await asyncio.gather(*(ask(endpoint, schema=SCHEMA) for _ in range(3)))
        later = await ask(endpoint, schema=SCHEMA)
        assert [(r.text, r.calls) for r in at_once] == [(taken, 1 + len(refused))] * 3
        assert (later.text, later.calls) == (taken, 1)
        if not refused:
            assert server.requests[0]["response_format"]["json_schema"]["schema"] == SCHEMA


@pytest.mark.parametrize("structured", ["json_schema", "json_object"])
async def test_a_format_that_was_asked_for_by_name_has_no_substitute(structured):
    with FaultEndpoint(refusing_formats(structured)) as server:
        endpoint = OpenAIEndpoint(server.url, "judge", structured=structured)
        assert kind(await ask(endpoint, schema=SCHEMA)) == "refused" and len(server.requests) == 1
        assert (await ask(endpoint)).text == "none"


async def test_an_error_that_only_speaks_of_formats_is_not_remembered():
    with FaultEndpoint(*[status(400, "no JSON schema in prompts")] * 3, refusing_formats()) as server:
        endpoint = OpenAIEndpoint(server.url, "judge")
        assert kind(await ask(endpoint, schema=SCHEMA)) == "refused" and len(server.requests) == 3
        assert (await ask(endpoint, schema=SCHEMA)).text == "json_schema"


async def test_the_request_holds_what_was_asked_for_and_nothing_else():
    extra = {"max_tokens": None, "max_completion_tokens": 7, "reasoning_effort": "low"}
    _, plain = await ask_once()
    _, changed = await ask_once(extra_body=extra)
    common = {"model": "judge", "messages": [{"role": "user", "content": "Which is better?"}], "temperature": 0.0}
    assert plain.requests == [common | {"max_tokens": 50}] and plain.keys == ["Bearer EMPTY"]
    assert changed.requests == [common | {"max_completion_tokens": 7, "reasoning_effort": "low"}]


@pytest.mark.parametrize("step", [status(401, "wrong key sk-very-secret"), body(b"{'wrong key': 'sk-very-secret'}")])
async def test_the_key_is_sent_and_never_shown(step, key):
    result, server = await ask_once(step, api_key_env=KEY)
    assert server.keys == [f"Bearer {key}"] and "wrong key" in result.detail and "***" in result.detail
    assert key not in result.detail


@pytest.mark.parametrize("value", ["sk-s\u00e9cret", "sk-\nsecret"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(value, key):
    os.environ[KEY] = value
    with pytest.raises(ConfigError, match=KEY) as error:
        OpenAIEndpoint("http://localhost:8000/v1", "judge", api_key_env=KEY)
    assert "cret" not in str(error.value)


async def test_characters_that_no_encoder_takes_do_no_harm():
    text = json.dumps(completion("cut \ud800 here")).encode()
    with FaultEndpoint(body(text)) as server:
        endpoint = OpenAIEndpoint(server.url, "judge", cache=":memory:")
        assert (await ask(endpoint, "a \udc00 b")).text == "cut \ufffd here"
        assert server.requests[0]["messages"][0]["content"] == "a \ufffd b"


async def test_a_reply_from_the_cache_costs_nothing(tmp_path):
    cache = str(tmp_path / "replies.sqlite")
    with FaultEndpoint(reply("one"), reply("two"), reply("three")) as server:
        first, again = (OpenAIEndpoint(server.url, "judge", cache=cache, tokens_per_step=1) for _ in range(2))
        assert (await ask(first)).calls == 1
        await first.aclose()
        hit = await ask(again)
        assert (hit.text, hit.cached, hit.calls, hit.prompt_tokens, hit.completion_tokens) == ("one", True, 0, 0, 0)
        assert (await ask(again, seed=1)).text == "two" and (await ask(again)).text == "one"
        again.begin_step(1)
        assert (await ask(again, schema=SCHEMA)).text == "three" and len(server.requests) == 3
        await again.aclose()


async def test_replies_are_kept_apart_by_a_seed_that_the_server_does_not_see():
    with FaultEndpoint(reply("one"), reply("two")) as server:
        endpoint = OpenAIEndpoint(server.url, "judge", cache=":memory:", extra_body={"seed": None})
        assert [(await ask(endpoint, seed=seed)).text for seed in (0, 1, 0)] == ["one", "two", "one"]
        assert not any("seed" in request for request in server.requests)


async def test_failures_and_cut_replies_are_not_kept():
    with FaultEndpoint(status(404), reply("half", "length"), reply("whole")) as server:
        endpoint = OpenAIEndpoint(server.url, "judge", cache=":memory:")
        assert [kind(await ask(endpoint)) for _ in range(4)] == ["refused", "length", "stop", "stop"]
        assert len(server.requests) == 3


async def test_identical_requests_in_flight_are_one():
    with FaultEndpoint(together(2)) as server:
        endpoint = OpenAIEndpoint(server.url, "judge", cache=":memory:")
        results = await asyncio.gather(*(ask(endpoint, text) for text in ("a", "a", "a", "b", "b")))
        assert len(server.requests) == 2 and [r.calls for r in results] == [1, 0, 0, 1, 0]
        assert [r.cached for r in results] == [False, True, True, False, True]


async def test_who_waits_for_a_request_that_is_cancelled_sends_it():
    with FaultEndpoint(stall, reply("mine")) as server:
        endpoint = OpenAIEndpoint(server.url, "judge", cache=":memory:")
        leader = asyncio.create_task(ask(endpoint))
        await asyncio.to_thread(server.arrived.acquire)
        follower, impatient = asyncio.create_task(ask(endpoint)), asyncio.create_task(ask(endpoint))
        await asyncio.sleep(0)
        impatient.cancel()
        leader.cancel()
        result = await follower
        assert (result.text, result.calls, len(server.requests)) == ("mine", 1, 2)
        assert (await asyncio.gather(leader, impatient, return_exceptions=True))[1].__class__ is asyncio.CancelledError


ASK_MANY = """
import asyncio, logging, sys
from arenarl.endpoint import OpenAIEndpoint
logging.basicConfig(level=logging.WARNING)
async def main():
    endpoint = OpenAIEndpoint(sys.argv[1], "judge", cache=sys.argv[2])
    asked = ([{"role": "user", "content": str(n)}] for n in range(60))
    results = await asyncio.gather(*(endpoint.complete(m, max_tokens=5) for m in asked))
    assert all(r.text == "fine" for r in results), results
    print(sum(r.calls for r in results))
    await endpoint.aclose()
asyncio.run(main())
"""


def test_processes_share_one_cache(tmp_path):
    async def here() -> list[Reply | Outage]:
        endpoint = OpenAIEndpoint(server.url, "judge", cache=command[-1])
        return await asyncio.gather(*(ask(endpoint, str(n), max_tokens=5) for n in range(60)))

    with FaultEndpoint() as server:
        command = [sys.executable, "-c", ASK_MANY, server.url, str(tmp_path / "replies.sqlite")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
        both = [subprocess.Popen(command, **pipes) for _ in range(2)]
        said = [process.communicate(timeout=200) for process in both]
        assert [(p.returncode, errors) for p, (_, errors) in zip(both, said, strict=True)] == [(0, "")] * 2
        assert sum(int(out) for out, _ in said) == len(server.requests) >= 60
        assert all(r.cached and r.text == "fine" for r in asyncio.run(here()))


@pytest.mark.parametrize("path", ["{tmp}/corrupt", "/proc/replies.sqlite"])
async def test_a_cache_that_cannot_be_used_is_one_warning(path, tmp_path, caplog):
    path = path.format(tmp=tmp_path)
    (tmp_path / "corrupt").write_bytes(b"no database" * 1000)
    with FaultEndpoint() as server:
        endpoint = OpenAIEndpoint(server.url, "judge", cache=path)
        assert [kind(await ask(endpoint)) for _ in range(3)] == ["stop"] * 3 and len(server.requests) == 3
        assert [r.message.partition(" is off")[0] for r in caplog.records if r.name == "arenarl.reply_cache"] == [
            f"cache {path}"
        ]


def test_one_endpoint_in_one_loop_after_the_other():
    with FaultEndpoint() as server:
        endpoint = pickle.loads(pickle.dumps(OpenAIEndpoint(server.url, "judge", max_concurrency=1, cache=":memory:")))

        async def crowd(*texts: str) -> list[str]:
            return [kind(r) for r in await asyncio.gather(*(ask(endpoint, text) for text in texts))]

        assert asyncio.run(crowd("a", "b")) == ["stop"] * 2
        assert asyncio.run(crowd("a", "c")) == ["stop"] * 2 and len(server.requests) == 3
        asyncio.run(endpoint.aclose())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"base_url": "localhost:8000"}, "base_url='localhost:8000' is no address"),
        ({"base_url": "http://"}, "base_url"),
        ({"base_url": "http://host:99999/v1"}, "base_url"),
        ({"base_url": None}, "base_url=None"),
        ({"base_url": "https://api.example.com/v1", "api_key_env": "ARENARL_NO_KEY"}, "ARENARL_NO_KEY is not set"),
        ({"api_key_env": "ARENARL_NO_KEY"}, "ARENARL_NO_KEY is not set"),
        ({"base_url": "http://host/v1?key=secret"}, "base_url must not hold"),
        ({"base_url": "http://me:secret@host/v1"}, "base_url must not hold"),
        ({"extra_body": {"messages": []}}, "must not hold 'messages'"),
        ({"extra_body": 7}, "extra_body=7"),
        ({"model": ""}, "model=''"),
        ({"max_concurrency": 0}, "max_concurrency=0"),
        ({"max_attempts": 1.5}, "max_attempts=1.5 must be a whole number"),
        ({"max_attempts": True}, "max_attempts=True"),
        ({"request_timeout_s": float("nan")}, "request_timeout_s=nan"),
        ({"deadline_s": -1.0}, "deadline_s=-1.0"),
        ({"structured": "xml"}, "structured='xml' must be one of auto, json_schema"),
        ({"tokens_per_step": 0}, "tokens_per_step=0"),
        ({"cost_per_step": 1.0}, "cost_per_step=1.0 needs prices"),
        ({"price_in": -1.0}, "price_in=-1.0"),
        ({"extra_body": {"x": float("nan")}}, "extra_body"),
        ({"extra_body": {"x": {1, 2}}}, "extra_body"),
        ({"cache": "/no/such/folder/replies.sqlite"}, "cache='/no/such/folder/replies.sqlite'"),
        ({"cache": "/"}, "cache='/'"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, says):
    with pytest.raises(ConfigError) as error:
        OpenAIEndpoint(**{"base_url": "http://localhost:8000/v1", "model": "judge", **settings})
    assert says in str(error.value) and "secret" not in str(error.value)


@pytest.mark.parametrize(
    "url", ["https://10.0.0.7/v1", "https://judge:8443/v1", "https://judge.internal", "http://a.b.c/v1"]
)
def test_servers_of_ones_own_need_no_key(url):
    assert OpenAIEndpoint(url, "judge").name == "judge"
