"""Our tool-call parsers against vLLM's of the same names: equal on well-formed text, and every difference named.

Of its own, because importing vLLM takes longer than all of `test_tool_calls.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arenarl.tool_calls import PARSERS

TOKENIZER = Path(__file__).parent.parent / "experiments" / "tiny_agent" / "model"
FORMATS = pytest.mark.parametrize("name", PARSERS)

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "cost": {"type": "number"},
    "open": {"type": "boolean"},
    "where": {"type": "object"},
    "stops": {"type": "array"},
    "until": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "mode": {"enum": ["bus", "tram"]},
    "level": {"enum": [1, 2]},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("look", "go-to_2")
]
WIDE = {"type": "function", "function": {"name": "wide", "parameters": {"type": "object", "properties": {
    "id": {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "any": {"type": ["object", "string"]},
    "mark": {"enum": ["1", 2]}, "none": {"type": "string", "nullable": True},
}}}}  # fmt: skip


class Read(NamedTuple):
    """What a parser found: prose around the calls, and their names with their arguments."""

    content: str
    calls: list[tuple[str, Any]]


@pytest.fixture(scope="module")
def vllm() -> Callable[[str, str], Read]:
    """vLLM's reading of a text."""
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    request = ChatCompletionRequest(model="any", messages=[], tools=[*TOOLS, WIDE])

    def read(name: str, text: str) -> Read:
        found = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools).extract_tool_calls(text, request)
        calls = [(c.function.name, json.loads(c.function.arguments)) for c in found.tool_calls]
        return Read((found.content or "").strip(), calls)

    return read


def ours(name: str, text: str) -> Read:
    content, calls = PARSERS[name].parse(text, tools=[*TOOLS, WIDE])
    return Read(content, [(c.name, c.error or c.arguments) for c in calls])


# --- equal ---------------------------------------------------------------------------------------------------------

ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"city": "Oslo"},
    {"city": "", "days": -3, "cost": 2.5, "open": True},
    {"city": "5", "open": False, "until": None, "mode": "tram", "level": 2},
    {"city": "null", "until": 7, "cost": 1e20, "days": 10**25},
    {"city": '  "京都" 👩‍👩‍👧 \u2028 é\r\n\ttwo\n\nlines \\n '},
    {"city": "\n", "where": {"a": {"b": [1, 2.5, None, True, "x</b>"]}, "": []}, "stops": []},
    {"stops": ["a", {"b": "c\nd"}, [[]]], "where": {}},
    {"city": "def f(a): return a < 2 and a > 1  # <b>&amp;</b>"},
    {"city": "</think>", "stops": ["</tool_call>", "<tool_call>"]},
]


@FORMATS
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_one_call(vllm: Callable[[str, str], Read], name: str, arguments: dict[str, Any]):
    call = PARSERS[name].render("look", arguments)
    assert vllm(name, call) == ours(name, call) == Read("", [("look", arguments)])
    assert vllm(name, f"I look.\n{call}") == ours(name, f"I look.\n{call}") == Read("I look.", [("look", arguments)])


@FORMATS
def test_several_calls_and_text_without_a_call(vllm: Callable[[str, str], Read], name: str):
    render = PARSERS[name].render
    text = "\n".join(["First.", render("look", {"city": "a"}), render("go-to_2", {"days": 2}), render("look", {})])
    expected = Read("First.", [("look", {"city": "a"}), ("go-to_2", {"days": 2}), ("look", {})])
    assert vllm(name, text) == ours(name, text) == expected
    for plain in ("", "No call.", "</tool_call> a < b", '{"name": "look", "arguments": {}}', "call look()"):
        assert vllm(name, plain) == ours(name, plain) == Read(plain, [])


