"""Groups of episodes to padded micro-batches under a token budget, each episode with weight 1.

The loss of a step is ``(1 / E) * sum over episodes (1 / n_e) * sum over its n_e trained tokens``, where E counts the
trained episodes of the whole step. Both divisors are written into ``MicroBatch.loss_weight``, so that a plain sum over
micro-batches and shards is the loss, however the rows were cut. A distillation is weighed by lambda times the same
``loss_weight``. Its teacher reads a row of its own: the segment with the memory put in.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        distill_weight: [B, T] float32, lambda * loss_weight at the tokens that a teacher scores, 0 elsewhere.
        teacher_ids: [B', T'] int64, right-padded: the distilled rows with the memory in them; [0, 0] if there are none.
        teacher_rows: [B'] int64, which row of ``token_ids`` each of them is.
        teacher_shift: [B'] int64, length of its memory. All trained tokens come behind the memory, so the token in
            column c of the row is in column c + shift of the teacher's.
    """

    token_ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    weights: NDArray[np.float32]
    loss_weight: NDArray[np.float32]
    versions: NDArray[np.int64]
    distill_weight: NDArray[np.float32]
    teacher_ids: NDArray[np.int64]
    teacher_rows: NDArray[np.int64]
    teacher_shift: NDArray[np.int64]

    @property
    def trained_tokens(self) -> int:
        return int(self.mask.sum())


@dataclass(frozen=True, kw_only=True)
class BatchStats:
    """What one step trains on.

    Attributes:
        episodes: trained episodes (E), those of zero weight included.
        zero_weight_episodes: of these, how many were left out of the arrays: all their advantages are 0, and no teacher
            reads them.
        segments: packed rows.
        tokens: packed tokens without padding.
        trained_tokens: of these, how many are trained on.
        teacher_tokens: tokens that teachers read besides, without padding.
        undistilled: segments that were to be distilled and are not, because up to the memory they are not as the first
            segment of their group, or were sampled.
        padding_share: share of the padded arrays that is padding, in [0, 1].
        refused: (episode id, reason) of the records that ``refusal`` turned down.
    """

    episodes: int = 0
    zero_weight_episodes: int = 0
    segments: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    teacher_tokens: int = 0
    undistilled: int = 0
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
class _Part:
    """An episode that is trained on, with its advantages; and with its lambdas, or None if it is not distilled."""

    episode: Episode
    advantages: tuple[NDArray[np.float32], ...]
    lambdas: tuple[NDArray[np.float32], ...] | None
    memory_ids: tuple[int, ...]
    before_memory: tuple[int, ...] | None

    def rows(self, loss_weight: float) -> list[_Row]:
        """One for each segment with a sampled token."""
        lambdas = self.lambdas or (None,) * len(self.advantages)
        return [
            self._row(segment, advantages, lam, loss_weight)
            for segment, advantages, lam in zip(self.episode.segments, self.advantages, lambdas, strict=True)
            if segment.num_sampled
        ]

    def _row(
        self, segment: Segment, advantages: NDArray[np.float32], lam: NDArray[np.float32] | None, loss_weight: float
    ) -> _Row:
        length = int(np.flatnonzero(segment.mask)[-1]) + 1
        if lam is None or not lam[np.asarray(segment.mask, bool)].any():
            return _Row(segment, advantages, loss_weight, length)
        before = self.before_memory
        if before is None or segment.token_ids[: len(before)] != before or any(segment.mask[: len(before)]):
            return _Row(segment, advantages, loss_weight, length, undistilled=True)
        teacher = (*before, *self.memory_ids, *segment.token_ids[len(before) : length])
        return _Row(segment, advantages, loss_weight, length, lam, teacher)


@dataclass(frozen=True)
class _Row:
    """A segment; ``length`` counts its tokens up to the last trained one, since what follows changes nothing."""

    segment: Segment
    advantages: NDArray[np.float32]
    loss_weight: float
    length: int
    lambdas: NDArray[np.float32] | None = None
    teacher: tuple[int, ...] = ()
    undistilled: bool = False

    @property
    def useful(self) -> bool:
        return bool(self.teacher) or bool(self.advantages[np.asarray(self.segment.mask, bool)].any())


