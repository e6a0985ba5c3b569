"""The rollout loop with a real engine, real tool server and the tiny agent: token-exact records, many episodes, loud deaths."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from arenarl.batching import pack, policy_gradient_stream
from arenarl.engine import EngineConfig, VLLMEngine
from arenarl.env_runner import load_renderer
from arenarl.envs.travel import TravelTasks
from arenarl.errors import DeadlineExceeded, EngineUnavailable
from arenarl.functional import group_advantages
from arenarl.player import Job, RolloutLimits
from arenarl.rollout import RolloutLoop
from arenarl.types import EpisodeGroup, Outcome, SamplingParams

MODEL = "experiments/tiny_agent/model"
SAMPLING = SamplingParams(temperature=1.0, max_tokens=48)


class WatchedEngine:
    """An engine that writes down what it was asked and what it gave, and counts the requests in flight."""

    def __init__(self, inner: VLLMEngine) -> None:
        self.inner, self.requests, self.in_flight, self.most = inner, [], 0, 0

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    async def generate(self, prompt_ids, sampling, *, request_id, deadline_s):
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            result = await self.inner.generate(prompt_ids, sampling, request_id=request_id, deadline_s=deadline_s)
        finally:
            self.in_flight -= 1
        self.requests.append((request_id, tuple(prompt_ids), result))
        return result


class FaultyEngine(WatchedEngine):
    """Raises what it is told to on every request."""

    def __init__(self, error: Exception) -> None:
        self.error, self.engine_id, self.max_model_len, self.eos_token_ids = error, "faulty", 768, (2,)

    async def start(self) -> None: ...

    async def shutdown(self, timeout_s: float = 10.0) -> None: ...

    async def generate(self, *args, **kwargs):
        raise self.error


async def score(group: EpisodeGroup) -> EpisodeGroup:
    rewards = tuple(e.score for e in group.episodes)
    return replace(group, rewards=rewards, advantages=tuple(group_advantages(rewards)))


@pytest.fixture(scope="module")
def renderer():
    return load_renderer(MODEL)


@pytest.fixture(scope="module")
def running(renderer) -> Iterator[tuple[RolloutLoop, WatchedEngine]]:
    engine = WatchedEngine(VLLMEngine(EngineConfig(model=MODEL, core="thread", max_model_len=768, max_num_seqs=64)))
    loop = RolloutLoop(engine, renderer, TravelTasks(), score, RolloutLimits(max_turns=6))
    loop.start()
    yield loop, engine
    loop.close()


def jobs(count: int, group_size: int, name: str, **settings) -> list[Job]:
    tasks = TravelTasks().tasks("train", count, seed=5)
    return [
        Job(group_id=f"{name}{n}", task=task, group_size=group_size, sampling=SAMPLING, seed=n, **settings)
        for n, task in enumerate(tasks)
    ]


def collect(loop: RolloutLoop, count: int) -> list[EpisodeGroup]:
    groups: list[EpisodeGroup] = []
    while len(groups) < count:
        fresh = loop.drain(60.0)
        assert fresh, "no group finished within a minute"
        groups += fresh
    return groups


def test_64_episodes_are_in_flight_and_every_trained_id_is_a_sampled_id(running):
    loop, engine = running
    loop.submit(jobs(8, 8, "flight"))
    groups = collect(loop, 8)
    assert engine.most == 64
    sampled: dict[str, list] = {}
    for request_id, _, result in sorted(engine.requests, key=lambda r: int(r[0].rpartition("/")[2])):
        sampled.setdefault(request_id.rpartition("/")[0], []).append(result)
    for episode in (e for g in groups for e in g.episodes):
        ids = [t for s in episode.segments for t, m in zip(s.token_ids, s.mask, strict=True) if m]
        logprobs = [x for s in episode.segments for x, m in zip(s.logprobs, s.mask, strict=True) if m]
        assert ids == [t for c in sampled[episode.episode_id] for t in c.token_ids]
        assert logprobs == [x for c in sampled[episode.episode_id] for x in c.logprobs]
    batch = pack(groups, [[policy_gradient_stream(g)] for g in groups], tokens_per_microbatch=4096)
    trained = sorted(t for m in batch.shards[0] for t in m.token_ids[m.mask].tolist())
    useful = [e for g in groups for e, a in zip(g.episodes, g.advantages, strict=True) if a]
    expected = [t for e in useful for s in e.segments for t, m in zip(s.token_ids, s.mask, strict=True) if m]
    assert trained == sorted(expected)


def test_each_prompt_extends_the_one_before_by_what_was_sampled_and_glue(running):
    loop, engine = running
    engine.requests.clear()
    loop.run(jobs(4, 2, "prefix"), 120)
    turns: dict[str, list] = {}
    for request_id, prompt, result in engine.requests:
        turns.setdefault(request_id.rpartition("/")[0], []).append((prompt, result.token_ids))
    several = [t for t in turns.values() if len(t) > 1]
    assert several, "no episode had a second turn"
    for first, second in ((t[n], t[n + 1]) for t in several for n in range(len(t) - 1)):
        assert second[0][: len(first[0]) + len(first[1])] == first[0] + first[1]


def test_engine_log_probs_are_those_of_the_learner(running):
    import torch
    from transformers import AutoModelForCausalLM

    loop, _ = running
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    (group,) = loop.run(jobs(1, 4, "parity"), 120)
    for segment in (s for e in group.episodes for s in e.segments):
        ids = torch.tensor([segment.token_ids])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(segment.mask[1:])
        gap = (logprobs - torch.tensor(segment.logprobs[1:]))[mask].abs().max()
        assert gap < 1e-4


def test_the_greedy_member_is_greedy_and_the_others_are_not(running):
    loop, _ = running
    (group,) = loop.run(jobs(1, 4, "greedy", greedy_first=True), 120)
    (again,) = loop.run(jobs(1, 4, "again", greedy_first=True), 120)
    assert [e.greedy for e in group.episodes] == [True, False, False, False]
    assert group.episodes[0].segments[0].token_ids == again.episodes[0].segments[0].token_ids


def test_the_death_of_the_engine_reaches_the_caller_with_its_cause(renderer):
    loop = RolloutLoop(FaultyEngine(EngineUnavailable("core killed")), renderer, TravelTasks(), score, RolloutLimits())
    loop.start()
    loop.submit(jobs(2, 2, "dead"))
    with pytest.raises(EngineUnavailable, match="core killed"):
        loop.drain(60.0)
    with pytest.raises(EngineUnavailable, match="core killed"):
        loop.submit(jobs(1, 1, "more"))
    loop.close()


def test_a_judge_that_raises_ends_the_run_with_its_own_words(renderer):
    async def broken(group: EpisodeGroup) -> EpisodeGroup:
        raise ZeroDivisionError("judge has a bug")

    loop = RolloutLoop(FaultyEngine(DeadlineExceeded("late")), renderer, TravelTasks(), broken, RolloutLimits())
    loop.start()
    loop.submit(jobs(1, 2, "bug"))
    with pytest.raises(EngineUnavailable, match="judge has a bug"):
        loop.drain(60.0)
    loop.close()


@pytest.mark.parametrize("error", [None, OSError("stuck")])
def test_a_judge_is_closed_after_the_engine_whether_it_fails_or_not(renderer, error):
    ended = []

    class Ending(FaultyEngine):
        async def shutdown(self, timeout_s: float = 10.0) -> None:
            ended.append("engine")

    async def aclose() -> None:
        ended.append("judge")
        if error:
            raise error

    loop = RolloutLoop(Ending(EngineUnavailable("x")), renderer, TravelTasks(), score, RolloutLimits(), aclose)
    loop.start()
    loop.close()
    assert ended == ["engine", "judge"]


def test_a_deadline_is_a_failed_episode_not_a_score(renderer):
    loop = RolloutLoop(FaultyEngine(DeadlineExceeded("late")), renderer, TravelTasks(), score, RolloutLimits())
    loop.start()
    (group,) = loop.run(jobs(1, 3, "late"), 60)
    assert [(e.outcome, e.score) for e in group.episodes] == [(Outcome.FAILED, None)] * 3
    loop.close()


def test_an_engine_that_does_not_start_raises_its_reason(renderer):
    class NoStart(FaultyEngine):
        async def start(self) -> None:
            raise self.error

    loop = RolloutLoop(NoStart(EngineUnavailable("no memory")), renderer, TravelTasks(), score, RolloutLimits())
    with pytest.raises(EngineUnavailable, match="no memory"):
        loop.start()


def test_call_has_a_deadline(running):
    loop, _ = running
    never: Callable = asyncio.Event().wait
    with pytest.raises(DeadlineExceeded, match="did not answer"):
        loop.call(never(), 0.05)
