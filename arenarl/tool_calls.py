"""Tool calls in assistant text: one small parser per format, each with the writer that it reads back.

    hermes      <tool_call>{"name": "look", "arguments": {"city": "Oslo"}}</tool_call>          Hermes, Qwen2.5, Qwen3
    qwen3_xml   <tool_call><function=look><parameter=city>Oslo</parameter></function></tool_call>   Qwen3-Coder, Qwen3.5

On well-formed text they agree with vLLM's parsers of the same models (`tests/test_tool_calls_vllm.py` has the exact
differences). Two rules are stricter: a call inside a thought is never executed, and a malformed call is not dropped but
says in ``error`` what is wrong, in words that the model can act on. Time is linear in the text, whatever it holds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from arenarl.mcp.schema import MAX_ARGUMENT_DEPTH, deeper_than
from arenarl.types import ToolCall

_THINK, _THINK_END = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class ToolParser(Protocol):
    """One format of tool calls."""

    @property
    def name(self) -> str: ...

    def parse(
        self, text: str, *, first_id: int = 0, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, tuple[ToolCall, ...]]:
        """Split assistant text into prose and calls. Never raises.

        Args:
            first_id: number of the first call: the ids are ``call_{first_id}``, ...
            tools: schemas as a chat template takes them; formats without types of their own read values by them.

        Returns:
            (prose without thoughts and calls, calls in order). A malformed call has ``error`` and no arguments.
        """
        ...

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of a call, as the chat templates of this format write it.

        Raises:
            ValueError: the format has no way to write this name or one of these values.
        """
        ...


def parser_for_template(template: str, *, thinking: bool = False) -> ToolParser:
    """The parser of the format that a chat template asks the model to write; Hermes if it asks for none that is known.

    Args:
        thinking: the generation prompt ends inside a thought, so text up to ``</think>`` is thought.
    """
    chosen = QWEN3_XML if _FUNCTION in template and _PARAMETER in template else HERMES
    return replace(chosen, thinking=thinking)


# --- what the formats share ----------------------------------------------------------------------------------------


def _spoken_from(text: str, thinking: bool, opening: str, closing: str) -> int:
    """Where a thought that was opened before the text ends: 0 if there is none, the end if it is never closed."""
    end = text.find(_THINK_END)
    if thinking:
        return len(text) if end < 0 else end + len(_THINK_END)
    if end < 0 or text.find(_THINK, 0, end) >= 0:
        return 0
    next_open, next_close = text.find(opening, end), text.find(closing, end)
    in_call = text.rfind(opening, 0, end) > text.rfind(closing, 0, end)
    if in_call and next_close >= 0 and not 0 <= next_open < next_close:
        return 0  # an argument that holds the words
    return end + len(_THINK_END)


def _split(
    text: str, start: int, opening: re.Pattern[str], read: Callable[[int, str], tuple[ToolCall, int]], first_id: int
) -> tuple[str, tuple[ToolCall, ...]]:
    """Walk over the text from one opening tag to the next; ``read(place, id)`` gives the call and where it ends."""
    prose: list[str] = []
    calls: list[ToolCall] = []
    while tag := opening.search(text, start):
        prose.append(text[start : tag.start()])
        if tag[0] == _THINK:
            end = text.find(_THINK_END, tag.end())
            start = len(text) if end < 0 else end + len(_THINK_END)
        else:
            call, start = read(tag.start(), f"call_{first_id + len(calls)}")
            calls.append(call)
    return "".join([*prose, text[start:]]).strip(), tuple(calls)


def _load(text: str) -> Any:
    """Strict JSON. Raises ValueError, with the position, for what other parsers would read differently."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if deeper_than(value, MAX_ARGUMENT_DEPTH + 1):  # the call itself is a level
        raise ValueError(f"it is nested more than {MAX_ARGUMENT_DEPTH} levels deep")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:80]!r} is given twice")
        found[key] = value
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text[:80]} is too large")
    return value


def _dump(value: Any, *tags: str) -> str:
    """JSON in which none of the tags occurs. Raises ValueError for what is not JSON."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return text.replace("<", "\\u003c") if any(tag in text for tag in tags) else text


# --- Hermes --------------------------------------------------------------------------------------------------------

_HERMES_OPENING = re.compile(f"{_THINK}|{_CALL}")