def pack(
    groups: Sequence[EpisodeGroup],
    streams: Sequence[Sequence[Stream]],
    *,
    tokens_per_microbatch: int,
    num_shards: int = 1,
    pad_id: int = 0,
    keep_zero_weights: bool = False,
) -> Batch:
    """Cut the trained segments of a step into micro-batches of at most ``tokens_per_microbatch`` padded tokens.

    What teachers read counts. Rows go, longest first, to the shard with the fewest tokens, and neighbours in length
    share a micro-batch; a row longer than the budget has one of its own. Shards that come out with fewer micro-batches
    are filled up with ones that train nothing, because data-parallel ranks must take the same number of passes.

    Args:
        streams: for each group a policy gradient and at most one distillation. An episode that takes no part in the
            policy gradient is not distilled either. An empty memory teaches nothing and costs nothing.
        keep_zero_weights: pack episodes whose advantages are all 0 and that no teacher reads. They count as trained
            episodes in any case, so leaving them out changes nothing if the loss has no other term; keep them if it
            has (``kl_coeff`` > 0).

    Raises:
        ConfigError: the budget is not positive, or the streams do not fit their group.
    """
    if tokens_per_microbatch < 1:
        raise ConfigError(f"tokens_per_microbatch is {tokens_per_microbatch}: give at least 1")
    trained, refused = _trained_episodes(groups, streams)
    episodes = [part.rows(1.0 / (len(trained) * part.episode.num_sampled)) for part in trained]
    packed = [rows for rows in episodes if keep_zero_weights or any(row.useful for row in rows)]
    rows = list(chain(*packed))
    shards = [_microbatches(rows_of, tokens_per_microbatch, pad_id) for rows_of in _shards(rows, num_shards)]
    count = max(len(shard) for shard in shards)
    for shard in shards:
        shard.extend(_collate([], pad_id) for _ in range(count - len(shard)))
    padded = sum(mb.token_ids.size + mb.teacher_ids.size for mb in chain(*shards))
    tokens, teacher_tokens = sum(row.length for row in rows), sum(len(row.teacher) for row in rows)
    return Batch(
        shards=tuple(map(tuple, shards)),
        stats=BatchStats(
            episodes=len(trained),
            zero_weight_episodes=len(episodes) - len(packed),
            segments=len(rows),
            tokens=tokens,
            trained_tokens=sum(row.segment.num_sampled for row in rows),
            teacher_tokens=teacher_tokens,
            undistilled=sum(row.undistilled for row in chain(*episodes)),
            padding_share=1.0 - (tokens + teacher_tokens) / padded if padded else 0.0,
            refused=tuple(refused),
        ),
    )


def _trained_episodes(
    groups: Sequence[EpisodeGroup], streams: Sequence[Sequence[Stream]]
) -> tuple[list[_Part], list[tuple[str, str]]]:
    """Episodes that take part and have a sampled token; and the refused ones."""
    trained, refused = [], []
    for group, of_group in zip(groups, streams, strict=True):
        policy, distillation = _by_name(group, of_group)
        memory_ids, before_memory = distillation.memory_ids, _before_memory(group, distillation.splice)
        lambdas = distillation.weights if memory_ids else (None,) * len(group.episodes)
        for episode, advantages, lam in zip(group.episodes, policy.weights, lambdas, strict=True):
            if advantages is None or not episode.num_sampled:
                continue
            if reason := refusal(episode) or _not_finite(episode, advantages) or _not_finite(episode, lam):
                refused.append((episode.episode_id, reason))
            else:
                trained.append(_Part(episode, advantages, lam, memory_ids, before_memory))
    return trained, refused


def _by_name(group: EpisodeGroup, streams: Sequence[Stream]) -> tuple[Stream, Stream]:
    """The policy gradient and the distillation of a group; without one, a distillation of nobody."""
    by_name = {"distillation": Stream(name="distillation", weights=(None,) * len(group.episodes))}
    by_name |= {stream.name: stream for stream in streams}
    if "policy_gradient" not in by_name or len(streams) > len({stream.name for stream in streams}):
        raise ConfigError(
            f"group {group.group_id} has the streams {[s.name for s in streams]}: give one policy_gradient and at most one "
            "distillation"
        )
    for stream in by_name.values():
        _check_shape(group, stream)
    return by_name["policy_gradient"], by_name["distillation"]


