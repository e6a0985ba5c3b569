"""Groups of episodes to padded micro-batches under a token budget, each episode with weight 1.

The loss of a step is ``(1 / E) * sum over episodes (1 / n_e) * sum over its n_e trained tokens``, where E counts the
trained episodes of the whole step. Both divisors are written into ``MicroBatch.loss_weight``, so that a plain sum over
micro-batches and shards is the loss, however the rows were cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from arenarl.errors import ConfigError
from arenarl.types import Episode, EpisodeGroup, Segment

LOGPROB_SLACK = 1e-5
"""A log-prob may lie above 0 by this much: float32 rounding of a certain token."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Weights of one loss term, for each token of a group.

    Attributes:
        weights: for each episode, for each of its segments, [T] float32; None for an episode that takes no part.
            Only the entries at sampled tokens are read. Advantages for the policy gradient, lambda for distillation.
        memory_ids, splice: of a distillation: the teacher's context is a segment's ids with ``memory_ids`` put in at ``splice``.
    """

    name: Literal["policy_gradient", "distillation"]
    weights: tuple[tuple[NDArray[np.float32], ...] | None, ...]
    memory_ids: tuple[int, ...] = ()
    splice: int = 0


def policy_gradient_stream(group: EpisodeGroup) -> Stream:
    """Each episode's advantage at each of its tokens. Greedy members and those without an advantage take no part.

    Raises:
        ConfigError: the group has no advantages.
    """
    if len(group.advantages) != len(group.episodes):
        raise ConfigError(
            f"group {group.group_id} has {len(group.advantages)} advantages for {len(group.episodes)} episodes: "
            "score the group first"
        )
    return Stream(
        name="policy_gradient",
        weights=tuple(
            None
            if advantage is None or episode.greedy
            else tuple(np.full(len(s.token_ids), advantage, dtype=np.float32) for s in episode.segments)
            for episode, advantage in zip(group.episodes, group.advantages, strict=True)
        ),
    )


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Right-padded rows, one for each segment. Causal attention needs no mask for padding on the right.

    Attributes:
        token_ids: [B, T] int64.
        lengths: [B] int64, tokens of each row without padding.
        mask: [B, T] True where the token is trained on; never at position 0, which nothing predicts.
        behavior_logprobs: [B, T] float32, the engine's log-probs where mask is True, 0 elsewhere.
        weights: [B, T] float32, the stream's weights (advantages) where mask is True, 0 elsewhere.
        loss_weight: [B, T] float32, 1 / (E * n_e) where mask is True, 0 elsewhere.
        versions: [B, T] int64, weight version where mask is True, -1 elsewhere.
    """

    token_ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    weights: NDArray[np.float32]
    loss_weight: NDArray[np.float32]
    versions: NDArray[np.int64]

    @property
    def trained_tokens(self) -> int:
        return int(self.mask.sum())


