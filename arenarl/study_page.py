"""The tables and plots of docs/arena.md, anew:

    python -m arenarl.study_page docs/img

Prints the tables as Markdown and writes three plots to the folder. About six minutes of one core at 500 groups a row.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from arenarl.arena import run_tournament
from arenarl.simulation import simulated_compare
from arenarl.study import (
    DEFAULT,
    POINTWISE,
    REFERENCE,
    Method,
    Row,
    Setting,
    calibrate,
    correlation,
    group_seed,
    methods,
    show,
    study,
    table,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, ALONE, ACCENT, PAPER = "#22252b", "#8b93a1", "#667080", "#c2410c", "#1f4e79"
JUDGES = (
    ("margin", 3.0),
    ("margin", 1.5),
    ("margin", 0.7),
    ("coarse", 1.5),
    ("lapse", 1.5),
    ("binary", 1.5),
    ("binary", 0.7),
)
EXTRA = (
    Method("even_graph", "margin_ls", 2),
    Method("even_graph", "bradley_terry", 2),
    Method("swiss", "margin_ls", 1),
)
SHIFT = {"double_elimination": 0.93, "info_gain": 0.965, "pointwise": 1.045}
"""Points at one place are set apart by a few per cent of their calls."""
LINES = {  # the methods of the other two plots: colour, face of the mark, name
    DEFAULT: (ACCENT, ACCENT, "even graph, least squares"),
    replace(DEFAULT, estimator="bradley_terry"): (ACCENT, "white", "even graph, Bradley-Terry"),
    replace(REFERENCE, estimator="margin_ls"): (PAPER, "white", "single elimination, least squares"),
    REFERENCE: (PAPER, PAPER, "single elimination, as in the paper"),
    Method("anchor", "paper", 2): (MUTED, MUTED, "anchor"),
}


def page(
    folder: Path,
    console: Console,
    *,
    players: Sequence[int] = (8, 16, 32),
    judges: Sequence[tuple[str, float]] = JUDGES,
    groups: int = 500,
    pairs: int = 2000,
    seed: int = 0,
) -> None:
    """Run the study, print its tables, and write arena-cost.svg, arena-judges.svg and arena-missing.svg."""
    every, sizes = [*methods(), *EXTRA, *POINTWISE], [Setting(players=n) for n in players]

    def run(asked: Sequence[Method], settings: Sequence[Setting]) -> list[Row]:
        return asyncio.run(study(asked, settings, groups=groups, seed=seed))

    main = {setting: run(every, [setting]) for setting in sizes}
    for rows in main.values():
        show(console, table(rows))
    robust = run([method for method in every if method not in POINTWISE], [Setting(kind=k, theta=t) for k, t in judges])
    show(console, across(robust))
    show(console, asyncio.run(mixed_spread(list(LINES), ("margin", "coarse", "binary"), groups=groups, seed=seed)))
    show(console, asyncio.run(calibrations(judges, pairs=pairs, seed=seed)))
    missing = run(list(LINES), [Setting(missing=share / 10) for share in range(6)])
    plots(folder, main[Setting()], robust, missing)


def across(rows: Sequence[Row]) -> Table:
    """Advantage correlation, methods down and judges across."""
    cells = {(row.method, row.setting): row.advantage for row in rows}
    settings = list(dict.fromkeys(row.setting for row in rows))
    found = Table("method", *(f"{s.kind} {s.theta:g}" for s in settings), title="advantage, 16 players", box=MARKDOWN)
    for method in dict.fromkeys(row.method for row in rows):
        found.add_row(str(method), *(str(cells[method, setting]) for setting in settings))
    return found


async def mixed_spread(asked: Sequence[Method], kinds: Sequence[str], *, groups: int, seed: int = 0) -> Table:
    """What groups with little to tell do to the update: every other group of 16 has qualities of sd 0.15 instead of 1.

    For advantages divided by the group's standard deviation and for advantages as they are: correlation with the qualities,
    each less its group's mean, over all groups together; in brackets the share of the squared update that falls to the flat
    half.
    """
    found = Table("method", "advantages", *kinds, title="groups of mixed spread, 16 players", box=MARKDOWN)
    for method in asked:
        cells: dict[str, list[str]] = {"divided by sd": [], "as they are": []}
        for kind in kinds:
            truth, divided, plain = np.zeros((3, groups, 16))
            for group in range(groups):
                qualities = np.random.default_rng([seed, group]).normal(size=16) * (1.0 if group % 2 else 0.15)
                own = group_seed(seed, group)
                result = await run_tournament(
                    method.topology, 16, simulated_compare(qualities, kind=kind, seed=own),
                    estimator=method.estimator, orders=method.orders, seed=own,
                )  # fmt: skip
                truth[group] = qualities - qualities.mean()
                divided[group], plain[group] = result.advantages, result.rewards - result.rewards.mean()
            for name, update in zip(cells, (divided, plain), strict=True):
                flat = (update[::2] ** 2).sum() / (update**2).sum()
                cells[name].append(f"{correlation(update.ravel(), truth.ravel()):.3f} ({flat:.2f})")
        for name, values in cells.items():
            found.add_row(str(method), name, *values)
    return found


async def calibrations(judges: Sequence[tuple[str, float]], *, pairs: int, seed: int = 0) -> Table:
    """What `calibrate` finds for each simulated judge, on random pairs of normal qualities."""
    names = ("first", "flips", "repeats", "ties", "abstained", "margins", "wins")
    found = Table("judge", *names, title=f"calibration on {pairs} pairs", box=MARKDOWN)
    qualities = np.random.default_rng(seed).normal(size=2 * pairs)
    for kind, theta in judges:
        compare = simulated_compare(qualities, kind=kind, theta=theta, seed=seed)
        values = astuple(await calibrate(compare, [(k, k + pairs) for k in range(pairs)]))
        found.add_row(f"{kind} {theta:g}", *(f"{value:.2f}" for value in values))
    return found


def plots(folder: Path, main: Sequence[Row], judges: Sequence[Row], missing: Sequence[Row]) -> None:
    """Write the three plots to the folder, which is made if need be. Error bars and bands are two standard errors.

    Args:
        main: rows of one setting. judges: of several judges. missing: of several shares of lost games.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    style: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "arenarl", "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
        "font.size": 10, "text.color": INK, "axes.edgecolor": MUTED, "xtick.color": INK, "ytick.color": INK,
        "axes.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    }  # fmt: skip
    with mpl.rc_context(style):
        for name, draw, rows in (("cost", _cost, main), ("judges", _judges, judges), ("missing", _missing, missing)):
            figure = Figure(figsize=(8.4, 4.8), layout="constrained")
            draw(figure.subplots(), rows)
            figure.savefig(folder / f"arena-{name}.svg", metadata={"Date": None})


