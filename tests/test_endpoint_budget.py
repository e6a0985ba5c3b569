"""What judges may use in a step: budgets of tokens and of money, against a server on a real socket."""

import asyncio
import json
from collections import Counter

import pytest

from arenarl.endpoint import OpenAIEndpoint
from arenarl.endpoint_budget import Budget, Usage
from tests.judging import ask, kind
from tests.servers.fault_endpoint import FaultEndpoint, body, completion, reply, stall


@pytest.mark.parametrize(
    "limit", [{"tokens_per_step": 250}, {"cost_per_step": 0.5, "price_in": 1000.0, "price_out": 5000.0}]
)
@pytest.mark.parametrize("at_once", [1, 10])
async def test_a_step_uses_its_budget_and_at_most_one_call_more(limit, at_once):
    """A call takes 120 tokens, or 100 / 1e6 * 1000 + 20 / 1e6 * 5000 = 0.2: three fit below the limit and one over it."""
    with FaultEndpoint() as server:
        endpoint = OpenAIEndpoint(server.url, "judge", max_concurrency=at_once, **limit)
        for version, expected in [(1, {"stop": 3, "budget": 7}), (1, {"budget": 10}), (2, {"stop": 3, "budget": 7})]:
            endpoint.begin_step(version)
            results = await asyncio.gather(*(ask(endpoint, max_tokens=1000) for _ in range(10)))
            assert Counter(map(kind, results)) == expected
        assert len(server.requests) == 6
        await endpoint.aclose()


def test_a_budget_counts_what_may_still_be_used_and_books_on_the_step_that_began_it():
    budget, most = Budget(tokens_per_step=100), Usage(prompt_tokens=30, completion_tokens=30)
    budget.begin_step(1)
    first, second = budget.reserve(most), budget.reserve(most)
    assert first and second and budget.reserve(most) is None and budget.spent() is None
    first.settle(Usage(1, 10, 10))
    third = budget.reserve(most)
    assert third and budget.reserve(most) is None
    budget.begin_step(2)
    second.settle(Usage(1, 500, 500))
    assert budget.spent() is None and budget.reserve(most)
    third.settle(Usage())
    assert budget.spent() is None


async def test_a_cancelled_call_gives_its_slot_and_its_reservation_back():
    """A call may take 5 + 50 tokens. The lost request is booked as that, which leaves room for one more."""
    with FaultEndpoint(stall, reply()) as server:
        endpoint = OpenAIEndpoint(server.url, "judge", max_concurrency=1, tokens_per_step=100)
        task = asyncio.create_task(ask(endpoint))
        await asyncio.to_thread(server.arrived.acquire)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert kind(await ask(endpoint)) == "stop"


async def test_requests_that_got_no_answer_are_booked_as_the_most_they_may_have_cost():
    with FaultEndpoint(stall) as server:
        endpoint = OpenAIEndpoint(server.url, "judge", tokens_per_step=1000, max_attempts=2, request_timeout_s=0.2)
        endpoint.begin_step(1)
        results = [await ask(endpoint, max_tokens=500) for _ in range(2)]
        assert [kind(r) for r in results] == ["timeout", "budget"] and len(server.requests) == 2
        assert (results[0].prompt_tokens, results[0].completion_tokens) == (0, 0)  # nobody counted them
        endpoint.begin_step(2)
        assert kind(await ask(endpoint)) == "timeout"


async def test_what_a_call_may_use_is_known_from_the_members_that_were_added():
    extra = {"max_tokens": None, "max_completion_tokens": 900}
    with FaultEndpoint(stall) as server:
        endpoint = OpenAIEndpoint(server.url, "judge", tokens_per_step=900, deadline_s=0.5, extra_body=extra)
        results = await asyncio.gather(*(ask(endpoint, max_tokens=1) for _ in range(3)))
        assert len(server.requests) == 1 and sorted(r.calls for r in results) == [0, 0, 1]


async def test_a_count_that_no_prompt_reaches_is_none():
    absurd = completion("fine")
    absurd["usage"]["prompt_tokens"] = 10**400
    with FaultEndpoint(body(json.dumps(absurd).encode())) as server:
        endpoint = OpenAIEndpoint(server.url, "judge", cost_per_step=1.0, price_in=1.0)
        assert (await ask(endpoint)).prompt_tokens == 1 + len("Which is better?") // 4
