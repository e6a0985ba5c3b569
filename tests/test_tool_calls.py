"""Tool calls out of any text, in both formats; calls written and read back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arenarl.tool_calls import HERMES, PARSERS, QWEN3_XML, ToolParser, parser_for_template

BOTH = pytest.mark.parametrize("parser", PARSERS.values(), ids=PARSERS.keys())
THINKING = {
    name: parser_for_template(text, thinking=True)
    for name, text in [("hermes", ""), ("qwen3_xml", "<function=<parameter=")]
}

Expected = list[tuple[str, dict[str, Any], str]]  # name, arguments, start of the error


def check(parser: ToolParser, text: str, prose: str, expected: Expected) -> None:
    said_aloud, calls = parser.parse(text, first_id=3, tools=TOOLS)
    assert said_aloud == prose
    assert [(c.name, dict(c.arguments)) for c in calls] == [(name, arguments) for name, arguments, _ in expected]
    assert [c.id for c in calls] == [f"call_{3 + n}" for n in range(len(expected))]
    for call, (_, _, error) in zip(calls, expected, strict=True):
        assert (call.error or "").startswith(error)
        assert (call.error is None) == (error == "")


# --- Hermes ------------------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOT_JSON = "the call is not valid JSON: "
NOT_CLOSED = "the call is not closed with </tool_call>"
NO_NAME = "the call has no tool name"
OK = ("look", {"city": "Oslo"}, "")  # what CALL asks for

HERMES_CASES = [
    ("", "", []),
    ("Go by bus.", "Go by bus.", []),
    (CALL, "", [OK]),
    (f"I look.\n{CALL}\nThen I wait. ", "I look.\n\nThen I wait.", [OK]),
    (CALL + CALL, "", [OK, OK]),
    ('<tool_call>{\n "name": "look",\n "arguments": {"city": "Oslo"},\n "id": 3\n}</tool_call>', "", [OK]),
    ('<tool_call>{"name": "wait"}</tool_call>', "", [("wait", {}, "")]),
    ('<tool_call>{"name": "look", "arguments": {"city": "京都 🎉"}}</tool_call>', "", [("look", {"city": "京都 🎉"}, "")]),
    ('Now <tool_call>{"name": "wait"}', "Now", [("", {}, NOT_CLOSED)]),
    (f"{CALL}<tool_call>", "", [OK, ("", {}, NOT_CLOSED)]),
    ('<tool_call>{"name": "wait"</tool_call>', "", [("", {}, NOT_JSON)]),
    ("<tool_call>wait()</tool_call>", "", [("", {}, NOT_JSON)]),
    ("<tool_call></tool_call>", "", [("", {}, NOT_JSON)]),
    (f"<tool_call>{CALL}", "", [("", {}, NOT_JSON)]),
    ("</tool_call> wait", "</tool_call> wait", []),
    ('<tool_call>[{"name": "wait"}]</tool_call>', "", [("", {}, "the call must be a JSON object with name and arguments, got list")]),
    ('<tool_call>"wait"</tool_call>', "", [("", {}, "the call must be a JSON object with name and arguments, got str")]),
    ('<tool_call>{"arguments": {}}</tool_call>', "", [("", {}, NO_NAME)]),
    ('<tool_call>{"name": "", "arguments": {}}</tool_call>', "", [("", {}, NO_NAME)]),
    ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', "", [("", {}, NO_NAME)]),
    ('<tool_call>{"name": "look", "arguments": ["Oslo"]}</tool_call>', "", [("look", {}, "arguments must be a JSON object, got list")]),
    ('<tool_call>{"name": "look", "arguments": "{}"}</tool_call>', "", [("look", {}, "arguments must be a JSON object, got str")]),
    ('<tool_call>{"name": "look", "arguments": null}</tool_call>', "", [("look", {}, "arguments must be a JSON object, got NoneType")]),
    ('<tool_call>{"name": "wait", "name": "look"}</tool_call>', "", [("", {}, NOT_JSON + "the key 'name' is given twice")]),
    ('<tool_call>{"name": "look", "arguments": {"a": 1, "a": 1}}</tool_call>', "", [("", {}, NOT_JSON + "the key 'a' is given twice")]),
    ('<tool_call>{"name": "look", "arguments": {"a": NaN}}</tool_call>', "", [("", {}, NOT_JSON + "NaN is not a JSON number")]),
    ('<tool_call>{"name": "look", "arguments": {"a": -Infinity}}</tool_call>', "", [("", {}, NOT_JSON + "-Infinity is not a JSON number")]),
    (f"<tool_call>{'[' * 100_000}</tool_call>", "", [("", {}, NOT_JSON + "it is nested too deeply")]),
    (f"<think>I could {CALL}</think>No need.", "No need.", []),
    (f"<think>I look.</think>{CALL}", "", [OK]),
    (f"I might {CALL}</think>Done.", "Done.", []),  # the template opened the thought
    (CALL.replace("Oslo", "<think>"), "", [("look", {"city": "<think>"}, "")]),
    (CALL.replace("Oslo", "</think>"), "", [("look", {"city": "</think>"}, "")]),
    (f"Hm <tool_call> no</think>{CALL}", "", [OK]),
    (CALL.replace('"Oslo"', "1e999"), "", [("", {}, NOT_JSON + "1e999 is too large")]),
    (f"<think>one</think>Hm. <think>{CALL}</think>{CALL}", "Hm.", [OK]),
    (f"<think>I look {CALL}", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "prose", "expected"), HERMES_CASES, ids=range(len(HERMES_CASES)))
def test_hermes_calls_of_a_text(text: str, prose: str, expected: Expected):
    check(HERMES, text, prose, expected)


def test_bad_json_says_where_in_the_raw_text():
    _, (call,) = HERMES.parse('<tool_call>\n{"name": wait}\n</tool_call>')
    assert (call.id, call.raw, call.name) == ("call_0", '{"name": wait}', "")
    assert call.error == "the call is not valid JSON: Expecting value: line 1 column 10 (char 9)"


def test_what_hermes_writes():
    assert HERMES.render("look", {"city": "Oslo"}) == CALL
    written = HERMES.render("look", {"city": "a</tool_call>"})
    assert written == CALL.replace("Oslo", "a\\u003c/tool_call>")


# --- Qwen3 XML ---------------------------------------------------------------------------------------------------

XML = "<tool_call>\n<function=look>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
FUNCTION = "<function=look><parameter=city>Oslo</parameter></function>"
NO_FUNCTION = "the call is not closed with </function>"
NO_PARAMETER = "parameter 'city' is not closed with </parameter>"

XML_CASES = [
    ("", "", []),
    ("Go by <b>bus</b>.", "Go by <b>bus</b>.", []),
    (XML, "", [OK]),
    (f"I look.\n{XML}\nThen I wait. ", "I look.\n\nThen I wait.", [OK]),
    (XML + XML, "", [OK, OK]),
    (f"<tool_call>{FUNCTION}{FUNCTION}</tool_call> ", "", [OK, OK]),
    (f"So {FUNCTION} it is", "So  it is", [OK]),
    (f"<tool_call>{FUNCTION}", "", [OK]),
    ("<tool_call><function= wait ></function></tool_call>", "", [("wait", {}, "")]),
    ("<function=wait></function>", "", [("wait", {}, "")]),
    ("<function=look><parameter= city >京都 🎉</parameter></function>", "", [("look", {"city": "京都 🎉"}, "")]),
    ("<function=look><parameter=city>\n\n a\r\n\n</parameter></function>", "", [("look", {"city": "\n a\r\n"}, "")]),
    ("<function=look><parameter=city>\n</parameter></function>", "", [("look", {"city": ""}, "")]),
    ("<function=look><parameter=city></tool_call><function=x><think></parameter></function>", "", [("look", {"city": "</tool_call><function=x><think>"}, "")]),
    ("<function=look><parameter=city>Oslo<parameter=days>2</parameter></function>", "", [("look", {"city": "Oslo", "days": 2}, "")]),
    (f"<tool_call>look{FUNCTION}</tool_call>", "", [OK]),
    ("Now <tool_call><function=look>", "Now", [("look", {}, NO_FUNCTION)]),
    ("Now <tool_call>", "Now", [("", {}, NOT_CLOSED)]),
    ("Now <tool_call>\n<function=look", "Now", [("", {}, "the name after <function= has no >")]),
    (f"<function=\nlook></tool_call>{XML}", "", [("", {}, "the name after <function= has no >"), OK]),
    ("<function= ></function>", "", [("", {}, NO_NAME)]),
    (f"{CALL}{XML}", "", [("", {}, "the call must be written as <function=NAME><parameter=KEY>value</parameter></function>"), OK]),
    ('<function=look>{"city": "Oslo"}</function>', "", [("look", {}, "'{\"city\": \"Oslo\"}' is in no parameter; write <parameter=KEY>")]),
    (f"<function=look><parameter=city>Oslo</parameter></tool_call>{XML}", "", [("look", {}, NO_FUNCTION), OK]),
    (f"<function=look><parameter=city>Oslo</function>{XML}", "", [("look", {}, NO_PARAMETER), OK]),
    (f"<function=look><parameter=city>Oslo</tool_call>{XML}", "", [("look", {}, NO_PARAMETER), OK]),
    (f"<function=look><parameter=city>Oslo</tool_call>{FUNCTION}", "", [("look", {}, NO_PARAMETER), OK]),
    ("<function=look><parameter=city>Oslo", "", [("look", {}, NO_PARAMETER)]),
    ("<function=look><parameter=city</function>", "", [("look", {}, "the name after <parameter= has no >")]),
    ("<function=look><parameter=city>a</parameter><parameter=city>b</parameter></function>", "", [("look", {}, "parameter 'city' is given twice")]),
    ("</tool_call></function></parameter> wait", "</tool_call></function></parameter> wait", []),
    (f"<think>I could {XML}</think>No need.", "No need.", []),
    (f"<think>I look.</think>{XML}", "", [OK]),
    (f"I might {XML}</think>Done.", "Done.", []),
    (f"I might {FUNCTION}</think>Done.", "Done.", []),
    (XML.replace("Oslo", "</think>"), "", [("look", {"city": "</think>"}, "")]),
    (f"<think>one</think>Hm. <think>{XML}</think>{XML}", "Hm.", [OK]),
    (f"<think>I look {XML}", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "prose", "expected"), XML_CASES, ids=range(len(XML_CASES)))
def test_xml_calls_of_a_text(text: str, prose: str, expected: Expected):
    check(QWEN3_XML, text, prose, expected)


def test_a_malformed_xml_call_keeps_its_raw_text():
    _, calls = QWEN3_XML.parse(f"Hm <tool_call>\n<function=look>\n7\n</function>\n</tool_call> {FUNCTION}")
    assert [call.raw for call in calls] == ["<function=look>\n7\n</function>", FUNCTION]


def test_what_xml_writes():
    assert QWEN3_XML.render("look", {"city": "Oslo"}) == XML
    assert QWEN3_XML.render("look", {"days": True}) == XML.replace("city", "days").replace("Oslo", "true")
    assert QWEN3_XML.render("wait", {}) == "<tool_call>\n<function=wait>\n</function>\n</tool_call>"


@pytest.mark.parametrize("value", ["a</parameter>", "<parameter=b>", "</function>"])
def test_xml_refuses_to_write_what_it_cannot_read_back(value: str):
    with pytest.raises(ValueError, match="the value of 'city' holds"):
        QWEN3_XML.render("look", {"city": value})
    nested = QWEN3_XML.render("look", {"where": {"city": value}})
    assert QWEN3_XML.parse(nested, tools=TOOLS)[1][0].arguments == {"where": {"city": value}}


@pytest.mark.parametrize("name", ["", " a", "a>b", "a<b", "a\nb"])
def test_xml_refuses_names_that_it_cannot_read_back(name: str):
    for call in [(name, {}), ("look", {name: "x"})]:
        with pytest.raises(ValueError, match="cannot be written in the format qwen3_xml"):
            QWEN3_XML.render(*call)


@BOTH
def test_what_is_not_json_is_not_written(parser: ToolParser):
    for value in (float("nan"), float("inf"), {1, 2}):
        with pytest.raises(ValueError, match="JSON"):
            parser.render("look", {"where": [value]})


# --- values by schema --------------------------------------------------------------------------------------------

STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {
        "city": STRING, "days": INTEGER, "where": {"type": "object"},
    }}}},
    {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "rest"}},
]  # fmt: skip

VALUES = [
    (STRING, "5", "5"), (STRING, "null", "null"), (STRING, ' "a" ', ' "a" '), (STRING, "{}", "{}"),
    (INTEGER, "5", 5), (INTEGER, " -5\n", -5), (INTEGER, "5.0", 5.0), (INTEGER, "5.5", 5.5), (INTEGER, "five", "five"),
    (INTEGER, "007", "007"), (INTEGER, "null", None), (INTEGER, "", ""), (INTEGER, "9" * 25, 10**25 - 1),
    ({"type": "number"}, "5", 5), ({"type": "number"}, "-1.5e3", -1500.0), ({"type": "number"}, "1e999", "1e999"),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "boolean"}, "true", True), ({"type": "boolean"}, "False", False), ({"type": "boolean"}, "1", True),
    ({"type": "boolean"}, "yes", "yes"),
    (NULL, "null", None), (NULL, "None", None),
    ({"type": "object"}, '{"a": [1, "é", null]}', {"a": [1, "é", None]}), ({"type": "object"}, "[1]", [1]),
    ({"type": "array"}, "[true]", [True]), ({"type": "array"}, "5", 5),
    ({"enum": ["1", "2"]}, "1", "1"), ({"enum": [1, 2]}, "1", 1), ({"enum": ["1", 2]}, "1", "1"),
    ({"enum": ["1", 2]}, "2", 2), ({"enum": [True, None]}, "true", True), ({"const": 3}, "3", 3),
    ({"type": "string", "enum": ["null", "5"]}, "null", "null"), ({"enum": ["null", None]}, "null", "null"),
    ({"anyOf": [STRING, NULL]}, "null", None), ({"anyOf": [STRING, NULL]}, "None", "None"),
    ({"anyOf": [STRING, NULL]}, "5", "5"), ({"anyOf": [INTEGER, NULL]}, "None", None), ({"anyOf": [INTEGER, NULL]}, "5", 5),
    ({"type": "integer", "nullable": True}, "None", None), ({"type": "string", "nullable": True}, "null", None),
    ({"anyOf": [STRING, INTEGER]}, "5", 5), ({"anyOf": [STRING, INTEGER]}, "007", "007"),
    ({"anyOf": [STRING, INTEGER]}, "5.5", "5.5"), ({"type": ["object", "string"]}, "5", "5"),
    ({"type": ["object", "string"]}, '"a"', '"a"'), ({"type": ["object", "string"]}, '{"a": 1}', {"a": 1}),
    ({"type": ["object", "string"]}, "{a}", "{a}"), ({"oneOf": [{"allOf": [INTEGER]}, STRING]}, "5", 5),
    ({"anyOf": [{"type": "boolean"}, INTEGER]}, "1", 1), ({"anyOf": [{"type": "boolean"}, STRING]}, "TRUE", True),
    ({}, "5", "5"), (True, "5", "5"), ({"type": 7, "anyOf": [5]}, "5", "5"), ({"nullable": True}, "null", "null"),
]  # fmt: skip


def one_value(schema: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "set", "parameters": {"properties": {"x": schema}}}}]


@pytest.mark.parametrize(("schema", "text", "expected"), VALUES, ids=range(len(VALUES)))
def test_values_are_read_by_their_schema(schema: Any, text: str, expected: Any):
    written = f"<function=set><parameter=x>{text}</parameter></function>"
    _, (call,) = QWEN3_XML.parse(written, tools=one_value(schema))
    assert call.error is None
    assert (call.arguments["x"], type(call.arguments["x"])) == (expected, type(expected))


def test_broken_json_where_an_object_is_asked_for_says_where_it_breaks():
    _, (call,) = QWEN3_XML.parse("<function=look><parameter=where>{'a': 1}</parameter></function>", tools=TOOLS)
    assert (call.name, call.arguments) == ("look", {})
    start = "parameter 'where' is not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2"
    assert (call.error or "").startswith(start)


@pytest.mark.parametrize(("tool", "key"), [("nope", "days"), ("look", "nope"), ("wait", "days"), ("rest", "days")])
def test_a_value_of_an_unknown_tool_or_parameter_stays_a_string(tool: str, key: str):
    text = f"<function={tool}><parameter={key}>5</parameter></function>"
    assert QWEN3_XML.parse(text, tools=TOOLS)[1][0].arguments == {key: "5"}
    assert QWEN3_XML.parse(text)[1][0].arguments == {key: "5"}


# --- thoughts that the generation prompt opened ------------------------------------------------------------------


@BOTH
def test_text_of_a_thinking_template_is_thought_until_the_thought_is_closed(parser: ToolParser):
    thinking, call = THINKING[parser.name], parser.render("look", {"city": "Oslo"})
    assert thinking.parse(call) == ("", ())
    assert thinking.parse(f"Hm.{call}") == ("", ())
    assert thinking.parse(f"I could {call}</think>Done.") == ("Done.", ())
    assert thinking.parse(f"Hm. <tool_call> {call}</think>Done.{call}") == ("Done.", parser.parse(call)[1])
    assert thinking.parse(f"</think>{call}") == parser.parse(call)


def test_the_template_tells_the_format():
    assert parser_for_template('{"name": <function-name>, "arguments": <args-json-object>}') == HERMES
    assert parser_for_template("<function=example>\n<parameter=a>\nvalue\n</parameter>") == QWEN3_XML
    assert parser_for_template("<function=example>{...}</function>") == HERMES  # Llama 3.1 writes JSON there
    assert list(PARSERS) == ["hermes", "qwen3_xml"] == [parser.name for parser in PARSERS.values()]


# --- properties --------------------------------------------------------------------------------------------------

TAGS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
]
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    [*TAGS[:4], "\n", "\\u003c", "5"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>\n"), min_size=1, max_size=8).filter(
    lambda name: name == name.strip()
)
TYPES = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}


def schema_of(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    properties = {key: {"type": TYPES[type(value)]} for key, value in arguments.items()}
    return [{"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}]


@BOTH
@settings(max_examples=150)
@given(name=NAMES, arguments=st.dictionaries(NAMES, JSON, max_size=4))
@example(name="a", arguments={"x": "\n</think>\n", "y": "</tool_call>", "z": {"</parameter>": "</function>"}})
def test_a_call_that_is_written_is_read_back(parser: ToolParser, name: str, arguments: dict[str, Any]):
    text = parser.render(name, arguments)
    for before, after in [("", ""), ("<think>Hm.</think>I say\n", "\nand wait."), (f"{parser.render('b', {})}", "")]:
        _, calls = parser.parse(before + text + after, tools=schema_of(name, arguments))
        assert [(c.name, c.arguments, c.error) for c in calls[-1:]] == [(name, arguments, None)]
        assert len(calls) == 1 + before.endswith("</tool_call>")


PIECES = st.sampled_from(
    [*TAGS, "<function=look>", "<parameter=city>", '{"name": "look", "arguments": {}}', "[[", "\n", ">"]
)


@BOTH
@settings(max_examples=300)
@given(pieces=st.lists(PIECES | WORDS, max_size=14), thinking=st.booleans())
def test_no_text_breaks_the_parser_and_no_thought_is_a_call(parser: ToolParser, pieces: list[str], thinking: bool):
    text, reads = "".join(pieces), THINKING[parser.name] if thinking else parser
    _, calls = reads.parse(text, tools=TOOLS)
    assert [call.id for call in calls] == [f"call_{n}" for n in range(len(calls))]
    assert all(call.raw in text and (call.error is None or not call.arguments) for call in calls)
    closed = text.replace("</think>", "")
    assert reads.parse(f"<think>{closed}</think>Done.", tools=TOOLS) == ("Done.", ())
    assert parser.parse(f"Now: <think>{closed}", tools=TOOLS) == ("Now:", ())


HOSTILE = [*TAGS, "<function=a>", "<function=a><parameter=x>", "<tool_call><function=", "<think></think>", "[", "{\"a\":", "\n", "</function> "]  # fmt: skip


@BOTH
@pytest.mark.timeout(30)
def test_hostile_text_takes_linear_time(parser: ToolParser):
    for unit in HOSTILE:  # 400 kB: minutes if each tag looked at all the rest
        for end in ("", "</tool_call>", "</function>"):
            _, calls = parser.parse(unit * (400_000 // len(unit)) + end)
            assert all(call.error or not call.arguments for call in calls)
