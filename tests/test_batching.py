"""Packing: what is trained on, with what weight, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arenarl.batching import Batch, Stream, pack, policy_gradient_stream, refusal
from arenarl.errors import ConfigError
from arenarl.types import Episode, EpisodeGroup, Outcome, Segment, Task, Trajectory

TASK = Task(task_id="t", kind="k", prompt="p")


def segment(mask: str, *, first_id: int = 1, logprob: float = -0.5, version: int = 0) -> Segment:
    """A segment from a picture: "..x.x" has five tokens, two of them sampled."""
    sampled = [c == "x" for c in mask]
    return Segment(
        token_ids=tuple(range(first_id, first_id + len(mask))),
        mask=tuple(sampled),
        logprobs=tuple(logprob if s else 0.0 for s in sampled),
        versions=tuple(version if s else -1 for s in sampled),
    )


def episode(*segments: Segment, name: str = "e", greedy: bool = False) -> Episode:
    return Episode(
        episode_id=name,
        task=TASK,
        member=0,
        greedy=greedy,
        segments=segments,
        trajectory=Trajectory(messages=(), events=(), answer=None),
        outcome=Outcome.SCORED,
    )


def group(episodes: list[Episode], advantages: list[float | None]) -> EpisodeGroup:
    return EpisodeGroup(
        group_id="g", task=TASK, episodes=tuple(episodes), version=0, advantages=tuple(advantages), rewards=()
    )


def packed(episodes: list[Episode], advantages: list[float | None], **options: int | bool) -> Batch:
    g = group(episodes, advantages)
    return pack([g], [[policy_gradient_stream(g)]], **{"tokens_per_microbatch": 64, **options})


def distilled(
    episodes: list[Episode],
    advantages: list[float | None],
    lambdas: list[float],
    *,
    memory: tuple[int, ...] = (90, 91),
    splice: int = 1,
    **options: int | bool,
) -> Batch:
    g = group(episodes, advantages)
    weights = tuple(
        tuple(np.full(len(s.token_ids), lam, np.float32) for s in e.segments)
        for e, lam in zip(episodes, lambdas, strict=True)
    )
    stream = Stream(name="distillation", weights=weights, memory_ids=memory, splice=splice)
    return pack([g], [[policy_gradient_stream(g), stream]], **{"tokens_per_microbatch": 64, **options})


def test_one_row_is_laid_out_as_recorded() -> None:
    [[mb]] = packed([episode(segment("..xx.x..", first_id=10, version=4))], [2.0]).shards
    assert mb.token_ids.tolist() == [[10, 11, 12, 13, 14, 15]]  # what follows the last sampled token is cut
    assert mb.mask.tolist() == [[False, False, True, True, False, True]]
    assert mb.behavior_logprobs.tolist() == [[0, 0, -0.5, -0.5, 0, -0.5]]
    assert mb.weights.tolist() == [[0, 0, 2, 2, 0, 2]]
    assert mb.versions.tolist() == [[-1, -1, 4, 4, -1, 4]]
    np.testing.assert_allclose(mb.loss_weight, [[0, 0, 1 / 3, 1 / 3, 0, 1 / 3]], rtol=1e-6)


def test_an_episode_of_two_segments_counts_once() -> None:
    """One rollout of one segment, one of two: each has half of the loss, spread over its own tokens."""
    batch = packed([episode(segment(".xx")), episode(segment(".xxx"), segment(".x", first_id=50))], [-1.0, 1.0])
    [[mb]] = batch.shards
    share = {tuple(ids[ids > 0]): w.sum() for ids, w in zip(mb.token_ids, mb.loss_weight, strict=True)}
    assert share == pytest.approx({(1, 2, 3): 1 / 2, (1, 2, 3, 4): 3 / 8, (50, 51): 1 / 8})
    assert (batch.stats.episodes, batch.stats.segments, batch.stats.trained_tokens) == (2, 3, 6)


lengths = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=12)


@given(lengths, st.integers(1, 200), st.integers(1, 4))
def test_any_cut_keeps_every_token_once_and_every_episode_at_weight_one(
    shape: list[list[int]], budget: int, shards: int
) -> None:
    episodes = [episode(*(segment("." + "x" * n, first_id=1000 * i) for n in ns)) for i, ns in enumerate(shape, 1)]
    batch = packed(episodes, [1.0] * len(shape), tokens_per_microbatch=budget, num_shards=shards)
    assert len({len(shard) for shard in batch.shards}) == 1
    micro_batches = [mb for shard in batch.shards for mb in shard]
    assert all(mb.token_ids.size <= budget or len(mb.token_ids) == 1 for mb in micro_batches)
    trained, weight = [], dict.fromkeys(range(1, len(shape) + 1), 0.0)
    for mb in micro_batches:
        trained += mb.token_ids[mb.mask].tolist()
        for token, w in zip(mb.token_ids[mb.mask], mb.loss_weight[mb.mask], strict=True):
            weight[int(token) // 1000] += float(w)
    assert sorted(trained) == sorted(1000 * i + k for i, ns in enumerate(shape, 1) for n in ns for k in range(1, n + 1))
    np.testing.assert_allclose(list(weight.values()), 1 / len(shape), rtol=1e-4)


@given(lengths, st.integers(2, 4))
def test_shards_differ_by_at_most_one_row(shape: list[list[int]], shards: int) -> None:
    episodes = [episode(*(segment("." + "x" * n) for n in ns)) for ns in shape]
    batch = packed(episodes, [1.0] * len(shape), num_shards=shards)
    load = [sum(int(mb.lengths.sum()) for mb in shard if mb.trained_tokens) for shard in batch.shards]
    assert max(load) - min(load) <= 1 + max(max(ns) for ns in shape)


def test_shards_are_balanced_by_tokens_not_by_rows() -> None:
    batch = packed([episode(segment("." + "x" * n)) for n in (39, 9, 9, 9, 9)], [1.0] * 5, num_shards=2)
    assert [sum(int(mb.lengths.sum()) for mb in shard if mb.trained_tokens) for shard in batch.shards] == [40, 40]


def test_a_short_shard_is_filled_with_micro_batches_that_train_nothing() -> None:
    batch = packed([episode(segment(".xxx"))], [1.0], num_shards=2)
    assert [[mb.trained_tokens for mb in shard] for shard in batch.shards] == [[3], [0]]
    assert batch.shards[1][0].token_ids.shape == (1, 2)


def test_neighbours_in_length_share_a_micro_batch() -> None:
    batch = packed([episode(segment("." + "x" * n)) for n in (3, 15, 3, 15)], [1.0] * 4, tokens_per_microbatch=32)
    assert [mb.token_ids.shape for mb in batch.shards[0]] == [(2, 16), (2, 4)]
    assert batch.stats.padding_share == 0.0


def test_untrained_members_are_not_packed() -> None:
    members = [
        episode(segment(".x")),
        episode(segment(".x"), greedy=True),
        episode(segment("..")),
        episode(segment(".x")),
    ]
    batch = packed(members, [None, 1.0, 1.0, 1.0])
    assert batch.stats.episodes == batch.stats.segments == 1


def test_zero_advantage_counts_in_the_divisor_and_costs_no_pass() -> None:
    members = [episode(segment(".x")), episode(segment(".x"))]
    skipped, kept = packed(members, [1.0, 0.0]), packed(members, [1.0, 0.0], keep_zero_weights=True)
    assert skipped.shards[0][0].loss_weight[skipped.shards[0][0].mask].tolist() == [0.5]
    assert kept.shards[0][0].loss_weight[kept.shards[0][0].mask].tolist() == [0.5, 0.5]
    assert (skipped.stats.episodes, skipped.stats.zero_weight_episodes, skipped.stats.segments) == (2, 1, 1)


def test_nothing_to_train_on_gives_no_micro_batches() -> None:
    batch = packed([episode(segment(".x"))], [0.0], num_shards=2)
    assert batch.shards == ((), ())


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (segment(".x", logprob=float("nan")), "segment 0: a log-prob is not finite"),
        (segment(".x", logprob=float("-inf")), "segment 0: a log-prob is not finite"),
        (segment(".x", logprob=0.25), "segment 0: a log-prob is positive (0.25)"),
        (segment(".x", version=-1), "segment 0: a sampled token has no weight version"),
        (segment("xx"), "segment 0: its first token is sampled"),
    ],
)
def test_a_bad_record_is_refused_by_name_and_the_rest_is_trained(bad: Segment, reason: str) -> None:
    batch = packed([episode(bad, name="bad"), episode(segment(".x"), name="good")], [1.0, 1.0])
    assert batch.stats.refused == (("bad", reason),)
    assert batch.stats.episodes == 1
    assert batch.shards[0][0].loss_weight.sum() == 1.0


def test_rounding_above_zero_and_odd_context_values_are_no_reason_to_refuse() -> None:
    record = Segment(token_ids=(1, 2), mask=(False, True), logprobs=(float("-inf"), 1e-6), versions=(-1, 0))
    assert refusal(episode(record)) is None
    [[mb]] = packed([episode(record)], [1.0]).shards
    np.testing.assert_allclose(mb.behavior_logprobs, [[0.0, 1e-6]])


def test_a_stream_must_fit_its_group() -> None:
    g = group([episode(segment(".x"), name="e7")], [1.0])
    for weights in ((), ((np.ones(3, np.float32),),), ((),)):
        with pytest.raises(ConfigError, match=r"group g|episode e7"):
            pack([g], [[Stream(name="policy_gradient", weights=weights)]], tokens_per_microbatch=8)
    with pytest.raises(ConfigError, match="group g has 0 advantages for 1 episodes"):
        policy_gradient_stream(group([episode(segment(".x"))], []))
    with pytest.raises(ConfigError, match="tokens_per_microbatch is 0"):
        packed([], [], tokens_per_microbatch=0)


def test_a_stream_weight_that_is_no_number_is_refused() -> None:
    g = group([episode(segment(".x"), name="e7")], [1.0])
    stream = Stream(name="policy_gradient", weights=((np.array([np.inf, np.nan], np.float32),),))
    assert pack([g], [[stream]], tokens_per_microbatch=8).stats.refused == (("e7", "a stream weight is not finite"),)


def test_a_teacher_reads_the_row_with_the_memory_in_it() -> None:
    """The second episode is the longer one, so it is row 0; only the first has a teacher."""
    batch = distilled([episode(segment("..x.x.")), episode(segment("..xxxx"))], [1.0, 1.0], [0.5, 0.0])
    [[mb]] = batch.shards
    assert mb.token_ids.tolist() == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 0]]
    assert mb.teacher_ids.tolist() == [[1, 90, 91, 2, 3, 4, 5]]
    assert (mb.teacher_rows.tolist(), mb.teacher_shift.tolist()) == ([1], [2])
    # lambda 1/2, two trained episodes, two trained tokens
    assert mb.distill_weight.tolist() == [[0] * 6, [0, 0, 0.125, 0, 0.125, 0]]
    assert (batch.stats.teacher_tokens, batch.stats.undistilled, batch.stats.tokens) == (7, 0, 11)
    assert batch.stats.padding_share == pytest.approx(1 - 18 / 19)


def test_zero_advantage_with_a_teacher_is_packed() -> None:
    batch = distilled([episode(segment(".x")), episode(segment(".x"))], [0.0, 0.0], [1.0, 0.0])
    assert (batch.stats.zero_weight_episodes, batch.stats.segments, batch.stats.trained_tokens) == (1, 1, 1)
    assert batch.shards[0][0].distill_weight.tolist() == [[0, 0.5]]


def test_a_segment_that_begins_otherwise_or_was_sampled_before_the_memory_is_not_distilled() -> None:
    """The forked segment lost the prompt; the second episode has a sampled token at the place of the memory."""
    forked = episode(segment("...x"), segment("...x", first_id=40))
    batch = distilled([forked, episode(segment(".xxx"))], [1.0, 1.0], [1.0, 1.0], splice=2)
    assert batch.stats.undistilled == 2
    taught = {tuple(ids) for mb in batch.shards[0] for ids in mb.teacher_ids.tolist()}
    assert taught == {(1, 2, 90, 91, 3, 4)}
    assert (
        sum(float(mb.distill_weight.sum()) for mb in batch.shards[0]) == 0.25
    )  # one of two tokens of one of two episodes
    assert distilled([episode(segment(".x"))], [1.0], [1.0], splice=3).stats.undistilled == 1


def test_who_takes_no_part_in_the_policy_gradient_is_not_distilled() -> None:
    batch = distilled([episode(segment(".x")), episode(segment(".x"), greedy=True)], [None, 1.0], [1.0, 1.0])
    assert batch.shards == ((),)
    assert batch.stats.episodes == batch.stats.undistilled == 0


@given(st.lists(st.floats(-2, 2, width=16), min_size=1, max_size=8), st.integers(2, 60), st.booleans())
def test_a_distillation_without_weight_or_memory_changes_nothing(
    advantages: list[float], budget: int, forgotten: bool
) -> None:
    episodes = [episode(segment("." + "x" * (1 + 3 * i))) for i in range(len(advantages))]
    plain = packed(episodes, advantages, tokens_per_microbatch=budget)
    lambdas, memory = ([1.0], ()) if forgotten else ([0.0], (90,))
    idle = distilled(
        episodes, advantages, lambdas * len(episodes), memory=memory, tokens_per_microbatch=budget, splice=1
    )
    assert idle.stats == plain.stats
    for one, other in zip(plain.shards[0], idle.shards[0], strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True))
        assert other.teacher_ids.size == 0 and not other.distill_weight.any()


@given(lengths, st.integers(1, 200), st.integers(1, 3), st.data())
def test_what_teachers_read_counts_and_every_token_is_where_the_shift_says(
    shape: list[list[int]], budget: int, shards: int, data: st.DataObject
) -> None:
    lambdas = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(shape), max_size=len(shape)))
    episodes = [episode(*(segment("..." + "x" * n) for n in ns)) for ns in shape]
    batch = distilled(episodes, [1.0] * len(shape), lambdas, splice=2, tokens_per_microbatch=budget, num_shards=shards)
    assert len({len(shard) for shard in batch.shards}) == 1
    micro_batches = [mb for shard in batch.shards for mb in shard]
    assert all(mb.token_ids.size + mb.teacher_ids.size <= budget or len(mb.token_ids) == 1 for mb in micro_batches)
    assert sum(len(mb.teacher_ids) for mb in micro_batches) == sum(
        len(ns) * int(lam) for ns, lam in zip(shape, lambdas, strict=True)
    )
    for mb in micro_batches:
        assert set(mb.teacher_rows) == set(mb.distill_weight.nonzero()[0])
        for ids, row, shift in zip(mb.teacher_ids, mb.teacher_rows, mb.teacher_shift, strict=True):
            columns = mb.distill_weight[row].nonzero()[0]
            assert np.array_equal(ids[columns + shift], mb.token_ids[row, columns])
            assert np.array_equal(np.delete(ids, [2, 3])[: mb.lengths[row]], mb.token_ids[row, : mb.lengths[row]])
    np.testing.assert_allclose(
        sum(float(mb.distill_weight.sum()) for mb in micro_batches), sum(lambdas) / len(shape), rtol=1e-4
    )


def test_streams_are_one_policy_gradient_and_at_most_one_distillation() -> None:
    g = group([episode(segment(".x"), name="e7")], [1.0])
    policy = policy_gradient_stream(g)
    lesson = Stream(name="distillation", weights=policy.weights, memory_ids=(9,), splice=1)
    for streams in ([], [lesson], [policy, policy], [policy, lesson, lesson]):
        with pytest.raises(ConfigError, match=r"group g has the streams .* one policy_gradient and at most one"):
            pack([g], [streams], tokens_per_microbatch=8)
    with pytest.raises(ConfigError, match="distillation weights of episode e7"):
        pack([g], [[policy, Stream(name="distillation", weights=((np.ones(5),),))]], tokens_per_microbatch=8)


def test_a_lambda_that_is_no_number_is_refused() -> None:
    batch = distilled([episode(segment(".x"), name="e7")], [1.0], [float("nan")])
    assert batch.stats.refused == (("e7", "a stream weight is not finite"),)