def _check_shape(group: EpisodeGroup, stream: Stream) -> None:
    if len(stream.weights) != len(group.episodes):
        raise ConfigError(
            f"{stream.name} stream of group {group.group_id} has {len(stream.weights)} entries for "
            f"{len(group.episodes)} episodes"
        )
    for episode, weights in zip(group.episodes, stream.weights, strict=True):
        if weights is not None and [len(w) for w in weights] != [len(s.token_ids) for s in episode.segments]:
            raise ConfigError(
                f"{stream.name} weights of episode {episode.episode_id} do not have the shape of its segments"
            )


def _before_memory(group: EpisodeGroup, splice: int) -> tuple[int, ...] | None:
    """What stands before the memory in the group's first segment; None if that is too short."""
    first = next((episode.segments[0].token_ids for episode in group.episodes if episode.segments), ())
    return first[:splice] if splice <= len(first) else None


def _not_finite(episode: Episode, weights: tuple[NDArray[np.float32], ...] | None) -> str | None:
    if weights is None:
        return None
    pairs = zip(weights, episode.segments, strict=True)
    finite = all(np.isfinite(w[np.asarray(segment.mask, bool)]).all() for w, segment in pairs)
    return None if finite else "a stream weight is not finite"


def _shards(rows: Sequence[_Row], num_shards: int) -> list[list[_Row]]:
    """Longest first, each to the shard with the fewest tokens so far."""
    shards: list[list[_Row]] = [[] for _ in range(num_shards)]
    load = [0] * num_shards
    for row in sorted(rows, key=lambda row: -row.length):
        least = load.index(min(load))
        shards[least].append(row)
        load[least] += row.length + len(row.teacher)
    return shards


def _microbatches(rows: Sequence[_Row], budget: int, pad_id: int) -> list[MicroBatch]:
    """Rows come longest first, so the first of a micro-batch sets its width."""
    batches, start = [], 0
    while start < len(rows):
        end = start + 1
        while end < len(rows) and _padded(rows[start : end + 1]) <= budget:
            end += 1
        batches.append(_collate(rows[start:end], pad_id))
        start = end
    return batches


def _padded(rows: Sequence[_Row]) -> int:
    taught = [len(row.teacher) for row in rows if row.teacher]
    return len(rows) * rows[0].length + len(taught) * max(taught, default=0)


def _collate(rows: Sequence[_Row], pad_id: int) -> MicroBatch:
    """Pad rows to the first one's length. Without rows: two pad tokens and nothing trained, enough for a forward pass."""
    shape = (len(rows), rows[0].length) if rows else (1, 2)
    token_ids = np.full(shape, pad_id, dtype=np.int64)
    mask = np.zeros(shape, dtype=bool)
    behavior, weights, loss_weight, distill_weight = (np.zeros(shape, dtype=np.float32) for _ in range(4))
    versions = np.full(shape, -1, dtype=np.int64)
    for i, row in enumerate(rows):
        n, segment = row.length, row.segment
        token_ids[i, :n] = segment.token_ids[:n]
        chosen = mask[i, :n] = np.asarray(segment.mask[:n], dtype=bool)
        behavior[i, :n][chosen] = np.asarray(segment.logprobs[:n], dtype=np.float32)[chosen]
        weights[i, :n][chosen] = row.advantages[:n][chosen]
        loss_weight[i, :n][chosen] = row.loss_weight
        versions[i, :n][chosen] = np.asarray(segment.versions[:n])[chosen]
        if row.lambdas is not None:
            distill_weight[i, :n][chosen] = row.lambdas[:n][chosen] * row.loss_weight
    return MicroBatch(
        token_ids=token_ids,
        lengths=np.array([row.length for row in rows] or [2], dtype=np.int64),
        mask=mask,
        behavior_logprobs=behavior,
        weights=weights,
        loss_weight=loss_weight,
        versions=versions,
        distill_weight=distill_weight,
        **_teachers(rows, pad_id),
    )


def _teachers(rows: Sequence[_Row], pad_id: int) -> dict[str, NDArray[np.int64]]:
    taught = [(i, row) for i, row in enumerate(rows) if row.teacher]
    ids = np.full((len(taught), max((len(row.teacher) for _, row in taught), default=0)), pad_id, dtype=np.int64)
    for line, (_, row) in zip(ids, taught, strict=True):
        line[: len(row.teacher)] = row.teacher
    return {
        "teacher_ids": ids,
        "teacher_rows": np.array([i for i, _ in taught], dtype=np.int64),
        "teacher_shift": np.array([len(row.teacher) - row.length for _, row in taught], dtype=np.int64),
    }
