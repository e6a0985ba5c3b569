"""Tools as the model sees them: schemas for chat templates, names, and argument checks."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from arenarl.mcp.results import clean_text

_MAX_NAME = 64
MAX_ARGUMENT_DEPTH = 64
_MAX_RECURSIVE_DEPTH = 16


@dataclass(frozen=True, kw_only=True)
class ToolSpec:
    """One tool as its server declares it; ``parameters`` is the server's own JSON schema, unchanged.

    Attributes:
        read_only: the server's hint that a call changes nothing. Only a hint.
        idempotent: the server's hint that a second equal call changes nothing more. Only a hint.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    server: str
    read_only: bool = False
    idempotent: bool = False


class ToolSet:
    """The tools of all servers of an episode under names that are unique.

    A name is the tool's own if no other server has it, else ``server__tool``; either way in ``[A-Za-z0-9_-]{1,64}``.
    Names depend on the set of tools only, not on its order.

    Attributes:
        schemas: one ``{"type": "function", "function": {...}}`` per tool, for a chat template.
    """

    def __init__(self, tools: Iterable[ToolSpec]) -> None:
        ordered = list(tools)
        names = unique_names([(tool.server, tool.name) for tool in ordered])
        self._by_name = dict(zip(names, ordered, strict=True))
        self._json = {name: json.dumps(tool.parameters) for name, tool in self._by_name.items()}
        self.schemas = [template_schema(tool, name) for name, tool in self._by_name.items()]

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def resolve(self, name: str) -> ToolSpec | None:
        """The tool behind a name that the model used."""
        return self._by_name.get(name)

    def name_of(self, server: str, tool: str) -> str | None:
        """The name that the model uses for a server's tool."""
        return next((name for name, spec in self._by_name.items() if (spec.server, spec.name) == (server, tool)), None)

    def near(self, name: str) -> list[str]:
        """Up to three existing names that the model may have meant; the first ten names if none is near."""
        return difflib.get_close_matches(name, self.names, 3, 0.5) or self.names[:10]

    def problem(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """What is wrong with the arguments, in one line; None if the tool's own schema accepts them."""
        return argument_problem(self._json[name], arguments)


def unique_names(tools: Sequence[tuple[str, str]]) -> list[str]:
    """One name per (server, tool), see `ToolSet`."""
    bare = [tool for _, tool in tools]
    wanted = [tool if bare.count(tool) == 1 else f"{server}__{tool}" for server, tool in tools]
    clean = [re.sub(r"[^A-Za-z0-9_-]", "_", name) or "_" for name in wanted]
    names = []
    for (server, tool), name in zip(tools, clean, strict=True):
        if len(name) > _MAX_NAME or clean.count(name) > 1:
            digest = hashlib.sha256(f"{server}\0{tool}".encode("utf-8", "replace")).hexdigest()[:8]
            name = f"{name[: _MAX_NAME - 9]}_{digest}"
        names.append(name)
    return names


def template_schema(tool: ToolSpec, name: str) -> dict[str, Any]:
    """The tool in the form that chat templates print."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": clean_text(tool.description),
            "parameters": normalise_schema(tool.parameters),
        },
    }


# --- schemas -----------------------------------------------------------------------------------------------------

_ONE = ("items", "contains", "not", "if", "then", "else", "propertyNames", "contentSchema", "additionalProperties", "unevaluatedProperties", "additionalItems", "unevaluatedItems")  # fmt: skip
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "dependentSchemas")
_DROPPED = frozenset({"$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "dependencies", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "title"})  # fmt: skip
_TYPE_OF = {str: "string", bool: "boolean", int: "integer", float: "number"}
_KIND_OF = {
    "description": str,
    **dict.fromkeys(_NAMED, dict),
    **dict.fromkeys(_MANY, list),
    "enum": list,
    "required": list,
}
_MAX_DEPTH, _MAX_NODES = 12, 4000
_RECURSIVE: dict[str, Any] = {"type": "object", "description": "nested further in the same way"}


def normalise_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's schema in the small dialect that chat templates and tool-call parsers agree on.

    Local references are inlined (a cycle ends in a plain object, a foreign reference accepts anything), unions with null
    become ``nullable``, ``const`` becomes ``enum``, every parameter gets a type where one can be told, ``required``
    names known properties only, and bookkeeping keys go. Idempotent. It is for the model to read; arguments are
    checked against the server's own schema.
    """
    result = _Normaliser(schema).walk(schema, ())
    if result.get("type") != "object":
        result["type"] = "object"
    if not isinstance(result.get("properties"), dict):
        result["properties"] = {}
    _prune_required(result)
    order = ("type", "properties", "required")
    return {key: result[key] for key in order if key in result} | {k: v for k, v in result.items() if k not in order}


class _Normaliser:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root, self.nodes = root, 0

    def walk(self, schema: Any, trail: tuple[str, ...]) -> dict[str, Any]:
        """``trail`` is the references that led here."""
        self.nodes += 1
        if not isinstance(schema, Mapping):
            return {}
        if self.nodes > _MAX_NODES:
            return dict(_RECURSIVE)
        if "$ref" in schema:
            return self._follow(schema, trail)
        out = {key: self._value(key, value, trail) for key, value in schema.items() if key not in _DROPPED}
        out = {key: value for key, value in out.items() if isinstance(value, _KIND_OF.get(key, object))}
        if "const" in out:
            out["enum"] = [out.pop("const")]
        return _settle(out)

    def _follow(self, schema: Mapping[str, Any], trail: tuple[str, ...]) -> dict[str, Any]:
        ref = schema["$ref"]
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        if not isinstance(ref, str) or ref in trail or len(trail) >= _MAX_DEPTH:
            return self.walk(_RECURSIVE | beside, trail)
        target = self._target(ref)
        if not isinstance(target, Mapping):
            return self.walk(beside, trail)
        return self.walk({**target, **beside}, (*trail, ref))

    def _target(self, ref: str) -> Any:
        if ref != "#" and not ref.startswith("#/"):  # another document, or an anchor
            return None
        node: Any = self.root
        for part in unquote(ref[1:]).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
                node = node[int(part)]
            else:
                node = node.get(part) if isinstance(node, Mapping) else None
        return node

    def _value(self, key: str, value: Any, trail: tuple[str, ...]) -> Any:
        if key in _NAMED and isinstance(value, Mapping):
            return {name: self.walk(item, trail) for name, item in value.items()}
        if (key in _MANY or key == "items") and isinstance(value, list):
            return [self.walk(item, trail) for item in value]
        if key in _ONE and not isinstance(value, bool):
            return self.walk(value, trail)
        return {} if key == "items" else value


def _settle(node: dict[str, Any]) -> dict[str, Any]:
    """Collapse unions with null and single alternatives, then fill in the type."""
    types = node.get("type")
    if isinstance(types, list):
        left = [t for t in types if t != "null"]
        if len(left) < len(types) and left:
            node["nullable"] = True
        if len(left) <= 1:
            node["type"] = left[0] if left else "null"
        else:
            del node["type"]
            node.setdefault("anyOf", [{"type": t} for t in left])
    for key in ("anyOf", "oneOf", "allOf"):
        _collapse(node, key)
    values = node.get("enum")
    if isinstance(values, list) and None in values and len(values) > 1:
        node["enum"] = [v for v in values if v is not None]
        node["nullable"] = True
    if "type" not in node:
        if isinstance(node.get("properties"), dict):
            node["type"] = "object"
        elif isinstance(values, list) and (kinds := {_TYPE_OF.get(type(v)) for v in node["enum"]}) and len(kinds) == 1:
            if kind := kinds.pop():
                node["type"] = kind
        elif "items" in node:
            node["type"] = "array"
    if "properties" in node:
        _prune_required(node)
    return node


def _collapse(node: dict[str, Any], key: str) -> None:
    options = node.get(key)
    if not isinstance(options, list):
        return
    left = [o for o in options if o.get("type") != "null"] if key != "allOf" else options
    if left and len(left) < len(options):
        node["nullable"] = True
    if len(left) == 1:
        del node[key]
        for name, value in left[0].items():
            node.setdefault(name, value)
    elif left:
        node[key] = left


def _prune_required(node: dict[str, Any]) -> None:
    required, known = node.pop("required", None), node.get("properties")
    if isinstance(required, list) and isinstance(known, Mapping):
        kept = [name for name in dict.fromkeys(r for r in required if isinstance(r, str)) if name in known]
        if kept:
            node["required"] = kept


# --- arguments ---------------------------------------------------------------------------------------------------


def argument_problem(schema_json: str, arguments: Mapping[str, Any]) -> str | None:
    """What a JSON schema has against the arguments, in one line, or None.

    A schema that is itself broken, or refers to something that cannot be had, accepts everything: its server decides.
    """
    if (problem := json_problem(arguments)) is not None:
        return problem
    if '"$ref"' in schema_json and deeper_than(arguments, _MAX_RECURSIVE_DEPTH):  # time may double with each level
        return f"the arguments are nested more than {_MAX_RECURSIVE_DEPTH} levels deep"
    try:
        return _schema_problem(_validator(schema_json), arguments)
    except Exception:  # boundary: a foreign schema may hold any regex, reference or type
        return None


def _schema_problem(validator: Any, arguments: Mapping[str, Any]) -> str | None:
    from jsonschema.exceptions import best_match

    error = best_match(validator.iter_errors(arguments)) if validator is not None else None
    if error is None:
        return None
    if error.validator == "required":
        missing = [name for name in error.validator_value if name not in error.instance]
        return f"missing required argument{'s'[: len(missing) > 1]}: {', '.join(map(str, missing))}{_where(error.absolute_path)}"
    message = " ".join(str(error.message).split())
    return f"{message[:300]}{_where(error.absolute_path)}"


def json_problem(arguments: Mapping[str, Any]) -> str | None:
    """Why arguments cannot be sent as JSON, in one line, or None."""
    if deeper_than(arguments, MAX_ARGUMENT_DEPTH):
        return f"the arguments are nested more than {MAX_ARGUMENT_DEPTH} levels deep"
    try:
        json.dumps(arguments, allow_nan=False)
    except (ValueError, TypeError):
        return "the arguments hold a value that JSON cannot carry (NaN, Infinity, or a number of thousands of digits)"
    return None


def deeper_than(value: Any, levels: int) -> bool:
    """Whether JSON data has lists or objects nested in more than so many levels."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return False
    return levels == 0 or any(deeper_than(item, levels - 1) for item in value)


def _where(path: Iterable[str | int]) -> str:
    steps = list(path)
    return f" (at {'.'.join(map(str, steps))})" if steps else ""


@lru_cache(maxsize=1024)
def _validator(schema_json: str) -> Any:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    schema = json.loads(schema_json)
    cls = validator_for(schema, default=Draft202012Validator)
    try:
        cls.check_schema(schema)
    except SchemaError:
        return None
    return cls(schema, registry=Registry())  # an empty registry: no reference is fetched
