"""Tools and results as the model sees them."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arenarl.mcp import ToolSet, ToolSpec
from arenarl.mcp.results import clean_text, result_text, truncate_text
from arenarl.mcp.schema import argument_problem, normalise_schema

# --- schemas -----------------------------------------------------------------------------------------------------

SCHEMAS = [  # given, normalised
    ({}, {"type": "object", "properties": {}}),
    ({"properties": None, "required": "x", "title": "T", "$schema": "s"}, {"type": "object", "properties": {}}),
    (
        {"properties": {"title": {"type": "string", "title": "Title"}, "n": True}, "required": ["title", "gone"]},
        {"type": "object", "properties": {"title": {"type": "string"}, "n": {}}, "required": ["title"]},
    ),
    (
        {"properties": {"n": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "description": None}}},
        {"type": "object", "properties": {"n": {"default": None, "nullable": True, "type": "integer"}}},
    ),
    (
        {"properties": {"n": {"type": ["string", "null"]}, "m": {"type": ["string", "integer"]}, "c": {"const": 5}}},
        {
            "type": "object",
            "properties": {
                "n": {"type": "string", "nullable": True},
                "m": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                "c": {"enum": [5], "type": "integer"},
            },
        },
    ),
    (
        {"properties": {"p": {"$ref": "#/$defs/P", "description": "d"}}, "$defs": {"P": {"properties": {"x": {"type": "number"}}}}},
        {
            "type": "object",
            "properties": {"p": {"properties": {"x": {"type": "number"}}, "description": "d", "type": "object"}},
        },
    ),
    (
        {"properties": {"a": {"allOf": [{"$ref": "#/$defs/a~1b"}]}, "w": {"$ref": "http://x/y"}}, "$defs": {"a/b": {"enum": ["u", None]}}},
        {"type": "object", "properties": {"a": {"enum": ["u"], "nullable": True, "type": "string"}, "w": {}}},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "expected"), SCHEMAS)
def test_schema_golden(schema: dict[str, Any], expected: dict[str, Any]):
    assert normalise_schema(schema) == expected


def test_recursive_schema_ends():
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
    result = normalise_schema({"$ref": "#/$defs/tree", "$defs": {"tree": tree}})
    assert result["properties"]["kids"]["items"] == {"type": "object", "description": "nested further in the same way"}
    bomb = {f"d{n}": {"properties": {k: {"$ref": f"#/$defs/d{n + 1}"} for k in "abcdefgh"}} for n in range(12)}
    assert len(json.dumps(normalise_schema({"$ref": "#/$defs/d0", "$defs": bomb}))) < 1_000_000


SIMPLE = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
NODES = st.recursive(
    st.one_of(
        st.booleans(),
        st.fixed_dictionaries(
            {}, optional={"type": st.one_of(SIMPLE, st.lists(SIMPLE, max_size=3)), "title": st.just("t")}
        ),
        st.fixed_dictionaries({"$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "#/nowhere", "x.json"])}),
        st.fixed_dictionaries({"const": st.one_of(st.none(), st.integers(), st.text(max_size=2))}),
        st.fixed_dictionaries({"enum": st.lists(st.one_of(st.none(), st.text(max_size=2)), max_size=3)}),
    ),
    lambda node: st.fixed_dictionaries(
        {},
        optional={
            "anyOf": st.lists(node, max_size=3),
            "oneOf": st.lists(node, max_size=2),
            "allOf": st.lists(node, max_size=2),
            "items": st.one_of(node, st.lists(node, max_size=2)),
            "properties": st.dictionaries(st.sampled_from("xyz"), node, max_size=3),
            "additionalProperties": node,
            "required": st.lists(st.sampled_from("xyzw"), max_size=3),
            "description": st.one_of(st.none(), st.just("words")),
            "not": node,
        },
    ),
    max_leaves=6,
)
ROOTS = st.builds(
    lambda root, a, b: {**(root if isinstance(root, dict) else {}), "$defs": {"a": a, "b": b}}, NODES, NODES, NODES
)


def keys_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


@settings(max_examples=60)
@given(ROOTS)
def test_normalised_schema_is_plain_and_stable(schema: dict[str, Any]):
    result = normalise_schema(schema)
    assert result["type"] == "object" and isinstance(result["properties"], dict)
    assert not keys_of(result) & {"$ref", "$defs", "const", "title"}
    assert normalise_schema(result) == result


PARAMETERS = st.sampled_from(
    [
        {"type": "integer"},
        {"type": ["string", "null"]},
        {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        {"const": "fixed"},
        {"enum": ["a", "b", None]},
        {"$ref": "#/$defs/kind"},
        {"allOf": [{"$ref": "#/$defs/kind"}]},
    ]
)
VALUES = {"integer": 3, "string": "s", "boolean": True}


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from("pqrs"), PARAMETERS), st.lists(st.sampled_from("pqrst")))
def test_what_fits_the_normalised_schema_fits_the_original(properties: dict[str, Any], required: list[str]):
    known = sorted(set(required) & set(properties))
    schema = {"type": "object", "properties": properties, "required": known, "$defs": {"kind": {"enum": ["k"]}}}
    shown = normalise_schema(schema)
    arguments = {name: p["enum"][0] if "enum" in p else VALUES[p["type"]] for name, p in shown["properties"].items()}
    assert argument_problem(json.dumps(schema), arguments) is None


ARGUMENTS = [
    ({"city": "Oslo", "days": 2}, None),
    ({"days": 2}, "missing required argument: city"),
    ({}, "missing required arguments: city, days"),
    ({"city": 5, "days": 2}, "5 is not of type 'string' (at city)"),
    ({"city": "Oslo", "days": 0}, "0 is less than the minimum of 1 (at days)"),
    ({"city": "Oslo", "days": 2, "x": 1}, "Additional properties are not allowed ('x' was unexpected)"),
    ({"city": "Oslo", "days": float("nan")}, "the arguments hold a value that JSON cannot carry"),
]


@pytest.mark.parametrize(("arguments", "problem"), ARGUMENTS)
def test_argument_problem_is_one_readable_line(arguments: dict[str, Any], problem: str | None):
    fields = {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}}
    schema = {"type": "object", "properties": fields, "required": ["city", "days"], "additionalProperties": False}
    found = argument_problem(json.dumps(schema), arguments)
    assert found == problem or (problem is not None and found is not None and found.startswith(problem))


@pytest.mark.parametrize(
    "schema", [{"type": "nonsense"}, {"$ref": "http://x/y"}, {"properties": {"a": {"pattern": "\\p{L}("}}}]
)
def test_broken_schema_accepts_everything(schema: dict[str, Any]):
    assert argument_problem(json.dumps(schema), {"a": "b"}) is None


def tool(server_name: str, name: str) -> ToolSpec:
    return ToolSpec(name=name, description="", parameters={"type": "object"}, server=server_name)


def test_names_are_bare_if_unique_and_lead_back():
    tools = ToolSet([tool("web", "search"), tool("files", "search"), tool("web", "get.page"), tool("web", "x" * 70)])
    assert tools.names[:3] == ["web__search", "files__search", "get_page"]
    assert len(tools.names[3]) == 64 and tools.names[3].startswith("x" * 55 + "_")
    assert tools.resolve("files__search") == tool("files", "search")
    assert tools.name_of("web", "get.page") == "get_page" and tools.resolve("search") is None
    assert tools.near("serch")[0] in ("web__search", "files__search")


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b b"]), st.text("ab._/é", max_size=4)), unique=True, max_size=8),
    st.randoms(),
)
def test_names_are_unique_valid_and_independent_of_order(pairs: list[tuple[str, str]], rng: random.Random):
    tools = ToolSet([tool(*pair) for pair in pairs])
    shuffled = rng.sample(pairs, len(pairs))
    other = ToolSet([tool(*pair) for pair in shuffled])
    assert len(set(tools.names)) == len(pairs)
    assert all(name and len(name) <= 64 and set(name) <= set("ab_") | set("0123456789cdef-") for name in tools.names)
    assert {pair: other.name_of(*pair) for pair in pairs} == {pair: tools.name_of(*pair) for pair in pairs}


def test_result_text_prefers_text_and_marks_the_rest():
    text, image = (
        {"type": "text", "text": "a\0\x1b[31mb\ud800"},
        {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"},
    )
    assert result_text([text, image], {"k": 1}) == "ab\ufffd\n[audio audio/wav, 0.0 kB]"
    assert result_text([image], {"k": "é"}) == '[audio audio/wav, 0.0 kB]\n{"k":"é"}'
    link = {"type": "resource_link", "name": "n", "uri": "file:///x", "mimeType": None}
    assert (
        result_text([link, {"type": "resource", "resource": {"uri": "u", "text": "inside"}}])
        == "[resource n file:///x]\ninside"
    )


def test_truncation_keeps_both_ends():
    assert truncate_text("short", 2) == ("short", False)  # two tokens of four characters
    assert truncate_text("a" * 80 + "b" * 20, 5) == ("a" * 16 + "\n[... 80 characters omitted ...]\n" + "b" * 4, True)
    assert truncate_text("a" * 9, 1) == ("aaaa\n[... 5 characters omitted ...]\n", True)
    lines = "".join(f"line {n}\n" for n in range(100))
    cut, was_cut = truncate_text(lines, 25)
    assert was_cut and cut.startswith("line 0\nline 1\n") and cut.endswith("\nline 98\nline 99\n")


@given(st.text(st.sampled_from("ab \n"), max_size=400), st.integers(1, 40), st.integers(1, 7))
def test_truncated_text_keeps_to_its_tokens(text: str, limit: int, width: int):
    def offsets(piece: str) -> list[tuple[int, int]]:
        return [(n, min(n + width, len(piece))) for n in range(0, len(piece), width)]

    cut, was_cut = truncate_text(text, limit, offsets)
    assert was_cut == (len(offsets(text)) > limit)
    if was_cut:
        head, tail = re.split(r"\n\[\.\.\. \d+ characters omitted \.\.\.\]\n", cut)
        assert text.startswith(head) and text.endswith(tail) and 0 < len(head) + len(tail) <= limit * width
    else:
        assert cut == text


def test_a_long_text_of_few_tokens_is_cut_all_the_same():
    def offsets(piece: str) -> list[tuple[int, int]]:  # one token for 64 characters
        return [(n, min(n + 64, len(piece))) for n in range(0, len(piece), 64)]

    cut, was_cut = truncate_text("=" * 70_000, 100, offsets)
    assert was_cut and cut.startswith("=" * 1600 + "\n[...") and cut.endswith("...]\n" + "=" * 1600)
    assert truncate_text("x" * 5000, 10, lambda piece: [])[0].startswith("\n[... 5000 characters")


def test_of_a_very_long_text_only_the_ends_are_tokenised():
    seen: list[int] = []

    def offsets(piece: str) -> list[tuple[int, int]]:
        seen.append(len(piece))
        return [(n, n + 1) for n in range(len(piece))]

    cut, _ = truncate_text("x" * 5_000_000, 10, offsets)
    assert cut == "x" * 7 + "\n[... 4999990 characters omitted ...]\n" + "x" * 3 and max(seen) == 160


@given(st.text(st.characters(), max_size=50))
def test_clean_text_can_be_encoded_and_is_stable(text: str):
    cleaned = clean_text(text)
    assert "\0" not in cleaned
    assert cleaned.encode().decode() == cleaned
    assert clean_text(cleaned) == cleaned or "\x1b" in text


@pytest.mark.parametrize(
    "schema",
    [{"$schema": ["x"]}, {"$schema": 5}, {"$schema": "http://json-schema.org/draft-03/schema#", "required": True}],
)
def test_odd_dialect_of_a_schema_accepts_everything(schema: dict[str, Any]):
    assert argument_problem(json.dumps({"type": "object", **schema}), {"a": 1}) is None


def test_recursive_schema_is_not_followed_for_ever():
    filters: Any = {"op": "x"}
    for _ in range(30):
        filters = {"op": "and", "filters": [filters]}
    node = {
        "anyOf": [
            {"properties": {"filters": {"items": {"$ref": "#/$defs/f"}}}, "required": ["filters", key]} for key in "ab"
        ]
    }
    schema = {"type": "object", "properties": {"where": {"$ref": "#/$defs/f"}}, "$defs": {"f": node}}
    assert (
        argument_problem(json.dumps(schema), {"where": filters}) == "the arguments are nested more than 16 levels deep"
    )


def test_anchor_is_not_the_whole_schema():
    schema = {"type": "object", "properties": {"a": {"$ref": "#here"}, "b": {"$anchor": "here", "type": "string"}}}
    assert normalise_schema(schema)["properties"]["a"] == {}
