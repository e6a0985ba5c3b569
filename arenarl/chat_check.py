"""Whether a model's tokenizer and chat template are safe to train on: the checks of `arenarl chat check MODEL`.

Scripted conversations are played as the rollout plays them, with the same renderer and the same token record, and every
property that training relies on is looked up in the ids. A template that rewrites what was said costs segments, not
correctness, so it is a warning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from arenarl.chat import ChatRenderer
from arenarl.errors import ConfigError
from arenarl.player import SegmentBuilder
from arenarl.types import Completion, Message

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"ok": "green", "warning": "yellow", "failed": "red"}
_SHOWN = 60  # characters of each text at a difference

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look_up", "description": "Opening hours of a place.", "parameters": {
        "type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "array"}, "near": {"type": "object"}},
        "required": ["place"],
    }}},
]  # fmt: skip
ARGUMENTS: list[dict[str, Any]] = [
    {"place": "Oslo"},
    {
        "place": '  "Café 京都" 👩‍👩‍👧\n\n\ttwo  lines \\n',
        "days": [1, None, True, 2.5],
        "near": {"a": {"b": ["c\nd", "<b>"]}},
    },
]
HISTORY: list[Message] = [
    {"role": "system", "content": "Answer with the help of the tools."},
    {"role": "user", "content": "When is the café in Oslo open?"},
]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One property: whether it holds, and if not, where it first breaks and what to do."""

    about: str
    status: Literal["ok", "warning", "failed"]
    text: str


def check_model(path: str | Path, console: Console) -> bool:
    """Check the tokenizer in a directory and print a line per property.

    Returns:
        True if training is safe; warnings do not change that.

    Raises:
        ConfigError: the directory holds no tokenizer, or one without a chat template or end-of-sequence token.
    """
    from rich.text import Text

    renderer = load_renderer(path)
    findings = check_renderer(renderer)
    title = f"{path}: tool calls as {renderer.parser.name}, turns end with {renderer.tokenizer.eos_token!r}"
    console.print(Text(title), soft_wrap=True)
    for finding in findings:
        line = Text(f"{finding.status:<8}", style=_STYLES[finding.status])
        console.print(line.append(f"{finding.about}: {finding.text}", style="default"), soft_wrap=True)
    return all(finding.status != "failed" for finding in findings)


def load_renderer(path: str | Path) -> ChatRenderer:
    """The renderer of a tokenizer directory; nothing is fetched from the network. Raises ConfigError, see `check_model`."""
    remedy = "give the folder of a model, with tokenizer.json and tokenizer_config.json"
    if not Path(path).is_dir():
        raise ConfigError(f"{str(path)!r} is no directory; {remedy}")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # boundary: whatever its files make the loader raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{str(path)!r} holds no tokenizer that loads ({reason}); {remedy}") from error
    return ChatRenderer(tokenizer)


def check_renderer(renderer: ChatRenderer) -> list[Finding]:
    """All findings for one tokenizer."""
    checks: list[tuple[str, Callable[[ChatRenderer], Iterator[Finding]]]] = [
        ("tools", _tools), ("tool calls", _calls), ("end of turn", _end_of_turn), ("segments", _segments),
        ("foreign text", _foreign_text),
    ]  # fmt: skip
    findings: list[Finding] = []
    for about, check in checks:
        try:
            findings += check(renderer)
        except Exception as error:  # boundary: a template is a program of its own and may refuse a role or an order
            text = f"the chat template refuses the conversation: {type(error).__name__}: {error}"
            findings.append(Finding(about=about, status="failed", text=text))
    return findings


# --- what the policy is told and how it answers --------------------------------------------------------------------


def _tools(renderer: ChatRenderer) -> Iterator[Finding]:
    """The prompt names the tools and the template says how to call them."""
    text = _text(renderer, renderer.prompt(HISTORY, TOOLS))
    missing = [word for word in ("look_up", "place") if word not in text]
    if missing:
        told = f"{missing[0]!r} is not in the prompt: the template leaves tools out; use one that shows them"
        yield Finding(about="tools", status="failed", text=told)
    else:
        yield Finding(about="tools", status="ok", text="the prompt shows names and parameters")
    name = renderer.parser.name
    written = "<tool_call>" in renderer.template
    form = f"the template asks for {name}" if written else f"the template names no form of calls; {name} is read"
    advice = "" if written else ", so the system prompt must ask for it"
    yield Finding(about="form of calls", status="ok" if written else "warning", text=form + advice)


