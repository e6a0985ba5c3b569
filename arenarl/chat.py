"""Messages to token ids under the exact-prefix rule, and assistant text to tool calls.

What an engine sampled is never tokenised again. A turn continues a segment by *glue*: the template text between the
sampled stop token and the next generation prompt, which carries the tool results. If the template would rewrite what
was already said, there is no glue and the caller opens a new segment.

Text that comes from outside (tool results, user prompts) is encoded with special tokens off, so a file that contains
an end-of-turn marker cannot forge a turn.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

from arenarl.errors import ConfigError
from arenarl.types import Message, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPOKEN = re.compile(r"<think>.*?(?:</think>|\Z)|<tool_call>(?P<call>.*?)(?P<end></tool_call>|\Z)", re.DOTALL)
_MARK = "\ue000{}\ue001"  # private-use characters: they frame foreign text while the template is rendered
_MARKED = re.compile("\ue000(\\d+)\ue001")


def parse_tool_calls(text: str, first_id: int = 0) -> tuple[str, tuple[ToolCall, ...]]:
    """Split assistant text into its prose and its Hermes-style tool calls.

    Calls inside ``<think>`` are thoughts and are not executed. A malformed call keeps its raw text and says in
    ``error`` what is wrong, so that the environment can show it to the model.

    Returns:
        (prose without thoughts and calls, calls with ids ``call_{first_id}``, ...).
    """
    if (end := text.find("</think>")) >= 0 and "<think>" not in text[:end]:
        text = text[end + len("</think>") :]  # the template opened the thought in the generation prompt
    found = [m for m in _SPOKEN.finditer(text) if m["call"] is not None]
    calls = tuple(_parse_call(m["call"], bool(m["end"]), f"call_{first_id + n}") for n, m in enumerate(found))
    return _SPOKEN.sub("", text).strip(), calls


def _parse_call(raw: str, closed: bool, call_id: str) -> ToolCall:
    def bad(reason: str, name: str = "") -> ToolCall:
        return ToolCall(id=call_id, name=name, raw=raw.strip(), error=reason)

    if not closed:
        return bad("the call is not closed with </tool_call>")
    try:
        value = json.loads(raw, object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        return bad(f"the call is not valid JSON: {error}")
    if not isinstance(value, dict):
        return bad(f"the call must be a JSON object with name and arguments, got {type(value).__name__}")
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name:
        return bad("the call has no tool name")
    if not isinstance(arguments, dict):
        return bad(f"arguments must be a JSON object, got {type(arguments).__name__}", name)
    return ToolCall(id=call_id, name=name, arguments=arguments, raw=raw.strip())


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError(f"duplicate key in {keys}")
    return dict(pairs)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text} is too large")
    return value


class ChatRenderer:
    """Renders conversations for one tokenizer. Stateless, so one instance serves every episode of a worker.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.

    Raises:
        ConfigError: if the tokenizer has no chat template or no end-of-sequence token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; use an instruct model"
            )
        if tokenizer.eos_token is None:
            raise ConfigError(f"the tokenizer of {tokenizer.name_or_path!r} has no eos token; set one that ends a turn")
        self.tokenizer = tokenizer
        self._dangerous = re.compile("|".join(map(re.escape, [*tokenizer.all_special_tokens, *_MARK.split("{}")])))

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a whole conversation, up to and including the generation prompt."""
        spoken = [{**m, "content": self._harmless(m["content"])} if m["role"] == "assistant" else m for m in messages]
        foreign = {i for i, m in enumerate(messages) if m["role"] != "assistant"}
        return self._encode(self._render(spoken, tools, foreign, add_generation_prompt=True), messages)

    def glue(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int] | None:
        """Token ids between the stop token of the last assistant turn and the next generation prompt.

        Args:
            history: the conversation, ending with the assistant message that was just sampled (raw text as content).
            new: the messages that answer it.

        Returns:
            Ids to append to the segment, or None if the template rewrites the history and a new segment must begin.
        """
        messages, everything = [*history, *new], set(range(len(history) + len(new)))
        plain = self._render(history, tools, set(), add_generation_prompt=False)
        if not self._render(messages, tools, set(), add_generation_prompt=True).startswith(plain):
            return None
        # with every content marked, the end token after the last mark of the history is the one that was sampled
        before = self._render(history, tools, everything, add_generation_prompt=False)
        after = self._render(messages, tools, everything, add_generation_prompt=True)
        eos = self.tokenizer.eos_token
        end = before.find(eos, before.rfind(_MARK.format(len(history) - 1)))
        if end < 0 or not after.startswith(before):
            return None
        return self._encode(after[end + len(eos) :], messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled ids for people, parsers and templates; the stop token is left out."""
        eos = self.tokenizer.eos_token_id
        ids = list(token_ids[:-1] if token_ids and token_ids[-1] == eos else token_ids)
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        marked: Set[int],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Template text in which the contents of the ``marked`` messages are replaced by marks."""
        shown = [{**m, "content": _MARK.format(i)} if i in marked else m for i, m in enumerate(messages)]
        if tools and self._harmless(spelled := json.dumps(tools, ensure_ascii=False)) != spelled:
            tools = json.loads(self._harmless(spelled))
        return self.tokenizer.apply_chat_template(
            shown, tools=list(tools) or None, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def _harmless(self, text: str) -> str:
        """Text without special tokens and marks, for the places where it must be encoded together with the template."""
        return self._dangerous.sub("", text)

    def _encode(self, text: str, messages: Sequence[Message]) -> list[int]:
        """Encode template text with special tokens on, and the contents that its marks stand for with special tokens off."""
        ids: list[int] = []
        for n, piece in enumerate(_MARKED.split(text)):
            if n % 2:
                ids += self.tokenizer.encode(
                    messages[int(piece)]["content"], add_special_tokens=False, split_special_tokens=True
                )
            elif piece:
                ids += self.tokenizer.encode(piece, add_special_tokens=False)
        return ids