@dataclass(frozen=True, kw_only=True)
class BatchStats:
    """What one step trains on.

    Attributes:
        episodes: trained episodes (E), those of zero weight included.
        zero_weight_episodes: of these, how many were left out of the arrays because all their weights are 0.
        segments: packed rows.
        tokens: packed tokens without padding.
        trained_tokens: of these, how many are trained on.
        padding_share: share of the padded arrays that is padding, in [0, 1].
        refused: (episode id, reason) of the records that ``refusal`` turned down.
    """

    episodes: int = 0
    zero_weight_episodes: int = 0
    segments: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    padding_share: float = 0.0
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One learner step: for each shard (learner) the same number of micro-batches; none at all if there is nothing to do."""

    shards: tuple[tuple[MicroBatch, ...], ...]
    stats: BatchStats = field(default_factory=BatchStats)


def refusal(episode: Episode) -> str | None:
    """Why a record cannot be trained on, or None if it can.

    A record is refused if a sampled token has a log-prob that is not finite or positive, has no weight version, or
    stands first in its segment, where nothing predicts it. Context tokens are not looked at: they are never selected.
    """
    for index, segment in enumerate(episode.segments):
        mask = np.asarray(segment.mask, dtype=bool)
        logprobs = np.asarray(segment.logprobs, dtype=np.float64)[mask]
        if not np.isfinite(logprobs).all():
            return f"segment {index}: a log-prob is not finite"
        if (logprobs > LOGPROB_SLACK).any():
            return f"segment {index}: a log-prob is positive ({logprobs.max():.3g})"
        if (np.asarray(segment.versions)[mask] < 0).any():
            return f"segment {index}: a sampled token has no weight version"
        if mask.size and mask[0]:
            return f"segment {index}: its first token is sampled"
    return None


@dataclass(frozen=True)
class _Row:
    segment: Segment
    weights: NDArray[np.float32]
    loss_weight: float
    length: int
    """Tokens up to the last trained one; what follows it changes nothing."""


def pack(
    groups: Sequence[EpisodeGroup],
    streams: Sequence[Stream],
    *,
    tokens_per_microbatch: int,
    num_shards: int = 1,
    pad_id: int = 0,
    keep_zero_weights: bool = False,
) -> Batch:
    """Cut the trained segments of a step into micro-batches of at most ``tokens_per_microbatch`` padded tokens.

    Rows go, longest first, to the shard with the fewest tokens, and neighbours in length share a micro-batch; a row
    longer than the budget has one of its own. Shards that come out with fewer micro-batches are filled up with ones
    that train nothing, because data-parallel ranks must take the same number of passes.

    Args:
        streams: one for each group.
        keep_zero_weights: pack episodes whose weights are all 0. They count as trained episodes in any case, so
            leaving them out changes nothing if the loss has no term besides the policy gradient; keep them if it has
            (``kl_coeff`` > 0).

    Raises:
        ConfigError: the budget is not positive, or a stream does not fit its group.
    """
    if tokens_per_microbatch < 1:
        raise ConfigError(f"tokens_per_microbatch is {tokens_per_microbatch}: give at least 1")
    trained, refused = _trained_episodes(groups, streams)
    rows: list[_Row] = []
    zero_weight = 0
    for episode, weights in trained:
        if not keep_zero_weights and not _any_weight(episode, weights):
            zero_weight += 1
            continue
        loss_weight = 1.0 / (len(trained) * episode.num_sampled)
        for segment, w in zip(episode.segments, weights, strict=True):
            if segment.num_sampled:
                rows.append(_Row(segment, w, loss_weight, int(np.flatnonzero(segment.mask)[-1]) + 1))
    shards = [_microbatches(rows_of, tokens_per_microbatch, pad_id) for rows_of in _shards(rows, num_shards)]
    count = max(len(shard) for shard in shards)
    for shard in shards:
        shard.extend(_collate([], pad_id) for _ in range(count - len(shard)))
    padded = sum(mb.token_ids.size for mb in chain(*shards))
    tokens = sum(row.length for row in rows)
    return Batch(
        shards=tuple(map(tuple, shards)),
        stats=BatchStats(
            episodes=len(trained),
            zero_weight_episodes=zero_weight,
            segments=len(rows),
            tokens=tokens,
            trained_tokens=sum(row.segment.num_sampled for row in rows),
            padding_share=1.0 - tokens / padded if padded else 0.0,
            refused=tuple(refused),
        ),
    )


def _trained_episodes(
    groups: Sequence[EpisodeGroup], streams: Sequence[Stream]
) -> tuple[list[tuple[Episode, tuple[NDArray[np.float32], ...]]], list[tuple[str, str]]]:
    """Episodes that take part and have a sampled token, with their weights; and the refused ones."""
    trained, refused = [], []
    for group, stream in zip(groups, streams, strict=True):
        if len(stream.weights) != len(group.episodes):
            raise ConfigError(
                f"stream of group {group.group_id} has {len(stream.weights)} entries for {len(group.episodes)} episodes"
            )
        for episode, weights in zip(group.episodes, stream.weights, strict=True):
            if weights is None or not episode.num_sampled:
                continue
            if [len(w) for w in weights] != [len(s.token_ids) for s in episode.segments]:
                raise ConfigError(
                    f"stream weights of episode {episode.episode_id} do not have the shape of its segments"
                )
            if reason := refusal(episode):
                refused.append((episode.episode_id, reason))
            elif not all(np.isfinite(w[np.asarray(s.mask, bool)]).all() for w, s in _pairs(episode, weights)):
                refused.append((episode.episode_id, "a stream weight is not finite"))
            else:
                trained.append((episode, weights))
    return trained, refused


def _pairs(episode: Episode, weights: tuple[NDArray[np.float32], ...]) -> Iterator[tuple[NDArray[np.float32], Segment]]:
    return zip(weights, episode.segments, strict=True)


def _any_weight(episode: Episode, weights: tuple[NDArray[np.float32], ...]) -> bool:
    return any(w[np.asarray(s.mask, bool)].any() for w, s in _pairs(episode, weights))


def _shards(rows: Sequence[_Row], num_shards: int) -> list[list[_Row]]:
    """Longest first, each to the shard with the fewest tokens so far."""
    shards: list[list[_Row]] = [[] for _ in range(num_shards)]
    load = [0] * num_shards
    for row in sorted(rows, key=lambda row: -row.length):
        least = load.index(min(load))
        shards[least].append(row)
        load[least] += row.length
    return shards


def _microbatches(rows: Sequence[_Row], budget: int, pad_id: int) -> list[MicroBatch]:
    """Rows come longest first, so the first of a micro-batch sets its width."""
    batches, start = [], 0
    while start < len(rows):
        end = start + max(1, budget // rows[start].length)
        batches.append(_collate(rows[start:end], pad_id))
        start = end
    return batches


def _collate(rows: Sequence[_Row], pad_id: int) -> MicroBatch:
    """Pad rows to the first one's length. Without rows: two pad tokens and nothing trained, enough for a forward pass."""
    shape = (len(rows), rows[0].length) if rows else (1, 2)
    token_ids = np.full(shape, pad_id, dtype=np.int64)
    mask = np.zeros(shape, dtype=bool)
    behavior, weights, loss_weight = (np.zeros(shape, dtype=np.float32) for _ in range(3))
    versions = np.full(shape, -1, dtype=np.int64)
    for i, row in enumerate(rows):
        n, segment = row.length, row.segment
        token_ids[i, :n] = segment.token_ids[:n]
        chosen = mask[i, :n] = np.asarray(segment.mask[:n], dtype=bool)
        behavior[i, :n][chosen] = np.asarray(segment.logprobs[:n], dtype=np.float32)[chosen]
        weights[i, :n][chosen] = row.weights[:n][chosen]
        loss_weight[i, :n][chosen] = row.loss_weight
        versions[i, :n][chosen] = np.asarray(segment.versions[:n])[chosen]
    return MicroBatch(
        token_ids=token_ids,
        lengths=np.array([row.length for row in rows] or [2], dtype=np.int64),
        mask=mask,
        behavior_logprobs=behavior,
        weights=weights,
        loss_weight=loss_weight,
        versions=versions,
    )
