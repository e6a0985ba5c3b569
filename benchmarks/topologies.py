"""How well each tournament recovers hidden qualities from a noisy judge, at what price.

    python benchmarks/topologies.py --groups 200

Qualities are normal. In one call the judge sees the difference of two attempts through logistic noise and a liking for
the first side, P(first wins) = sigmoid(theta difference + 0.5), and states it as two marks, rounded to 0.1, around a
level that wanders from call to call. "both" asks each pair in both orders and adds; "one" asks once.

Printed for each tournament: model calls and comparisons (a comparison is two calls), tau (Kendall's tau-b of scores and
qualities) and adv (correlation of advantages and qualities), each a mean over groups with its standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import math

import numpy as np
from numpy.typing import NDArray

from arenarl.arena import Compare, both_orders, run_tournament
from arenarl.types import Verdict

ROWS: list[tuple[str, str, str]] = [
    ("anchor", "anchor", "both"),
    ("swiss", "wins", "both"),
    ("double_elimination", "depth", "both"),
    ("seeded_elimination", "depth", "both"),
    ("seeded_elimination", "bradley_terry", "both"),
    ("seeded_elimination", "margins", "both"),
    ("even_graph", "bradley_terry", "both"),
    ("even_graph", "margins", "both"),
    ("round_robin", "wins", "both"),
    ("round_robin", "margins", "both"),
    ("round_robin", "margins_one_order", "one"),
]


def judge(qualities: NDArray[np.float64], theta: float, rng: np.random.Generator) -> Compare:
    async def compare(i: int, j: int) -> Verdict:
        seen = qualities[i] - qualities[j] + (0.5 + rng.logistic()) / theta
        level = rng.normal(7.0, 1.0)
        return Verdict(score_a=round(level + seen / 2, 1), score_b=round(level - seen / 2, 1))

    return compare


def kendall_tau_b(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    a, b = np.triu_indices(len(x), 1)
    sx, sy = np.sign(x[a] - x[b]), np.sign(y[a] - y[b])
    pairs = math.sqrt((sx**2).sum() * (sy**2).sum())
    return float((sx * sy).sum() / pairs) if pairs else 0.0


async def study(topology: str, estimator: str, orders: str, args: argparse.Namespace) -> str:
    rows = []
    for group in range(args.groups):
        rng = np.random.default_rng([args.seed, group])  # the same qualities for every tournament
        qualities = rng.normal(size=args.n)
        compare = judge(qualities, args.theta, rng)
        played = await run_tournament(
            topology, args.n, both_orders(compare) if orders == "both" else compare, estimator=estimator, seed=group
        )
        flat = not played.advantages.any()
        adv = 0.0 if flat else np.corrcoef(played.advantages, qualities)[0, 1]
        rows.append((len(played.games), played.rounds, kendall_tau_b(played.scores, qualities), adv))
    games, rounds, tau, adv = np.mean(rows, axis=0)
    tau_se, adv_se = (np.std(rows, axis=0, ddof=1) / math.sqrt(args.groups))[2:]
    calls = games * (2 if orders == "both" else 1)
    return (
        f"{topology:<19} {estimator:<18} {orders:<5} {calls:5.0f} {calls / 2:11.0f} {rounds:6.0f}"
        f"   {tau:.3f} ± {tau_se:.3f}   {adv:.3f} ± {adv_se:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare tournaments on simulated groups.")
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--n", type=int, default=8, help="players in a group")
    parser.add_argument("--theta", type=float, default=1.5, help="sharpness of the judge")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{'topology':<19} {'estimator':<18} order calls comparisons rounds   tau             adv")
    for row in ROWS:
        print(asyncio.run(study(*row, args)), flush=True)


if __name__ == "__main__":
    main()