def _cost(axes: Axes, rows: Sequence[Row]) -> None:
    """Advantage correlation by calls; a line joins what two estimators make of the same games."""
    found = {row.method: row for row in rows}
    points = []
    for topology in ("anchor", "double_elimination", "single_elimination", "swiss", "round_robin"):
        paper, ours = (found[Method(topology, estimator, 2)] for estimator in ("paper", "margin_ls"))
        x, name = paper.calls * SHIFT.get(topology, 1.0), topology.replace("_", " ")
        axes.plot([x, x], [paper.advantage.value, ours.advantage.value], color=MUTED, linewidth=0.8, zorder=1)
        points += [(x, paper.advantage, name, PAPER), (x, ours.advantage, name, ACCENT)]
    for topology, note in (("even_graph", " (default)"), ("info_gain", ""), ("swiss", "")):
        row, name = found[Method(topology, "margin_ls", 1)], f"{topology.replace('_', ' ')}, one order{note}"
        points.append((row.calls * SHIFT.get(topology, 1.0), row.advantage, name, ACCENT))
    for method, name in zip(POINTWISE, ("1 mark", "4 marks", "1 mark, fine scale", "4 marks, fine scale"), strict=True):
        x = found[method].calls * (SHIFT["pointwise"] if "x4" in method.estimator else 1.0)
        points.append((x, found[method].advantage, name, ALONE))
    for x, y, _, colour in points:
        axes.errorbar(x, y.value, yerr=2 * y.stderr, fmt="o", markersize=5.5, color=colour, elinewidth=1.2, zorder=3)
    for crowded in (True, False):
        group = [point for point in points if (50 < point[0] < 70) == crowded]
        places = spread_out([y.value for _, y, _, _ in group], 0.0215) if crowded else [y.value for _, y, _, _ in group]
        for (x, y, name, colour), place in zip(group, places, strict=True):
            if crowded:
                axes.plot([x * 1.03, 76, 80], [y.value, place, place], color=colour, linewidth=0.5, alpha=0.7, zorder=1)
            axes.text(82 if crowded else x * 1.06, place, name, color=colour, verticalalignment="center")
    axes.set(xscale="log", xlim=(14, 420), ylim=(0.46, 1.0), xlabel="calls to the judge for a group of 16")
    axes.set_xticks([16, 30, 60, 120, 240], labels=["16", "30", "60", "120", "240"])
    axes.minorticks_off()
    _key(axes, [("ranked as in the paper", PAPER), ("least squares on margins", ACCENT), ("marked alone", ALONE)])


