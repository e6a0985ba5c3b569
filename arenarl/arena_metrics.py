"""How well the tournaments of a step worked, and what they cost. Pure; what cannot be measured is left out, never 0."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations

import numpy as np

from arenarl.types import FLOAT_NOISE, Abstention, EpisodeGroup, Game, Mark, Verdict

MAX_KINDS = 8


def arena_metrics(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """Diagnostics over the games of a step; only the sums of ``cost/`` are there for a step without games.

    | name | meaning |
    |---|---|
    | `group/abstained_game_share` | games without a verdict |
    | `group/abstained/KIND`, `group/gated/REASON` | answers of the judge, members of the groups: how many |
    | `group/gated_share` | members that did not play |
    | `group/tied_game_share` | decided games with equal marks |
    | `group/order_bias` | `order_bias`: 0 for a fair judge, 1 for one that always marks side a up, -1 for side b |
    | `group/order_flip_share` | of the games in which both orders have a winner: those with two different ones |
    | `group/repeat_agreement` | of the pairs of games between the same two that both have a winner: those with the same one |
    | `group/score_spread`, `group/score_stderr` | sd of the scores and rms of their standard errors in a group, mean over groups |
    | `group/score_reliability` | `reliability`, mean over groups |
    | `group/games`, `group/rounds`, `cost/judge_{calls,tokens}_per_group` | means over the groups that played |
    | `time/judge_game_mean`, `time/judge_game_p95` | seconds of a game |
    | `cost/judge_games`, `cost/judge_calls`, `cost/judge_{prompt,completion}_tokens` | sums, marks of single attempts included |
    """
    played = [group for group in groups if group.games]
    games = [game for group in played for game in group.games]
    answers = list(chain.from_iterable(map(_answers, groups)))
    return {
        **mean("group/abstained_game_share", [isinstance(game.result, Abstention) for game in games]),
        **_counts("group/abstained", (answer.kind for answer in answers if isinstance(answer, Abstention))),
        **_gates(groups),
        **mean("group/tied_game_share", [_sign(game.result) == 0 for game in games if game.margin is not None]),
        **_known("group/order_bias", order_bias(played)),
        **mean("group/order_flip_share", list(_flips(games))),
        **mean("group/repeat_agreement", list(chain.from_iterable(_repeats(group.games) for group in played))),
        **_spreads(groups),
        **mean("group/games", [len(group.games) for group in played]),
        **mean("group/rounds", [1 + max(game.round for game in group.games) for group in played]),
        **mean("cost/judge_calls_per_group", [sum(a.calls for a in _answers(group)) for group in played]),
        **mean("cost/judge_tokens_per_group", [sum(map(_tokens, _answers(group))) for group in played]),
        **mean("time/judge_game_mean", [game.seconds for game in games]),
        **({"time/judge_game_p95": float(np.percentile([game.seconds for game in games], 95))} if games else {}),
        "cost/judge_games": float(len(games)),
        "cost/judge_calls": float(sum(answer.calls for answer in answers)),
        "cost/judge_prompt_tokens": float(sum(answer.prompt_tokens for answer in answers)),
        "cost/judge_completion_tokens": float(sum(answer.completion_tokens for answer in answers)),
    }


def order_bias(groups: Sequence[EpisodeGroup]) -> float | None:
    """What the judge adds to side a for being side a, over the root mean square of its margins: 0 for a fair judge.

    1 for a judge that sees nothing but side a, -1 for side b. Beyond that only by noise, in games asked in one order in which
    some players had one side more often.

    Least squares of the margins of all answers (side a minus side b) on the players of each group and one constant for the
    side, so that a strong player who is always on side a is not taken for a bias. Where every pair was asked in both orders
    it is the mean margin.

    Returns:
        None if the games cannot tell the two apart (a star round the anchor asked in one order), or are all ties.
    """
    along = information = squares = 0.0
    count = 0
    for group in groups:
        design, margins = _by_side(group)
        if not len(margins):
            continue
        constant = np.ones(len(margins))
        own = constant - design @ np.linalg.lstsq(design, constant, rcond=None)[0]  # what the players cannot explain
        if own @ own > FLOAT_NOISE * len(margins):
            along += float(own @ margins)
            information += float(own @ own)
            squares += float(margins @ margins)
            count += len(margins)
    return along / information / math.sqrt(squares / count) if squares else None


def reliability(scores: Sequence[float], stderr: Sequence[float], *, shrunk: bool) -> float | None:
    """Share of the variance of the scores that is quality, 0 to 1; None if all scores are equal and without error.

    Shrunk scores and their posterior errors share the variance of quality between them, V / (V + mean stderr^2). In scores
    that are not shrunk the error is a part of V: 1 - mean stderr^2 / V, at least 0.
    """
    variance, error = float(np.var(scores)), float(np.mean(np.square(stderr)))
    if not variance:
        return 0.0 if error else None
    return variance / (variance + error) if shrunk else max(0.0, 1.0 - error / variance)


def _by_side(group: EpisodeGroup) -> tuple[np.ndarray, np.ndarray]:
    """Of all decided answers [A]: design [A, G], +1 for the member on side a and -1 on side b, and the margins [A]."""
    sides = [
        (*((game.i, game.j) if k == 0 else (game.j, game.i)), answer.score_a - answer.score_b)
        for game in group.games
        for k, answer in enumerate(game.answers)
        if isinstance(answer, Verdict)
    ]
    design = np.zeros((len(sides), len(group.episodes)))
    for row, (a, b, _) in zip(design, sides, strict=True):
        row[a], row[b] = 1.0, -1.0
    return design, np.array([margin for *_, margin in sides])


def _flips(games: Iterable[Game]) -> Iterator[bool]:
    for game in games:
        if len(game.halves) == 2 and all(isinstance(half, Verdict) for half in game.halves):
            first, second = map(_sign, game.halves)
            if first and second:
                yield first == second  # the same side, so the other player


def _repeats(games: Iterable[Game]) -> Iterator[bool]:
    winners: dict[frozenset[int], list[int]] = {}
    for game in games:
        if game.margin is not None and (sign := _sign(game.result)):
            winners.setdefault(frozenset((game.i, game.j)), []).append(game.i if sign > 0 else game.j)
    for of_pair in winners.values():
        yield from (one == other for one, other in combinations(of_pair, 2))


def _spreads(groups: Iterable[EpisodeGroup]) -> dict[str, float]:
    spreads, errors, shares = [], [], []
    for group in groups:
        if group.standings is None:
            continue
        pairs = zip(group.standings.scores, group.standings.stderr, strict=True)
        known = [(score, error) for score, error in pairs if score is not None and error is not None]
        if len(known) < 2:
            continue
        scores, stderr = zip(*known, strict=True)
        spreads.append(float(np.std(scores)))
        errors.append(float(np.sqrt(np.mean(np.square(stderr)))))
        shares.append(reliability(scores, stderr, shrunk=group.standings.estimator != "paper"))
    return {
        **mean("group/score_spread", spreads),
        **mean("group/score_stderr", errors),
        **mean("group/score_reliability", [share for share in shares if share is not None]),
    }


def _gates(groups: Iterable[EpisodeGroup]) -> dict[str, float]:
    members = [why for group in groups if group.standings for why in group.standings.gated]
    return {
        **mean("group/gated_share", [bool(why) for why in members]),
        **_counts("group/gated", filter(None, members)),
    }


def _counts(prefix: str, kinds: Iterable[str]) -> dict[str, float]:
    """How many of each kind. A kind that is no short word (an error's text), or one too many, counts as ``other``."""
    count = Counter(kind if re.fullmatch(r"[a-z][a-z0-9_]{0,31}", kind) else "other" for kind in kinds)
    shown: Counter[str] = Counter()
    for place, (kind, number) in enumerate(count.most_common()):
        shown[kind if place < MAX_KINDS else "other"] += number
    return {f"{prefix}/{kind}": float(number) for kind, number in shown.items()}


def _answers(group: EpisodeGroup) -> list[Verdict | Abstention | Mark]:
    """All that the judge gave for a group: what it said of pairs, and of attempts alone."""
    return [*(a for game in group.games for a in game.answers), *chain.from_iterable(group.marks)]


def _sign(result: Verdict | Abstention) -> int:
    """1 if side a won, -1 if side b did, 0 for a tie and for no verdict."""
    return 0 if isinstance(result, Abstention) else int(np.sign(result.margin))


def _tokens(answer: Verdict | Abstention | Mark) -> int:
    return answer.prompt_tokens + answer.completion_tokens


def mean(name: str, values: Sequence[float]) -> dict[str, float]:
    """A metric; none over nothing."""
    return {name: float(sum(values) / len(values))} if values else {}


def _known(name: str, value: float | None) -> Mapping[str, float]:
    return {} if value is None else {name: value}