XML_FORMS = [
    "<function=look><parameter=city>Oslo</parameter></function>",
    "<tool_call><function=look>\n  <parameter=city>Oslo</parameter>\n</function></tool_call>",
    "<tool_call><function=look><parameter=city>\nOslo\n</parameter></function>",
    "<tool_call>look<function=look><parameter=city>Oslo</parameter></function></tool_call>",
    "<function=look><parameter=city>Oslo<parameter=days>2</parameter></function>",
    "<tool_call><function=look></function><function=look></function></tool_call>",
    "<function=look><parameter=city>a</tool_call>b<function=c></parameter></function>",
    "<function=nope><parameter=days>5</parameter></function>",
    "<function=look><parameter=nope>5</parameter></function>",
]
XML_VALUES = [
    ("days", "five"), ("days", "5.0"), ("days", "null"), ("cost", "NaN"), ("cost", "1e999"), ("cost", "1e3"), ("open", "TRUE"),
    ("open", "0"), ("open", "yes"), ("where", "[1]"), ("stops", "5"), ("until", "Null"), ("level", "3"), ("mode", "car"),
]  # fmt: skip


@pytest.mark.parametrize("text", XML_FORMS, ids=range(len(XML_FORMS)))
def test_forms_of_xml(vllm: Callable[[str, str], Read], text: str):
    found = ours("qwen3_xml", text)
    assert found == vllm("qwen3_xml", text) == vllm("qwen3_coder", text)
    assert found.calls


@pytest.mark.parametrize(("key", "value"), XML_VALUES)
def test_values_of_xml(vllm: Callable[[str, str], Read], key: str, value: str):
    text = f"<function=look><parameter={key}>{value}</parameter></function>"
    assert ours("qwen3_xml", text) == vllm("qwen3_xml", text)


LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="<")
STRINGS = st.text(LETTERS, max_size=12) | st.sampled_from(["5", "true", "null", "<b>", "a < b", "\n", " x\n"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.tuples(
    st.sampled_from(["look", "go-to_2"]),
    st.fixed_dictionaries({}, optional={
        "city": STRINGS, "days": st.integers(), "cost": st.floats(allow_nan=False, allow_infinity=False),
        "open": st.booleans(), "where": st.dictionaries(STRINGS, JSON, max_size=3), "stops": st.lists(JSON, max_size=3),
        "until": st.none() | st.integers(), "mode": st.sampled_from(["bus", "tram"]), "level": st.sampled_from([1, 2]),
    }),
)  # fmt: skip


@FORMATS
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prose=st.text(LETTERS, max_size=20), calls=st.lists(CALLS, min_size=1, max_size=3))
def test_well_formed_texts(
    vllm: Callable[[str, str], Read], name: str, prose: str, calls: list[tuple[str, dict[str, Any]]]
):
    text = "\n".join([prose, *(PARSERS[name].render(tool, arguments) for tool, arguments in calls)])
    assert vllm(name, text) == ours(name, text) == Read(prose.strip(), calls)


# --- different, on purpose -------------------------------------------------------------------------------------------

HERMES_CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
XML_CALL = "<tool_call><function=look></function></tool_call>"
LOOK = [("look", {})]


def xml(tool: str = "look", **values: str) -> str:
    parameters = "".join(f"<parameter={key}>{value}</parameter>" for key, value in values.items())
    return f"<function={tool}>{parameters}</function>"


DIFFERENCES = [
    # A thought is not an act. In vLLM a separate reasoning parser must have cut it off before.
    ("hermes", f"<think>{HERMES_CALL}</think>Done.", Read("Done.", []), Read("<think>", LOOK)),
    ("qwen3_xml", f"<think>{XML_CALL}</think>Done.", Read("Done.", []), Read("<think>", LOOK)),
    ("hermes", f"{HERMES_CALL}</think>Done.", Read("Done.", []), Read("", LOOK)),
    ("qwen3_xml", f"Hm {XML_CALL}</think>Done.", Read("Done.", []), Read("Hm", LOOK)),
    # What is said after a call is kept: a trajectory shows all that the policy said.
    ("hermes", f"a {HERMES_CALL} b", Read("a  b", LOOK), Read("a", LOOK)),
    # A malformed call is an observation, not silence or an answer: the reason goes back to the model.
    ("hermes", "<tool_call>{bad</tool_call>", "the call is not valid JSON: ", Read("<tool_call>{bad</tool_call>", [])),
    ("hermes", HERMES_CALL.removesuffix("</tool_call>"), "the call is not closed with </tool_call>", Read("", LOOK)),
    ("hermes", HERMES_CALL.replace("look", ""), "the call has no tool name", Read("", [("", {})])),
    ("hermes", HERMES_CALL.replace("{}", '"{}"'), "arguments must be a JSON object", Read("", [("look", "{}")])),
    ("hermes", HERMES_CALL.replace("{}", '{"a": 1, "a": 2}'), "the call is not valid JSON: the key 'a' is given twice",
     Read("", [("look", {"a": 2})])),
    ("hermes", HERMES_CALL.replace("{}", '{"a": 1e999}'), "the call is not valid JSON: 1e999 is too large",
     Read("", [("look", {"a": float("inf")})])),
    ("qwen3_xml", f"<tool_call>{{}}</tool_call>{XML_CALL}", "the call must be written as <function=", Read("", LOOK)),
    ("qwen3_xml", "<tool_call><function=look>", "the call is not closed with </function>", Read("", LOOK)),
    ("qwen3_xml", "<function=look><parameter=city>a</function>", "parameter 'city' is not closed", Read("", LOOK)),
    ("qwen3_xml", xml().replace("></", ">{}</"), "'{}' is in no parameter", Read("", LOOK)),
    ("qwen3_xml", xml(city="a</parameter><parameter=city>b"), "parameter 'city' is given twice",
     Read("", [("look", {"city": "b"})])),
    ("qwen3_xml", xml(where="{bad"), "parameter 'where' is not valid JSON", Read("", [("look", {"where": "{bad"})])),
    # A call without arguments takes none. vLLM makes the whole message an answer.
    ("hermes", '<tool_call>{"name": "look"}</tool_call>', Read("", LOOK),
     Read('<tool_call>{"name": "look"}</tool_call>', [])),
    # A number is a JSON number, so that "007" and "1_0" are not changed on the way to a tool.
    ("qwen3_xml", xml(days="007"), Read("", [("look", {"days": "007"})]), Read("", [("look", {"days": 7})])),
    # Several types: the text stays one if a literal or no other type fits it exactly. vLLM takes any JSON for an object.
    ("qwen3_xml", xml("wide", id="007"), Read("", [("wide", {"id": "007"})]), Read("", [("wide", {"id": 7})])),
    ("qwen3_xml", xml("wide", any="5"), Read("", [("wide", {"any": "5"})]), Read("", [("wide", {"any": 5})])),
    ("qwen3_xml", xml("wide", mark="1"), Read("", [("wide", {"mark": "1"})]), Read("", [("wide", {"mark": 1})])),
    # Our schemas say nullable; Qwen3-Coder's template writes None as Python does.
    ("qwen3_xml", xml("wide", none="null"), Read("", [("wide", {"none": None})]), Read("", [("wide", {"none": "null"})])),
    ("qwen3_xml", xml(until="None"), Read("", [("look", {"until": None})]), Read("", [("look", {"until": "None"})])),
    # Special tokens in an argument are text that was sampled. vLLM deletes them.
    ("qwen3_xml", xml(city="a<|im_end|>"), Read("", [("look", {"city": "a<|im_end|>"})]),
     Read("", [("look", {"city": "a"})])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "our", "theirs"), DIFFERENCES, ids=range(len(DIFFERENCES)))
def test_differences(vllm: Callable[[str, str], Read], name: str, text: str, our: Read | str, theirs: Read):
    found = ours(name, text)
    assert vllm(name, text) == theirs
    if isinstance(our, str):
        assert str(found.calls[0][1]).startswith(our)
    else:
        assert found == our