def _judges(axes: Axes, rows: Sequence[Row]) -> None:
    """One line for each judge, the one that tells most on top."""
    found = {(row.method, row.setting): row.advantage for row in rows}
    settings = sorted({row.setting for row in rows}, key=lambda setting: found[DEFAULT, setting].value)
    for place, setting in enumerate(settings):
        values = [found[method, setting] for method in LINES]
        ends = [value.value for value in values]
        axes.plot([min(ends), max(ends)], [place, place], color="#d4d8de", linewidth=1.2, zorder=1)
        for value, (colour, face, _) in zip(values, LINES.values(), strict=True):
            axes.errorbar(value.value, place, xerr=2 * value.stderr, color=colour, elinewidth=1.2, zorder=2)
            axes.plot(value.value, place, "o", markersize=7, color=colour, markerfacecolor=face, zorder=3)
    for line, (colour, face, name) in enumerate(LINES.values()):
        height = len(settings) - 0.8 - 0.42 * line
        axes.plot(0.385, height, "o", markersize=7, color=colour, markerfacecolor=face)
        axes.text(0.397, height, name, color=colour, verticalalignment="center")
    axes.set_yticks(range(len(settings)), labels=[f"{setting.kind} {setting.theta:g}" for setting in settings])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set(xlim=(0.37, 1.0), ylim=(-0.6, len(settings) - 0.4), xlabel="correlation of advantage and quality")
    axes.grid(axis="x", color="#e5e7eb", linewidth=0.6)


def _missing(axes: Axes, rows: Sequence[Row]) -> None:
    lines = {method: [row for row in rows if row.method == method] for method in LINES}
    places = spread_out([line[-1].advantage.value for line in lines.values()], 0.02)
    for (method, line), place in zip(lines.items(), places, strict=True):
        colour, face, name = LINES[method]
        x = np.array([100 * row.setting.missing for row in line])
        y, error = np.array([astuple(row.advantage) for row in line]).T
        axes.fill_between(x, y - 2 * error, y + 2 * error, color=colour, alpha=0.15, linewidth=0)
        axes.plot(x, y, color=colour, linewidth=1.6, linestyle="-" if face == colour else "--")
        axes.text(51, place, name, color=colour, verticalalignment="center")
    axes.set(xlim=(0, 78), xlabel="games without a verdict, %")
    axes.set_xticks(range(0, 51, 10))
    _key(axes, [])


def _key(axes: Axes, words: Sequence[tuple[str, str]]) -> None:
    axes.set_title("correlation of advantage and quality", loc="left", fontsize=10)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.6)
    for line, (text, colour) in enumerate(words):
        axes.text(0.02, 0.96 - 0.055 * line, text, color=colour, fontweight="bold", transform=axes.transAxes)


def spread_out(values: Sequence[float], gap: float) -> list[float]:
    """The nearest places to the values, in their order, that are ``gap`` or more apart: labels that do not overlap."""
    blocks: list[tuple[list[int], float]] = []  # (values in a pile, its middle)
    for k in sorted(range(len(values)), key=lambda k: values[k]):
        pile, middle = [k], values[k]
        while blocks and middle - blocks[-1][1] < gap * (len(pile) + len(blocks[-1][0])) / 2:
            below, centre = blocks.pop()
            middle = (centre * len(below) + middle * len(pile)) / (len(below) + len(pile))
            pile = below + pile
        blocks.append((pile, middle))
    places = {k: middle + gap * (at - (len(pile) - 1) / 2) for pile, middle in blocks for at, k in enumerate(pile)}
    return [places[k] for k in range(len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tables and plots of docs/arena.md.")
    parser.add_argument("folder", type=Path, help="gets the plots")
    parser.add_argument("--groups", type=int, default=500, help="simulated groups behind each row")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    page(arguments.folder, Console(), groups=arguments.groups, seed=arguments.seed)


if __name__ == "__main__":
    main()
