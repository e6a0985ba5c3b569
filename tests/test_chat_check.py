"""`arenarl chat check`: what is safe is called safe, and each fault of a tokenizer or template is found and named."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import normalizers
from transformers import PreTrainedTokenizerBase

from arenarl.chat import ChatRenderer
from arenarl.chat_check import check_model, check_renderer
from arenarl.errors import ConfigError
from arenarl.types import Message
from tests.chat_templates import CODER, NEWLINE, QWEN3, TEMPLATES, make_tokenizer

TINY_AGENT = Path(__file__).parent.parent / "experiments" / "tiny_agent" / "model"


def check(path: Path) -> tuple[bool, list[str]]:
    """Verdict and printed lines."""
    console = Console(file=StringIO(), width=80)
    safe = check_model(path, console)
    assert isinstance(console.file, StringIO)
    return safe, console.file.getvalue().splitlines()


def faults(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """What is not ok: status and text by property."""
    findings = check_renderer(ChatRenderer(tokenizer))
    return {f.about: f"{f.status}: {f.text}" for f in findings if f.status != "ok"}


def test_the_tiny_agent_is_safe():
    assert check(TINY_AGENT) == (True, [
        f"{TINY_AGENT}: tool calls as hermes, turns end with '<|im_end|>'",
        "ok      tools: the prompt shows names and parameters",
        "warning form of calls: the template names no form of calls; hermes is read, so the system prompt must ask for it",
        "ok      tool calls: what is written is read back",
        "ok      end of turn: '<|im_end|>' is the template's and the tokenizer's",
        "ok      calls: one segment for 4 turns",
        "ok      several calls a turn: one segment for 4 turns",
        "ok      user turns: one segment for 5 turns",
        "ok      thoughts: one segment for 4 turns",
        "ok      thoughts and user turns: one segment for 4 turns",
        "ok      trained tokens: exactly what was sampled, end tokens included",
        "ok      foreign text: a tool message cannot forge a turn with any of 3 marks",
        "ok      foreign text: a user message cannot forge a turn with any of 3 marks",
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rewritten"),
    [
        ("tight", set()),
        ("coder", set()),
        ("thoughtless", {"thoughts and user turns"}),
        ("qwen3", {"thoughts and user turns"}),
        ("qwen3.5", {"user turns", "thoughts and user turns"}),
        ("qwen3.5-quiet", {"user turns"}),
        ("forgetful", {"thoughts", "thoughts and user turns"}),
    ],
)
def test_a_template_that_rewrites_what_was_said_is_a_warning(name: str, rewritten: set[str], tmp_path: Path):
    tokenizer = make_tokenizer(TEMPLATES[name])
    found = {about for about, text in faults(tokenizer).items() if text.startswith("warning: new segment at turn ")}
    assert found == rewritten
    tokenizer.save_pretrained(tmp_path)
    assert check(tmp_path)[0]


def test_a_rewritten_turn_is_shown_where_it_first_differs():
    (about, text), *more = faults(make_tokenizer(QWEN3)).items()
    assert (about, more) == ("thoughts and user turns", [])
    assert text.startswith("warning: new segment at turn 3 because the template rewrites at character ")
    assert text.endswith(
        r""": 't|>assistant\n<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "loo'"""
        r""" becomes 't|>assistant\n<tool_call>\n{"name": "look_up", "arguments": {"'"""
    )


def test_an_end_token_that_is_not_the_templates_is_found(tmp_path: Path):
    tokenizer = make_tokenizer(CODER)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    assert faults(tokenizer)["end of turn"].startswith(
        "failed: the template ends a turn with '<|im_end|>\\n<|im_star', but the tokenizer's eos token is '<|endoftext|>'"
    )
    tokenizer.save_pretrained(tmp_path)
    safe, lines = check(tmp_path)
    assert not safe
    assert any(line.startswith("failed  end of turn: ") for line in lines)


def test_a_mark_that_any_text_can_spell_is_found():
    tokenizer = make_tokenizer(CODER.replace("<|im_start|>", "<|turn|>"))
    tokenizer.add_tokens(["<|turn|>"])  # not special
    found = faults(tokenizer)
    assert set(found) == {"foreign text"}
    assert found["foreign text"].startswith("failed: a user message that spells out '<|turn|>' is read as the token")


def test_a_template_without_tools_is_found():
    found = faults(make_tokenizer(NEWLINE.replace("loop.first and tools", "false")))
    assert found["tools"].startswith("failed: 'look_up' is not in the prompt")
    nameless = NEWLINE.replace("tool.function.name + ", "")
    assert faults(make_tokenizer(nameless))["tools"].startswith("failed: 'look_up' is not in the prompt")


def test_a_template_that_refuses_a_role_is_found():
    refuses = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    found = faults(make_tokenizer(refuses + CODER))
    assert set(found) == {"segments", "foreign text"}
    assert set(found.values()) == {"failed: the chat template refuses the conversation: TemplateError: no tools here"}


def test_a_tokenizer_that_changes_text_is_found():
    tokenizer = make_tokenizer(CODER)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    found = faults(tokenizer)
    assert found["tool calls"].startswith("failed: a call is not read back: the tokenizer changes it at character ")
    assert found["foreign text"].startswith("warning: the tokenizer changes what a tool says at character ")


def test_a_segment_that_is_not_the_conversation_is_found():
    class Forgets(ChatRenderer):
        def glue(
            self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[dict[str, Any]]
        ) -> list[int] | None:
            return super().glue(history, new[:1], tools)

    wrong = {f.about: f.text for f in check_renderer(Forgets(make_tokenizer(CODER))) if f.status == "failed"}
    assert set(wrong) == {"several calls a turn", "thoughts"}
    assert wrong["thoughts"].startswith("the segment and the conversation differ at character ")


def test_what_is_no_model_is_refused_with_its_path(tmp_path: Path):
    console = Console(file=StringIO())
    with pytest.raises(ConfigError, match=r"nowhere' is no directory; give the folder of a model"):
        check_model(tmp_path / "nowhere", console)
    with pytest.raises(ConfigError, match=rf"{tmp_path}' holds no tokenizer that loads"):
        check_model(tmp_path, console)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"holds no tokenizer that loads"):
        check_model(tmp_path, console)


@pytest.mark.parametrize(
    ("template", "end", "reason"),
    [
        ("", "<|im_end|>", "has no chat template"),
        (CODER, None, "has no eos token"),
        ("{% if %}", "<|im_end|>", "the chat template of"),
        ("{{ raise_exception('one turn only') }}", "<|im_end|>", "one turn only"),
    ],
)
def test_a_tokenizer_that_cannot_chat_is_refused_with_its_path(
    template: str, end: str | None, reason: str, tmp_path: Path
):
    tokenizer = make_tokenizer(template)
    tokenizer.eos_token = end
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason) as error:
        check_model(tmp_path, Console(file=StringIO()))
    assert str(tmp_path) in str(error.value)