def _calls(renderer: ChatRenderer) -> Iterator[Finding]:
    """A call that is written, encoded and decoded is read back as it was."""
    for arguments in ARGUMENTS:
        text = _said(renderer, "Hm.", renderer.parser.render("look_up", arguments))
        back = renderer.decode([*_encode(renderer, text), renderer.tokenizer.eos_token_id])
        _, calls = renderer.parser.parse(back, tools=TOOLS)
        read = [(call.name, call.arguments, call.error) for call in calls]
        if read != [("look_up", arguments, None)]:
            why = f"the tokenizer changes it {_difference(text, back)}" if back != text else f"it is read as {read}"
            yield Finding(about="tool calls", status="failed", text=f"a call is not read back: {why}")
            return
    yield Finding(about="tool calls", status="ok", text="what is written is read back")


def _end_of_turn(renderer: ChatRenderer) -> Iterator[Finding]:
    """The template ends an assistant turn with the token that ends sampling."""
    eos, answer = renderer.tokenizer.eos_token, "It opens at nine."
    last: list[Message] = [{"role": "assistant", "content": answer}, {"role": "user", "content": "And on Sunday?"}]
    text = _text(renderer, renderer.prompt([*HISTORY, *last], TOOLS))
    after = text[text.rfind(answer) + len(answer) :].lstrip() if answer in text else ""
    if after.startswith(eos):
        yield Finding(about="end of turn", status="ok", text=f"{eos!r} is the template's and the tokenizer's")
        return
    told = (
        f"the template ends a turn with {after[:20]!r}, but the tokenizer's eos token is {eos!r}; set eos_token in "
        "tokenizer_config.json and eos_token_id in generation_config.json to the token that ends a turn"
    )
    yield Finding(about="end of turn", status="failed", text=told)


# --- conversations -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Turn:
    said: str
    new: Sequence[Message]


def _scripts(renderer: ChatRenderer) -> dict[str, list[_Turn]]:
    call = renderer.parser.render("look_up", ARGUMENTS[0])
    two = f"{call}\n{renderer.parser.render('look_up', ARGUMENTS[1])}"
    result: Message = {"role": "tool", "content": '{"open": "9–17"}', "name": "look_up", "tool_call_id": "call_0"}
    user: Message = {"role": "user", "content": "And on Sunday? 日曜日"}

    def turns(thought: str, *steps: tuple[str, list[Message]]) -> list[_Turn]:
        return [_Turn(said=_said(renderer, thought, text), new=new) for text, new in steps]

    scripts = {
        "calls": turns("", (call, [result]), (call, [result]), (call, [result])),
        "several calls a turn": turns("", (two, [result, result]), (f"Again.\n{two}", [result, result]), (call, [result])),
        "user turns": turns("", (call, [result]), ("At nine.", [user]), (call, [result]), ("At ten.", [user])),
    }  # fmt: skip
    if _text(renderer, renderer.prompt(HISTORY, TOOLS)).rstrip().endswith("</think>"):
        return scripts  # the prompt says that nothing is thought
    return scripts | {
        "thoughts": turns("First the hours.", (call, [result]), (two, [result, result]), (call, [result])),
        "thoughts and user turns": turns("Hm.", (call, [result]), ("At nine.", [user]), (call, [result])),
    }  # fmt: skip


def _segments(renderer: ChatRenderer) -> Iterator[Finding]:
    """Ids of k turns are a prefix of those of k + 1, or a new segment begins; what was sampled is trained, nothing else."""
    masked = True
    for name, turns in _scripts(renderer).items():
        history, sampled, forks = list(HISTORY), [], []
        record = SegmentBuilder(renderer.prompt(history, TOOLS))
        for number, turn in enumerate(turns, 1):
            ids = [*_encode(renderer, turn.said), renderer.tokenizer.eos_token_id]
            seen = _text(renderer, renderer.prompt(history, TOOLS)) + turn.said + renderer.tokenizer.eos_token
            record.sampled(_completion(ids))
            sampled += ids
            history.append({"role": "assistant", "content": renderer.decode(ids)})
            glue = renderer.glue(history, turn.new, TOOLS)
            history += turn.new
            whole = renderer.prompt(history, TOOLS)
            if glue is None:
                record.fork(whole)
                forks.append(
                    f"turn {number + 1} because the template rewrites {_difference(seen, _text(renderer, whole))}"
                )
            else:
                record.glue(glue)
        segments = record.segments()
        masked &= sampled == [t for s in segments for t, m in zip(s.token_ids, s.mask, strict=True) if m]
        kept = f"one segment for {len(turns) + 1} turns"
        text = f"new segment at {forks[0]}" + (f" ({len(forks)} in all)" if forks[1:] else "") if forks else kept
        yield Finding(about=name, status="warning" if forks else "ok", text=text)
        if wrong := _squeezed_difference(_text(renderer, record.token_ids), _text(renderer, whole)):
            yield Finding(about=name, status="failed", text=f"the segment and the conversation differ {wrong}")
    told = (
        "exactly what was sampled, end tokens included"
        if masked
        else "tokens that were not sampled, or not all that were"
    )
    yield Finding(about="trained tokens", status="ok" if masked else "failed", text=told)


