"""Hard gates before ranking: an attempt that a judge should not have to read is placed, or left out, without a game."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from arenarl.errors import ConfigError
from arenarl.types import FLOAT_NOISE, Episode, Outcome

Treatment = Literal["play", "last", "out"]
TREATMENTS = ("play", "last", "out")

GATES: Mapping[str, Callable[[Episode], bool]] = {
    "truncated": lambda episode: episode.outcome is Outcome.TRUNCATED,
    "no_answer": lambda episode: not (episode.trajectory.answer or "").strip(),
    "invalid_calls": lambda episode: episode.valid_calls[0] < episode.valid_calls[1],
}
"""What can be wrong with an attempt, the worst first: it ran into a limit; its final answer is missing or blank; a call of it
was malformed, to an unknown tool, or with arguments that the tool's schema refuses."""

DEFAULT_GATES: Mapping[str, Treatment] = {"truncated": "last", "no_answer": "last", "invalid_calls": "play"}


@dataclass(frozen=True, kw_only=True)
class Field:
    """Who plays, by member. ``gated`` [G] says why a member does not, "" for players; ``last`` share the place below them."""

    players: tuple[int, ...]
    last: tuple[int, ...]
    gated: tuple[str, ...]


def sort_out(episodes: Sequence[Episode], gates: Mapping[str, Treatment]) -> Field:
    """Divide a group into players, members placed last, and members left out.

    An attempt that the infrastructure broke is out: it says nothing about the policy. Of several gates that
    an attempt fails the strictest treatment counts, "out" before "last".
    """
    players, last, gated = [], [], []
    for member, episode in enumerate(episodes):
        if not episode.rankable:
            gated.append(str(episode.outcome))
            continue
        failed = [kind for kind, fails in GATES.items() if gates[kind] != "play" and fails(episode)]
        kind = min(failed, key=lambda k: gates[k] != "out", default="")
        gated.append(kind)
        if not kind:
            players.append(member)
        elif gates[kind] == "last":
            last.append(member)
    return Field(players=tuple(players), last=tuple(last), gated=tuple(gated))


def below(scores: NDArray[np.float64]) -> float:
    """A score for those placed last: one standard deviation of the players' scores [P] under the worst of them.

    One unit where the players are equal or alone; 0 without players, so that attempts that all fail their gates are equals;
    nan where no player has a score, since an outage of the whole tournament is no information on anybody.
    """
    known = scores[~np.isnan(scores)]
    if not len(known):
        return math.nan if len(scores) else 0.0
    spread = known.std()
    return float(known.min() - (spread if spread > FLOAT_NOISE * np.abs(known).max() else 1.0))


def check_gates(gates: Mapping[str, str]) -> dict[str, Treatment]:
    """The treatments with the defaults filled in.

    Raises:
        ConfigError: a gate or a treatment that does not exist.
    """
    if not isinstance(gates, Mapping):
        raise ConfigError(f"gates={gates!r} says nothing about gates: give {{'no_answer': 'last'}} or the like")
    for kind, treatment in gates.items():
        if kind not in GATES:
            near = difflib.get_close_matches(kind, GATES, n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown gate {kind!r}: did you mean {near!r}? Known: {', '.join(GATES)}")
        if treatment not in TREATMENTS:
            raise ConfigError(f"gate {kind}={treatment!r} is no treatment; choose one of {', '.join(TREATMENTS)}")
    return {**DEFAULT_GATES, **gates}  # type: ignore[dict-item]  # checked above
