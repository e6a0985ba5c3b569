"""How well each tournament finds hidden qualities through a fallible judge, and at what price: `arenarl arena simulate`.

All tournaments of a study meet the same groups and the same judge, so their differences are paired. `calibrate` asks a real
judge what these simulations assume of theirs.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from arenarl.arena import Compare, resolve, run_tournament
from arenarl.errors import ConfigError
from arenarl.estimators import ESTIMATORS, ranks
from arenarl.functional import group_advantages
from arenarl.simulation import check_model, pointwise_mark, simulated_compare, uniforms
from arenarl.topologies import TOPOLOGIES
from arenarl.types import Abstention, Verdict

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Method:
    """A topology and an estimator; or, with the topology "pointwise", marks of each attempt alone: "x4 fine" are four."""

    topology: str
    estimator: str
    orders: int = 1

    def __str__(self) -> str:
        return f"{self.topology} {self.estimator}" + (" both orders" if self.orders == 2 else "")


@dataclass(frozen=True)
class Setting:
    """Who plays before which judge.

    Attributes:
        missing: share of games that the judge leaves undecided. Of a game in both orders either half decides that, so its
            calls fail less often: 1 - (1 - missing)^(1/2).
    """

    players: int = 16
    kind: str = "margin"
    theta: float = 1.5
    missing: float = 0.0

    def __str__(self) -> str:
        lost = f", {self.missing:.0%} of the games missing" if self.missing else ""
        return f"{self.players} players, {self.kind} judge, theta {self.theta:g}{lost}"


@dataclass(frozen=True)
class Mean:
    """Mean over groups with its standard error."""

    value: float
    stderr: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.stderr:.3f}"


@dataclass(frozen=True)
class Row:
    """One line of the study.

    Attributes:
        calls: questions to the judge; a comparison, in the paper's count, is two.
        waits: rounds one after another.
        missing: share of games without a verdict.
        tau: Kendall's tau-b of ranks and qualities.
        advantage: correlation of advantages and qualities within the group; 0 for a group without a signal.
        top1: probability that the best of the group is ranked first; among k in a tie for the first place, 1 / k.
        gain: ``advantage`` minus that of the paper's setting, `REFERENCE`, on the same groups.
    """

    method: Method
    setting: Setting
    calls: float
    waits: float
    missing: float
    tau: Mean
    advantage: Mean
    top1: Mean
    gain: Mean


MEASURES = ("calls", "waits", "missing", "tau", "advantage", "top1")
REFERENCE = Method("single_elimination", "paper", 2)
DEFAULT = Method("even_graph", "margin_ls", 1)
POINTWISE = tuple(Method("pointwise", name) for name in ("x1", "x4", "x1 fine", "x4 fine"))


def simulate(
    console: Console,
    *,
    topologies: Sequence[str] | None = None,
    estimators: Sequence[str] | None = None,
    players: Sequence[int] = (16,),
    kinds: Sequence[str] = ("margin",),
    thetas: Sequence[float] = (1.5,),
    groups: int = 200,
    seed: int = 0,
    orders: int | None = None,
    missing: float = 0.0,
    out: str | Path | None = None,
) -> list[Row]:
    """Play every topology with every estimator, print how they and pointwise marks did, and return the rows.

    Args:
        topologies, estimators: names; None takes all.
        kinds, thetas: of judges, every one with every other (`arenarl.simulation`).
        groups: simulated groups behind each row.
        orders: how often each pair is asked; None is the topology's own choice.
        missing: share of games left without a verdict.
        out: file that gets the rows as JSON too.

    Raises:
        ConfigError: an unknown name, or a number out of its range.
    """
    if groups < 2:
        raise ConfigError(f"groups={groups} gives no standard error: set groups to 2 or more")
    if not 0 <= missing < 1:
        raise ConfigError(f"missing={missing} is no share of games that leaves some: set a number from 0 to below 1")
    if min(players) < 2:
        raise ConfigError(f"players={min(players)} leaves nobody to compare: set players to 2 or more")
    if out is not None and not Path(out).parent.is_dir():
        raise ConfigError(f"out={str(out)!r} is in no folder that exists: make {str(Path(out).parent)!r} first")
    for kind, theta in itertools.product(kinds, thetas):
        check_model(kind, theta, missing)
    settings = [Setting(*values, missing) for values in itertools.product(players, kinds, thetas)]
    asked = [*methods(topologies, estimators, orders), *POINTWISE]
    rows = []
    for setting in settings:
        with console.status(f"playing {setting}"):
            found = asyncio.run(study(asked, [setting], groups=groups, seed=seed))
        show(console, table(found))
        rows += found
    console.print(f"{groups} groups, seed {seed}; gain is over {REFERENCE}, paired", highlight=False, style="dim")
    if out is not None:
        Path(out).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return rows


def methods(
    topologies: Sequence[str] | None = None, estimators: Sequence[str] | None = None, orders: int | None = None
) -> list[Method]:
    """Every topology with every estimator; None takes all. Raises ConfigError for an unknown name."""
    found = []
    for topology, estimator in itertools.product(topologies or TOPOLOGIES, estimators or ESTIMATORS):
        name, _, fit, asked = resolve(topology, estimator, orders)
        found.append(Method(name, fit.name, asked))
    return found


async def study(asked: Sequence[Method], settings: Iterable[Setting], *, groups: int, seed: int = 0) -> list[Row]:
    """Rows of all methods in all settings, each gain against `REFERENCE`, which is played whether asked for or not."""
    return [row for setting in settings for row in await _rows(asked, setting, groups, seed)]


async def _rows(asked: Sequence[Method], setting: Setting, groups: int, seed: int) -> list[Row]:
    """Methods that differ in the estimator only share their games."""
    plans: dict[tuple[str, int], list[Method]] = {}
    for method in dict.fromkeys([REFERENCE, *asked]):
        plans.setdefault((method.topology, method.orders), []).append(method)
    measured: dict[Method, list[tuple[float, ...]]] = {method: [] for plan in plans.values() for method in plan}
    for group in range(groups):
        qualities = np.random.default_rng([seed, group]).normal(size=setting.players)
        for (topology, _), plan in plans.items():
            measure = _marked if topology == "pointwise" else _played
            for method, values in zip(
                plan, await measure(plan, setting, qualities, group_seed(seed, group)), strict=True
            ):
                measured[method].append(values)
    found = {method: np.array(values, dtype=np.float64) for method, values in measured.items()}
    return [_row(method, setting, found[method], found[REFERENCE]) for method in asked]


def group_seed(seed: int, group: int) -> int:
    """One seed for the judge and the plan of a group, the same for all methods."""
    return seed * 1_000_003 + group


async def _played(plan: Sequence[Method], setting: Setting, qualities: Array, seed: int) -> list[tuple[float, ...]]:
    """`MEASURES` of one tournament under each estimator of the plan."""
    topology, orders = plan[0].topology, plan[0].orders
    outage = 1 - (1 - setting.missing) ** (1 / orders)
    compare = simulated_compare(qualities, kind=setting.kind, theta=setting.theta, seed=seed, outage=outage)
    result = await run_tournament(topology, len(qualities), compare, estimator="paper", orders=orders, seed=seed)
    decided = [game for game in result.games if game.margin is not None]
    calls = sum(len(game.answers) for game in result.games)
    price = (calls, result.rounds, result.abstentions / len(result.games))
    values: list[tuple[float, ...]] = []
    for method in plan:
        fit = ESTIMATORS[method.estimator].fit
        scores = fit(len(qualities), decided).scores if fit else -result.ranks
        values.append((*price, *_quality(scores, qualities)))
    return values


async def _marked(plan: Sequence[Method], setting: Setting, qualities: Array, seed: int) -> list[tuple[float, ...]]:
    """`MEASURES` of marks. Where the level of a group lies between two tenths is luck: it is drawn from 0.65 to 0.75."""
    centre = 0.65 + 0.1 * uniforms(seed, "centre")[0]
    values: list[tuple[float, ...]] = []
    for method in plan:
        count, fine = (4 if "x4" in method.estimator else 1), "fine" in method.estimator
        marks = np.full((len(qualities), count), np.nan)
        for k, repeat in np.ndindex(marks.shape):
            u = uniforms(seed, str(k), f"mark {repeat}")
            if u[3] >= setting.missing:
                marks[k, repeat] = pointwise_mark(float(qualities[k]), u, centre=centre, fine=fine)
        known = np.isfinite(marks).sum(axis=1)
        scores = np.divide(np.nansum(marks, axis=1), known, out=np.full(len(marks), np.nan), where=known > 0)
        values.append((marks.size, 1, 1 - known.sum() / marks.size, *_quality(scores, qualities)))
    return values


def _quality(scores: Array, qualities: Array) -> tuple[float, float, float]:
    """(tau, advantage, top1) of a group. A player without information has no update: its advantage counts as 0."""
    places = ranks(scores)
    advantages = group_advantages([None if math.isnan(score) else score for score in scores.tolist()])
    update = np.array([a or 0.0 for a in advantages])
    first = places == np.nanmin(places, initial=len(places))
    top1 = first[np.argmax(qualities)] / first.sum() if first.any() else 1 / len(first)
    return kendall_tau_b(-places, qualities), correlation(update, qualities), float(top1)


def kendall_tau_b(x: Array, y: Array) -> float:
    """Concordant less discordant pairs over the geometric mean of the pairs that either sets apart. A nan ties with all."""
    a, b = np.triu_indices(len(x), 1)
    sx, sy = np.nan_to_num(np.sign(x[a] - x[b])), np.sign(y[a] - y[b])
    pairs = math.sqrt((sx**2).sum() * (sy**2).sum())
    return float((sx * sy).sum() / pairs) if pairs else 0.0


def correlation(x: Array, y: Array) -> float:
    """Pearson's, and 0 if either does not vary."""
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale > 1e-12 else 0.0


