"""An evaluation on the terminal. Shares and scores are in percent, each with its 95 % interval over tasks in brackets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from arenarl.comparison import Ruling
from arenarl.evaluate import Estimate, Share, WinRate

if TYPE_CHECKING:
    from arenarl.evaluation import Evaluation, Measure, Side

MAX_ROWS = 20
DASH = Text("–", style="dim")


def print_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Who met whom, each side's numbers, win rates, kinds of task and criteria."""
    for part in _parts(evaluation):
        console.print(part)
        console.print()


def _parts(evaluation: Evaluation) -> Iterator[RenderableType]:
    yield _head(evaluation)
    two = evaluation.theirs is not None
    yield _measures("attempts", _powers(evaluation.measures), two=two)
    if two:
        yield _win_rates(evaluation)
        yield from _notes(evaluation)
    yield _kinds(evaluation)
    if any(r.dimensions for r in evaluation.rulings):
        yield _dimensions(evaluation.rulings)
    if evaluation.checklist_groups:
        yield _measures("checklist items met", evaluation.checklist_groups, two=two, counts=True)


def _head(evaluation: Evaluation) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row(
        Text("evaluation", style="bold"), _text(f"{evaluation.taskset}, {evaluation.num_tasks} held-out tasks")
    )
    for name, side in (("ours", evaluation.ours), ("theirs", evaluation.theirs)):
        if side:
            table.add_row(Text(name, style="bold"), _text(side.model))
            table.add_row("", _text(_counts(side), "dim"))
    table.add_row("", Text("percent, with 95 % intervals over tasks in brackets", style="dim"))
    return table


def _counts(side: Side) -> str:
    parts = [f"{side.attempts} attempts at {side.tasks} tasks"]
    parts += [f"{count} not valid ({reason})" for reason, count in side.invalid.items()]
    parts += [f"{side.failed} lost to failures of the infrastructure, left out"] if side.failed else []
    return ", ".join(parts)


def _measures(title: str, measures: Mapping[str, Measure], *, two: bool, counts: bool = False) -> Table:
    table = _table(title, "", "ours", *(("theirs", "difference") if two else ()))
    shown = list(measures.items())
    if len(shown) > MAX_ROWS:
        shown = sorted(shown, key=lambda row: -(row[1].ours.total if isinstance(row[1].ours, Share) else 0))[:MAX_ROWS]
    for name, measure in shown:
        cells = [_interval(measure.ours, counts=counts)]
        if two:
            cells += [_interval(measure.theirs, counts=counts), _interval(measure.difference, signed=True)]
        table.add_row(_text(name), *cells)
    if len(measures) > MAX_ROWS:
        table.add_row(Text(f"and {len(measures) - MAX_ROWS} more: see --out", style="dim"))
    return table


def _powers(measures: Mapping[str, Measure]) -> dict[str, Measure]:
    """Without pass@k and pass^k for the k that are neither a power of two nor the last."""
    depths = [int(name[5:]) for name in measures if name.startswith("pass@")]

    def wanted(name: str) -> bool:
        k = int(name[5:]) if name.startswith(("pass@", "pass^")) else 1
        return k & (k - 1) == 0 or k == max(depths)

    return {name: measure for name, measure in measures.items() if wanted(name)}


def _win_rates(evaluation: Evaluation) -> Table:
    table = _table("win rate of ours", "judge", "valid pairs", "w-l-t", "all queries", "w-l-t", "open")
    for r in evaluation.rulings:
        table.add_row(
            _text(r.name), _interval(r.valid_pairs), _record(r.valid_pairs), _interval(r.all_queries),
            _record(r.all_queries), Text(str(r.all_queries.missing)),
        )  # fmt: skip
    if evaluation.win and len(evaluation.rulings) > 1:
        table.add_row(
            Text("mean", style="bold"), _interval(evaluation.win.valid_pairs), "", _interval(evaluation.win.all_queries)
        )
    return table


def _notes(evaluation: Evaluation) -> Iterator[Text]:
    """Who the judges are, how often they agree, and what they could not decide."""
    lines = [f"{r.name}: {r.about}" for r in evaluation.rulings if r.name != r.about]
    lines += ["one judge alone: what it likes cannot be told from what is good; add another with --judge"] * (
        len(evaluation.rulings) == 1
    )
    for names, a in evaluation.agreements.items():
        if a.share.total:
            kappa = "no kappa: chance alone would agree" if math.isnan(a.kappa) else f"Cohen's kappa {a.kappa:.2f}"
            lines.append(
                f"{names} decide {a.share.met:g} of {a.share.total} tasks alike: {_interval(a.share).plain}, {kappa}"
            )
    for r in evaluation.rulings:
        reasons = ", ".join(f"{count} {reason}" for reason, count in r.abstentions.items())
        lines += [f"{r.name} gave no verdict in {sum(r.abstentions.values())} of {r.games} games: {reasons}"] * bool(
            reasons
        )
        if r.calls:
            tokens = r.prompt_tokens + r.completion_tokens
            lines.append(f"{r.name}: {r.calls} calls, {tokens:,} tokens for {r.games} games in both orders")
    yield _text("\n".join(lines), "dim")


def _kinds(evaluation: Evaluation) -> Table:
    theirs = () if evaluation.theirs is None else ("theirs", "valid pairs", "all queries")
    title = "by kind of task: checklist score" + (" and win rate of ours" if theirs else "")
    table = _table(title, "kind", "tasks", "ours", *theirs)
    for name, kind in evaluation.kinds.items():
        cells = [_interval(kind.score.ours)]
        if kind.win:
            cells += [_interval(kind.score.theirs), _interval(kind.win.valid_pairs), _interval(kind.win.all_queries)]
        table.add_row(_text(name or "–"), Text(str(kind.tasks)), *cells)
    return table


def _dimensions(rulings: Sequence[Ruling]) -> Table:
    table = _table(
        "win rate of ours by criterion, valid pairs", "judge", "criterion", "win rate", "won-lost-tied", "open"
    )
    table.columns[1].justify = "left"
    for ruling in rulings:
        for name, rate in ruling.dimensions.items():
            table.add_row(_text(ruling.name), _text(name), _interval(rate), _record(rate), Text(str(rate.missing)))
    return table


def _text(text: str, style: str = "") -> Text:
    """Text from files, models and judges, which must not be able to move the cursor."""
    return Text("".join(c if c.isprintable() or c == "\n" else "·" for c in text), style, overflow="fold")


def _table(title: str, first: str, *numbers: str) -> Table:
    table = Table(title=title, title_style="bold", title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    table.add_column(first, header_style="dim")
    for name in numbers:
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    return table


def _interval(value: Estimate | Share | WinRate | None, *, signed: bool = False, counts: bool = False) -> Text:
    """ "62% (45, 77)", with ``counts`` " 18/29" behind it; a dash for what is not known."""
    middle = math.nan if value is None else value.mean if isinstance(value, Estimate) else value.rate
    if value is None or math.isnan(middle):
        return DASH
    sign = "+" if signed else ""
    between = ("–", "–") if math.isnan(value.low) else (_percent(value.low, sign), _percent(value.high, sign))
    text = Text.assemble((f"{_percent(middle, sign)}%", "bold"), (f" ({', '.join(between)})", "dim"))
    if counts and isinstance(value, Share):
        text.append(f" {value.met:g}/{value.total}", style="dim")
    return text


def _percent(value: float, sign: str) -> str:
    return f"{round(100 * value) + 0:{sign}d}"


def _record(rate: WinRate) -> Text:
    return Text(f"{rate.wins}-{rate.losses}-{rate.ties}")