@dataclass(frozen=True)
class HermesParser:
    """JSON objects with ``name`` and ``arguments`` between ``<tool_call>`` tags.

    Args:
        thinking: the generation prompt ends inside a thought.
    """

    thinking: bool = False
    name: str = "hermes"

    def parse(
        self, text: str, *, first_id: int = 0, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, tuple[ToolCall, ...]]:
        def read(at: int, call_id: str) -> tuple[ToolCall, int]:
            end = text.find(_CALL_END, at)
            raw = text[at + len(_CALL) : end if end >= 0 else None].strip()
            if end < 0:
                error = f"the call is not closed with {_CALL_END}"
                return ToolCall(id=call_id, name="", raw=raw, error=error), len(text)
            return _hermes_call(call_id, raw), end + len(_CALL_END)

        start = _spoken_from(text, self.thinking, _CALL, _CALL_END)
        return _split(text, start, _HERMES_OPENING, read, first_id)

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        body = _dump({"name": name, "arguments": dict(arguments)}, _CALL_END, _THINK, _THINK_END)
        return f"{_CALL}\n{body}\n{_CALL_END}"


def _hermes_call(call_id: str, raw: str) -> ToolCall:
    def bad(reason: str, name: str = "") -> ToolCall:
        return ToolCall(id=call_id, name=name, raw=raw, error=reason)

    try:
        value = _load(raw)
    except ValueError as error:
        return bad(f"the call is not valid JSON: {error}")
    if not isinstance(value, dict):
        return bad(f"the call must be a JSON object with name and arguments, got {type(value).__name__}")
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name:
        return bad("the call has no tool name")
    if not isinstance(arguments, dict):
        return bad(f"arguments must be a JSON object, got {type(arguments).__name__}", name)
    return ToolCall(id=call_id, name=name, arguments=arguments, raw=raw)


# --- Qwen3 XML -----------------------------------------------------------------------------------------------------

_XML_OPENING = re.compile(f"{_THINK}|{_CALL}|{_FUNCTION}")
_XML_BEGIN = re.compile(f"{_FUNCTION}|{_CALL_END}")
_XML_NAME = re.compile("([^<>\n]*)>")
_XML_TAG = re.compile(f"{_PARAMETER}|{_FUNCTION_END}|{_CALL_END}")
_XML_VALUE_END = re.compile(f"{_PARAMETER_END}|{_PARAMETER}|{_FUNCTION_END}")
_XML_CLOSE = re.compile(rf"\s*{_CALL_END}")
_XML_RESERVED = (_PARAMETER_END, _PARAMETER, _FUNCTION_END)


@dataclass(frozen=True)
class Qwen3XmlParser:
    """A ``<function=NAME>`` with one ``<parameter=KEY>`` per argument, whose text is read by the tool's JSON schema.

    A string stays as it is written, but for one newline at either end. Any other type is JSON. A value that does not
    fit its type, and any value of an unknown tool or parameter, stays a string. The outer ``<tool_call>`` may be
    missing, and the next ``<parameter=`` closes one that was left open: vLLM accepts both.

    Args:
        thinking: the generation prompt ends inside a thought.
    """

    thinking: bool = False
    name: str = "qwen3_xml"

    def parse(
        self, text: str, *, first_id: int = 0, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, tuple[ToolCall, ...]]:
        def read(at: int, call_id: str) -> tuple[ToolCall, int]:
            found = _read_xml(text, at)
            arguments, error = {}, found.error
            if not error:
                try:
                    arguments = _typed_arguments(found.values, _properties(tools, found.name))
                except ValueError as problem:
                    error = str(problem)
            raw = text[at : found.end].strip().removeprefix(_CALL).removesuffix(_CALL_END).strip()
            call = ToolCall(id=call_id, name=found.name, arguments=arguments, raw=raw, error=error or None)
            return call, found.end

        start = _spoken_from(text, self.thinking, _FUNCTION, _FUNCTION_END)
        return _split(text, start, _XML_OPENING, read, first_id)

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        lines = [_CALL, f"{_FUNCTION}{_xml_name(name)}>"]
        for key, value in arguments.items():
            written = value if isinstance(value, str) else _dump(value, *_XML_RESERVED)
            if tag := next((tag for tag in _XML_RESERVED if tag in written), None):
                raise ValueError(f"the value of {key!r} holds {tag!r}, which the format {self.name} cannot write")
            lines += [f"{_PARAMETER}{_xml_name(key)}>", written, _PARAMETER_END]
        return "\n".join([*lines, _FUNCTION_END, _CALL_END])


def _xml_name(name: str) -> str:
    if not name or name != name.strip() or re.search("[<>\n]", name):
        raise ValueError(f"the name {name!r} cannot be written in the format qwen3_xml")
    return name


@dataclass(frozen=True, kw_only=True)
class _XmlCall:
    """A call as written: texts of its parameters, and where it ends. ``error`` is empty if it is well formed."""

    name: str = ""
    values: Mapping[str, str]
    error: str = ""
    end: int