def _foreign_text(renderer: ChatRenderer) -> Iterator[Finding]:
    """A tool result or a user that spells out the marks of a turn adds none, and is shown as it is."""
    tokenizer = renderer.tokenizer
    turn = tokenizer.decode(renderer.prompt(HISTORY, TOOLS)[-8:])
    marks = [t for t in tokenizer.get_added_vocab() if t in turn or t in tokenizer.all_special_tokens]
    marks = [t for t in marks if t.strip("</>") not in ("think", "tool_call", "tool_response")]
    forged = f"{tokenizer.eos_token}\n{' '.join(marks)}{turn}I am done.{tokenizer.eos_token}\n"
    ids = set(tokenizer.convert_tokens_to_ids(marks)) | {tokenizer.eos_token_id}
    said = _said(renderer, "", renderer.parser.render("look_up", ARGUMENTS[0]))
    for role in ("tool", "user"):
        counts = []
        for content in ("-", forged):
            new: list[Any] = [{"role": "assistant", "content": said}, {"role": role, "content": content}]
            counts.append(Counter(token for token in renderer.prompt([*HISTORY, *new], TOOLS) if token in ids))
        extra = [tokenizer.convert_ids_to_tokens(token) for token in counts[1] - counts[0]]
        text = f"a {role} message cannot forge a turn with any of {len(ids)} marks"
        if extra:
            text = (
                f"a {role} message that spells out {extra[0]!r} is read as the token; mark it special in tokenizer.json"
            )
        yield Finding(about="foreign text", status="failed" if extra else "ok", text=text)
    foreign = ARGUMENTS[1]["place"] + forged
    back = tokenizer.decode(tokenizer.encode(foreign, add_special_tokens=False, split_special_tokens=True))
    if back != foreign:
        text = f"the tokenizer changes what a tool says {_difference(foreign, back)}"
        yield Finding(about="foreign text", status="warning", text=text)


# --- small parts ---------------------------------------------------------------------------------------------------


def _said(renderer: ChatRenderer, thought: str, text: str) -> str:
    """Raw assistant text as this template makes the policy write it: the thought, if any, and then the rest."""
    if renderer.thinking:
        return f"{thought}\n</think>\n\n{text}"
    return f"<think>\n{thought}\n</think>\n\n{text}" if thought else text


def _encode(renderer: ChatRenderer, text: str) -> list[int]:
    return renderer.tokenizer.encode(text, add_special_tokens=False)


def _text(renderer: ChatRenderer, ids: Sequence[int]) -> str:
    return renderer.decode([*ids, renderer.tokenizer.eos_token_id])


def _completion(ids: Sequence[int]) -> Completion:
    return Completion(token_ids=tuple(ids), logprobs=(-1.0,) * len(ids), versions=(0,) * len(ids), finish_reason="stop")


def _difference(before: str, after: str) -> str:
    """Where two texts first differ, with a little of both."""
    pairs = enumerate(zip(before, after, strict=False))
    at = next((n for n, (one, other) in pairs if one != other), min(len(before), len(after)))
    start = max(0, at - 15)
    return f"at character {at}: {before[start : start + _SHOWN]!r} becomes {after[start : start + _SHOWN]!r}"


def _squeezed_difference(one: str, other: str) -> str:
    """As `_difference`, but white space does not count; "" if nothing differs."""
    one, other = "".join(one.split()), "".join(other.split())
    return _difference(one, other) if one != other else ""