def _row(method: Method, setting: Setting, measured: Array, reference: Array) -> Row:
    calls, waits, missing = (float(value) for value in measured[:, :3].mean(axis=0))
    tau, advantage, top1, gain = (
        Mean(float(column.mean()), float(column.std(ddof=1)) / math.sqrt(len(column)))
        for column in (*measured[:, 3:].T, measured[:, 4] - reference[:, 4])
    )
    return Row(method, setting, calls, waits, missing, tau, advantage, top1, gain)


def table(rows: Sequence[Row]) -> Table:
    """Rows of one setting."""
    found = Table(title=str(rows[0].setting), title_justify="left", title_style="bold", box=MARKDOWN)
    for heading in ("topology", "estimator"):
        found.add_column(heading)
    for heading in ("orders", "calls", "comparisons", "waits", "missing", "tau", "advantage", "top1", "gain"):
        found.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        orders = "" if row.method.topology == "pointwise" else str(row.method.orders)
        found.add_row(
            row.method.topology, row.method.estimator, orders, f"{row.calls:.0f}", f"{row.calls / 2:g}", f"{row.waits:g}",
            f"{row.missing:.2f}", str(row.tau), str(row.advantage), str(row.top1), f"{row.gain.value:+.3f} ± {row.gain.stderr:.3f}",
        )  # fmt: skip
    return found


