"""What the requests of one training step may use: tokens, money, or both."""

from __future__ import annotations

import math
from dataclasses import dataclass

from arenarl.errors import ConfigError


@dataclass
class Usage:
    """What one call of an endpoint has used so far, over all the requests that it sent.

    Attributes:
        calls: requests that were sent.
        lost: of these, given up without an answer. A server may have worked on them, and charge for it.
        prompt_tokens, completion_tokens: as the server counted them.
    """

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    lost: int = 0


@dataclass
class _Step:
    tokens: float = 0
    cost: float = 0.0
    reserved_tokens: float = 0
    reserved_cost: float = 0.0


class Reservation:
    """What a call may use at most, held until it is known what it did use. It belongs to the step in which it was made."""

    def __init__(self, budget: Budget, step: _Step, most: Usage) -> None:
        self._budget, self._step, self._most = budget, step, most
        self._add(most, reserved=1)

    def settle(self, used: Usage) -> None:
        """Give the reservation back and book what was used: of lost requests, the most."""
        self._add(self._most, reserved=-1)
        self._step.tokens += _tokens(used) + used.lost * _tokens(self._most)
        self._step.cost += self._budget.cost(used) + used.lost * self._budget.cost(self._most)

    def _add(self, most: Usage, reserved: int) -> None:
        self._step.reserved_tokens += reserved * _tokens(most)
        self._step.reserved_cost += reserved * self._budget.cost(most)


def _tokens(usage: Usage) -> int:
    return usage.prompt_tokens + usage.completion_tokens


class Budget:
    """A call may start while the step's limits lie above what was used and what the calls in flight may still use.

    So a step uses no more than its limits and one call, as far as the prompts were guessed right and no request had to be
    repeated. Each copy of an endpoint has a budget of its own: every environment runner builds its judge, so the step of a
    training run with four runners may use four times the limits. What is never told of a step has one budget for all its life.

    Args:
        tokens_per_step: prompt and completion tokens together; None: no limit.
        cost_per_step: in the unit of the prices; None: no limit.
        price_in, price_out: for a million tokens of prompt and of completion.

    Raises:
        ConfigError: a limit is not positive, a price is negative, or a limit of cost has no prices.
    """

    def __init__(
        self,
        tokens_per_step: float | None = None,
        cost_per_step: float | None = None,
        price_in: float = 0.0,
        price_out: float = 0.0,
    ) -> None:
        limits = {"tokens_per_step": tokens_per_step, "cost_per_step": cost_per_step}
        prices = {"price_in": price_in, "price_out": price_out}
        check_positive(**{name: limit for name, limit in limits.items() if limit is not None})
        check_positive(**{name: price for name, price in prices.items() if price != 0})
        if cost_per_step is not None and not price_in + price_out:
            raise ConfigError(
                f"cost_per_step={cost_per_step} needs prices; set price_in and price_out, for a million tokens"
            )
        self.tokens_per_step, self.cost_per_step = tokens_per_step, cost_per_step
        self.price_in, self.price_out = price_in, price_out
        self._version: int | None = None
        self._step = _Step()

    def begin_step(self, version: int) -> None:
        """Full again, if the version is a new one. Calls in flight are booked on the step in which they began."""
        if version != self._version:
            self._version, self._step = version, _Step()

    def cost(self, used: Usage) -> float:
        return (used.prompt_tokens * self.price_in + used.completion_tokens * self.price_out) / 1e6

    def reserve(self, most: Usage) -> Reservation | None:
        """Room for one call that uses no more than ``most``; None if there is none now."""
        step = self._step
        if _full(step.tokens + step.reserved_tokens, self.tokens_per_step):
            return None
        if _full(step.cost + step.reserved_cost, self.cost_per_step):
            return None
        return Reservation(self, step, most)

    def spent(self) -> str | None:
        """Which limit is used up, in words. None: what calls in flight do not use will be free again."""
        if _full(self._step.tokens, self.tokens_per_step):
            return f"{self._step.tokens} of tokens_per_step={self.tokens_per_step} used"
        if _full(self._step.cost, self.cost_per_step):
            return f"{self._step.cost:.6g} of cost_per_step={self.cost_per_step} used"
        return None


def _full(amount: float, limit: float | None) -> bool:
    return limit is not None and amount >= limit


def check_positive(kind: type[int] | type[float] = float, /, **settings: float) -> None:
    """Refuse settings that are no positive numbers, or no whole ones for ``int``.

    Raises:
        ConfigError: naming the first of them.
    """
    allowed, words = ((int,), "a whole number above 0") if kind is int else ((int, float), "a number above 0")
    for name, value in settings.items():
        if type(value) not in allowed or not 0 < value < math.inf:
            raise ConfigError(f"{name}={value!r} must be {words}")