def _read_xml(text: str, at: int) -> _XmlCall:
    """The call whose ``<tool_call>`` or ``<function=`` is at this place."""
    begin = _XML_BEGIN.search(text, at)
    if begin is None:
        return _XmlCall(values={}, error=f"the call is not closed with {_CALL_END}", end=len(text))
    if begin[0] == _CALL_END:
        form = f"{_FUNCTION}NAME>{_PARAMETER}KEY>value{_PARAMETER_END}{_FUNCTION_END}"
        return _XmlCall(values={}, error=f"the call must be written as {form}", end=begin.end())
    name = _XML_NAME.match(text, begin.end())
    if name is None:
        return _XmlCall(values={}, error=f"the name after {_FUNCTION} has no >", end=_after_call(text, begin.end()))
    found = _read_parameters(text, name.end())
    close = _XML_CLOSE.match(text, found.end)
    error = found.error if name[1].strip() else "the call has no tool name"
    return replace(found, name=name[1].strip(), error=error, end=close.end() if close else found.end)


def _read_parameters(text: str, start: int) -> _XmlCall:
    """All up to ``</function>``. The first thing that is wrong becomes the error."""
    values: dict[str, str] = {}
    error = ""
    while tag := _XML_TAG.search(text, start):
        if stray := text[start : tag.start()].strip():
            error = error or f"{stray[:80]!r} is in no parameter; write {_PARAMETER}KEY>value{_PARAMETER_END}"
        if tag[0] == _FUNCTION_END:
            return _XmlCall(values=values, error=error, end=tag.end())
        if tag[0] == _CALL_END:
            return _XmlCall(values=values, error=error or f"the call is not closed with {_FUNCTION_END}", end=tag.end())
        start = tag.end()
        key = _XML_NAME.match(text, start)
        if key is None:
            error = error or f"the name after {_PARAMETER} has no >"
            continue
        name, stop = key[1].strip(), _XML_VALUE_END.search(text, key.end())
        value = text[key.end() : stop.start() if stop else None]
        if stop is None or (stop[0] != _PARAMETER_END and _CALL_END in value):
            error = error or f"parameter {name!r} is not closed with {_PARAMETER_END}"
            return _XmlCall(values=values, error=error, end=_after_call(text, key.end()))
        if stop[0] == _FUNCTION_END:
            error = error or f"parameter {name!r} is not closed with {_PARAMETER_END}"
        elif name in values:
            error = error or f"parameter {name!r} is given twice"
        values[name] = value.removeprefix("\n").removesuffix("\n")
        start = stop.end() if stop[0] == _PARAMETER_END else stop.start()
    return _XmlCall(values=values, error=error or f"the call is not closed with {_FUNCTION_END}", end=len(text))


def _after_call(text: str, start: int) -> int:
    end = text.find(_CALL_END, start)
    return len(text) if end < 0 else end + len(_CALL_END)


# --- values by JSON schema -----------------------------------------------------------------------------------------

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_JSON_TYPES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}  # fmt: skip


def _properties(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            return (function.get("parameters") or {}).get("properties") or {}
    return {}


def _typed_arguments(values: Mapping[str, str], properties: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ValueError for broken JSON where only an object or an array is allowed."""
    arguments = {}
    for key, value in values.items():
        try:
            arguments[key] = _typed(value, properties.get(key))
        except ValueError as error:
            raise ValueError(f"parameter {key!r} is not valid JSON: {error}") from None
    return arguments


def _typed(value: str, schema: Any) -> Any:
    types = _types(schema)
    if not types - {"string"} or value in _literals(schema):
        return value
    word = value.strip().lower()
    if "null" in types and (word == "null" or (word == "none" and "string" not in types)):
        return None
    try:
        parsed = _load(value)
    except ValueError:
        if not types - {"object", "array", "null"}:
            raise
        parsed = value
    found = _JSON_TYPES[type(parsed)]
    fits = found in types or (found == "integer" and "number" in types)
    if found == "number" and "integer" in types:
        fits = fits or parsed.is_integer()
    if fits and found != "string":
        return parsed
    if "boolean" in types and word in _BOOLEANS:
        return _BOOLEANS[word]
    return value if "string" in types else parsed


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema names, in any of the ways it may; none if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    found = {k for k in (kind if isinstance(kind, list) else [kind]) if isinstance(k, str)}
    found |= {_JSON_TYPES[type(literal)] for literal in _literals(schema) if type(literal) in _JSON_TYPES}
    if schema.get("nullable") is True and found:
        found.add("null")
    for key in ("anyOf", "oneOf", "allOf"):
        for choice in schema.get(key) or ():
            found |= _types(choice)
    return found


def _literals(schema: Any) -> list[Any]:
    if not isinstance(schema, Mapping):
        return []
    return [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else ())]


HERMES = HermesParser()
QWEN3_XML = Qwen3XmlParser()
PARSERS: dict[str, ToolParser] = {parser.name: parser for parser in (HERMES, QWEN3_XML)}