def show(console: Console, found: Table) -> None:
    """Print a table at its own width: a terminal that is too narrow wraps lines, and no number is cut."""
    page = io.StringIO()
    Console(file=page, width=1000).print(found)
    lines = page.getvalue().splitlines()
    console.print("\n".join(line.rstrip() for line in lines), soft_wrap=True, markup=False, highlight=False)


@dataclass(frozen=True)
class Calibration:
    """What a judge's answers are like. Shares of pairs; nan where no pair tells.

    Attributes:
        first: wins of the first side among first answers with a winner; 0.5 is a judge without a liking for a side.
        flips: the other order gives the other winner.
        repeats: the same order, asked again, gives the same winner. 1 from a cache or at temperature 0 says nothing.
        ties: ties among first answers.
        abstained: a first answer without a verdict.
        margins, wins: correlation of the two orders of a pair, by margin and by who won (1, 0 or -1). If ``margins`` is not
            above ``wins``, a margin says no more than who won.
    """

    first: float
    flips: float
    repeats: float
    ties: float
    abstained: float
    margins: float
    wins: float


async def calibrate(compare: Compare, pairs: Sequence[tuple[int, int]]) -> Calibration:
    """Ask each pair three times, forth, back and forth again, and say what the answers are like.

    Raises:
        ConfigError: no pairs.
    """
    if not pairs:
        raise ConfigError("pairs=[] leaves nothing to ask: give some hundred pairs of attempts at one task each")
    answers = [[await compare(i, j), await compare(j, i), await compare(i, j)] for i, j in pairs]
    margins = np.array([[_margin(answer) for answer in three] for three in answers]) * (1, -1, 1)
    forth, back, again = np.sign(margins).T
    known = np.isfinite(forth * back)
    return Calibration(
        first=_share(forth > 0, np.abs(forth) == 1),
        flips=_share(forth != back, np.abs(forth * back) == 1),
        repeats=_share(forth == again, np.abs(forth * again) == 1),
        ties=_share(forth == 0, np.isfinite(forth)),
        abstained=float(np.isnan(forth).mean()),
        margins=correlation(margins[known, 0], margins[known, 1]) if known.any() else math.nan,
        wins=correlation(forth[known], back[known]) if known.any() else math.nan,
    )


def _margin(answer: Verdict | Abstention) -> float:
    return math.nan if isinstance(answer, Abstention) else round(answer.score_a - answer.score_b, 9)


def _share(event: NDArray[np.bool_], among: NDArray[np.bool_]) -> float:
    return float(event[among].mean()) if among.any() else math.nan
