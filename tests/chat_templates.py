"""Small tokenizers with chat templates that have the structure of real ones: what they mark, keep, trim and strip."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PRETRAIN = Path(__file__).parent.parent / "experiments" / "tiny_agent" / "pretrain.py"


def tiny_agent_template() -> str:
    """The template of the tiny agent, read without running its training script."""
    for node in ast.parse(PRETRAIN.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CHAT_TEMPLATE":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{PRETRAIN} has no CHAT_TEMPLATE")


NEWLINE = tiny_agent_template()  # a newline after each end mark
TIGHT = NEWLINE.replace(r"'<|im_end|>\n'", "'<|im_end|>'")
LAST_QUERY = (
    "{%- set at = namespace(query=-1) %}{%- for m in messages if m.role == 'user' %}"
    "{%- set at.query = messages.index(m) %}{%- endfor %}"
)
# Thoughts are kept while tools answer, and stripped once the user speaks again.
THOUGHTLESS = LAST_QUERY + NEWLINE.replace(
    "message.content",
    "(message.content if loop.index0 > at.query else message.content.split('</think>')[-1])",
)

# --- the Qwen family ---------------------------------------------------------------------------------------------
# Tools are JSON lines in the system turn, results of one message share a user turn.

HERMES_FORM = '<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>'
XML_FORM = "<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>"


def qwen(form: str, assistant: str, opening: str = "") -> str:
    """A template that asks for calls in this form and writes an assistant turn's text by ``assistant``."""
    return (
        LAST_QUERY + r"""
{%- for m in messages %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '' %}
{%- set answer = m.content.split('</think>')[-1].lstrip('\n') %}
{%- if loop.first and tools %}
{{- '<|im_start|>system\n' + (m.content + '\n\n' if m.role == 'system' else '') + '# Tools\n' }}
{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
{{- 'A call: FORM<|im_end|>\n' }}
{%- endif %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' + (ASSISTANT) + '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- elif m.role == 'user' or not (loop.first and tools) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\nOPENING' }}{%- endif %}"""
    ).replace("FORM", form).replace("ASSISTANT", assistant).replace("OPENING", opening)  # fmt: skip


THOUGHT = r"'<think>\n' + thought + '\n</think>\n\n' + answer"
# Qwen3-Coder does not think. Qwen3 shows a thought after the last query, and an empty one in the very last turn.
# Qwen3.5 shows even an empty one, trims, and opens it in the generation prompt: left open, or closed at once.
CODER = qwen(XML_FORM, "m.content")
QWEN3 = qwen(HERMES_FORM, f"{THOUGHT} if loop.index0 > at.query and (loop.last or thought) else answer")
TRIMMED = r"'<think>\n' + thought | trim + '\n</think>\n\n' + answer | trim"
QWEN35 = qwen(XML_FORM, f"{TRIMMED} if loop.index0 > at.query else answer | trim", r"<think>\n")
QWEN35_QUIET = qwen(XML_FORM, f"{TRIMMED} if loop.index0 > at.query else answer | trim", r"<think>\n\n</think>\n\n")
FORGETFUL = qwen(HERMES_FORM, "answer")  # as DeepSeek-R1's: never shows a thought again

TEMPLATES = {
    "newline": NEWLINE, "tight": TIGHT, "thoughtless": THOUGHTLESS, "coder": CODER, "qwen3": QWEN3, "qwen3.5": QWEN35,
    "qwen3.5-quiet": QWEN35_QUIET, "forgetful": FORGETFUL,
}  # fmt: skip


@cache
def _core() -> str:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=specials, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )  # fmt: skip
    core.train_from_iterator(["abc abc abcd system user assistant tool where is the cafe name city"] * 20, trainer)
    core.decoder = decoders.ByteLevel()
    return core.to_str()


def make_tokenizer(template: str | dict[str, str]) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_core()), eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"], chat_template=template,
    )  # fmt: skip
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"])
    return tokenizer
