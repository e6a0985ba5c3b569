"""Messages to token ids under the exact-prefix rule.

What an engine sampled is never tokenised again. A turn continues a segment by *glue*: the template text between the
sampled stop token and the next generation prompt, which carries the tool results. If the template would rewrite what
was already said, there is no glue and the caller opens a new segment.

Text that comes from outside (tool results, user prompts) is encoded with special tokens off, so a file that contains
an end-of-turn marker cannot forge a turn.

A memory is spliced in as ids: what the policy sees with it is what it sees without it, plus the note, to the token. So the
student and the teacher of a self-distillation differ in the note alone (RG-SED, arXiv 2609.01058).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any, Literal

from arenarl.errors import ConfigError
from arenarl.mcp.results import four_characters
from arenarl.tool_calls import ToolParser, parser_for_template
from arenarl.types import Memory, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\ue000{}\ue001"  # private-use characters: they frame foreign text while the template is rendered
_MARKED = re.compile("\ue000(\\d+)\ue001")
_SPEECH = {"<think>", "</think>", "<tool_call>", "</tool_call>"}  # special in some vocabularies, but no turn marks


class ChatRenderer:
    """Renders conversations for one tokenizer. Stateless, so one instance serves every episode of a worker.

    Attributes:
        parser: reads the tool calls of what was sampled.
        thinking: the generation prompt ends inside a thought.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        parser: of the format that the template asks for, if None.

    Raises:
        ConfigError: if the tokenizer has no chat template, one that fails, or no end-of-sequence token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, parser: ToolParser | None = None) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; use an instruct model, or give it one"
            )
        if tokenizer.eos_token is None:
            raise ConfigError(f"the tokenizer of {tokenizer.name_or_path!r} has no eos token; set one that ends a turn")
        self.tokenizer = tokenizer
        dangerous = [*(set(tokenizer.all_special_tokens) - _SPEECH), *_MARK.split("{}")]
        self._dangerous = re.compile("|".join(map(re.escape, sorted(dangerous, key=len, reverse=True))))
        self.thinking = self._opens_thought()
        self.parser = parser or parser_for_template(self.template, thinking=self.thinking)

    @property
    def template(self) -> str:
        """The chat template that is used when there are tools."""
        return self.tokenizer.get_chat_template(tools=[{}])

    def _opens_thought(self) -> bool:
        from jinja2 import TemplateError

        opening: list[Message] = [{"role": "system", "content": ""}, {"role": "user", "content": ""}]
        try:
            text = self._render(opening, [], {0, 1}, add_generation_prompt=True)
        except TemplateError as error:
            name = self.tokenizer.name_or_path
            raise ConfigError(
                f"the chat template of {name!r} fails on a system and a user message: {error}; use one that takes both"
            ) from error
        prompt = text[text.rfind(_MARK.format(1)) :]
        return prompt.rfind("<think>") > prompt.rfind("</think>")

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], memory: Memory | None = None
    ) -> list[int]:
        """Token ids of a whole conversation, up to and including the generation prompt.

        Args:
            memory: its ids stand right behind the content of the system message, or of the first user message. Without
                them the prompt is exactly that of no memory.

        Raises:
            ConfigError: there is no such message, or the template does not show it exactly once.
        """
        text = self._conversation(messages, tools)
        if memory is None:
            return self._encode(text, messages)
        before, after = self._cut(text, messages, memory.place)
        return [*self._encode(before, messages), *self.encode_foreign(memory.text), *self._encode(after, messages)]

    def splice_point(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], place: Literal["system", "user"]
    ) -> int:
        """How many ids of the prompt stand before a memory in this place.

        Raises:
            ConfigError: as `prompt` with a memory.
        """
        before, _ = self._cut(self._conversation(messages, tools), messages, place)
        return len(self._encode(before, messages))

    def encode_foreign(self, text: str) -> list[int]:
        """Token ids of text from outside; none of them is a turn mark, whatever it spells."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

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
        foreign = {i for i, m in enumerate([*history, *new]) if m["role"] != "assistant"}
        if self._continuation(history, new, tools, set()) is None:  # a template may look into what it is given
            return None
        text = self._continuation(history, new, tools, foreign)
        return None if text is None else self._encode(text, [*history, *new])

    def _continuation(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[dict[str, Any]], marked: Set[int]
    ) -> str | None:
        """Template text after the last turn's end token, if all before it is what the policy saw and said.

        White space in what was just said may differ: templates trim it, and the segment keeps what was sampled.
        """
        spoken = self._spoken(history)
        seen = self._render(spoken[:-1], tools, marked, add_generation_prompt=True)
        whole = self._render([*spoken, *new], tools, marked, add_generation_prompt=True)
        said, end, rest = whole[len(seen) :].partition(self.tokenizer.eos_token)
        kept = "".join(said.split()) == "".join(spoken[-1]["content"].split())
        return rest if kept and end and whole.startswith(seen) else None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled ids for people, parsers and templates; the stop token is left out."""
        eos = self.tokenizer.eos_token_id
        ids = list(token_ids[:-1] if token_ids and token_ids[-1] == eos else token_ids)
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """(start, end) of each token of a foreign text, in characters; a guess for a tokenizer that cannot tell."""
        if not self.tokenizer.is_fast:
            return four_characters(text)
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=True, verbose=False
        )
        return list(encoded["offset_mapping"])

    def _conversation(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
        """Template text of all that was said, foreign contents as marks, up to the generation prompt."""
        foreign = {i for i, m in enumerate(messages) if m["role"] != "assistant"}
        return self._render(self._spoken(messages), tools, foreign, add_generation_prompt=True)

    def _cut(self, text: str, messages: Sequence[Message], place: str) -> tuple[str, str]:
        """Template text up to the end of the content that a memory follows, and the rest."""
        first = next((i for i, m in enumerate(messages) if m["role"] == place), None)
        if first is None:
            raise ConfigError(f"a memory cannot follow the {place} message: there is none; use another place")
        mark = _MARK.format(first)
        if (shown := text.count(mark)) != 1:
            name = self.tokenizer.name_or_path
            raise ConfigError(
                f"a memory cannot follow the {place} message: the chat template of {name!r} shows it {shown} times; "
                "use another place, or a template that shows it once"
            )
        before, mark, after = text.partition(mark)
        return before + mark, after

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        marked: Set[int],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Template text in which the contents of the ``marked`` messages are replaced by marks."""
        shown = [{**m, "content": _MARK.format(i)} if i in marked else {**m} for i, m in enumerate(messages)]
        for message in shown:
            if "name" in message:  # as the policy wrote it
                message["name"] = self._harmless(message["name"])
        if tools and self._harmless(spelled := json.dumps(tools, ensure_ascii=False)) != spelled:
            tools = json.loads(self._harmless(spelled))
        return self.tokenizer.apply_chat_template(
            shown, tools=list(tools) or None, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def _spoken(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with nothing in what the policy said that would be read as a mark of the template."""
        return [{**m, "content": self._harmless(m["content"])} if m["role"] == "assistant" else m for m in messages]

    def _harmless(self, text: str) -> str:
        """Text without special tokens and marks, for the places where it must be encoded together with the template."""
        return self._dangerous.sub("\ufffd", text)  # not by nothing: what is left and right must not become one

    def _encode(self, text: str, messages: Sequence[Message]) -> list[int]:
        """Encode template text with special tokens on, and the contents that its marks stand for with special tokens off."""
        ids: list[int] = []
        for n, piece in enumerate(_MARKED.split(text)):
            if n % 2:
                ids += self.encode_foreign(messages[int(piece)]["content"])
            elif piece:
                ids += self.tokenizer.encode(piece, add_special_tokens=False)
        return ids
