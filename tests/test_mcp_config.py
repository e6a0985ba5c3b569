"""From the JSON of a desktop client to server specs: what is read, what is refused, and that no secret shows."""

from __future__ import annotations

import json
import logging
import pickle
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arenarl.errors import ConfigError
from arenarl.mcp import ServerSpec, load_mcp_config
from arenarl.mcp.config_file import plain_json
from arenarl.mcp.profiles import PROFILES, find_profile

SECRET = "s3cr3t-value"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One variable with a secret, one that is not set; the episode's names set to what no episode may see."""
    monkeypatch.setenv("ARENARL_TEST_TOKEN", SECRET)
    monkeypatch.delenv("ARENARL_UNSET", raising=False)
    for name in ("WORKDIR", "SEED", "EPISODE"):
        monkeypatch.setenv(name, "of the trainer")


def spec(**entry: Any) -> ServerSpec:
    """The one server of a configuration with this entry."""
    (only,) = load_mcp_config({"mcpServers": {"s": {"command": "prog", **entry}}})
    return only


def remote(**entry: Any) -> ServerSpec:
    (only,) = load_mcp_config({"mcpServers": {"s": {"url": "https://h/mcp", **entry}}})
    return only


def own(**block: Any) -> ServerSpec:
    return spec(**{"x-env": block})


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def program(path: Path) -> Path:
    written(path, "#!/bin/sh\n").chmod(stat.S_IRWXU)
    return path


# --- the file ----------------------------------------------------------------------------------------------------

COMMENTED = """\ufeff// servers of the project
{
  "servers": {
    /* two lines,
       "not": "read" */
    "web": {"type": "http", "url": "https://h/mcp"}, // a URL holds the sign of a comment
    "files": {"command": "prog", "args": ["a // b", "/* c */", ",]", "\\"//"],},
  },
}
"""


def test_comments_and_trailing_commas_are_allowed_outside_of_strings(tmp_path: Path):
    web, files = load_mcp_config(written(tmp_path / "mcp.json", COMMENTED))
    assert (web.name, web.transport, web.url) == ("web", "http", "https://h/mcp")
    assert files.args == ("a // b", "/* c */", ",]", '"//')


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("[1, // x\n2]", "[1,     \n2]"),
        ("/* a\nb */{}", "    \n    {}"),
        ("[1, /* c */ ]", "[1          ]"),
        ('{"a": 1,\n}', '{"a": 1 \n}'),
        ("[,]", "[,]"),
        ("[1,,]", "[1,,]"),
        ('["\\\\", /**/ 1]', '["\\\\",      1]'),
    ],
)
def test_what_goes_becomes_blanks_in_its_place(text: str, plain: str):
    assert plain_json(text) == plain


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('/*,]}{["\\ a\n')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('/*,]}" a')), inner),
)


@given(VALUES, st.sampled_from([None, 2]))
def test_plain_json_stays_as_it_is(value: Any, indent: int | None):
    text = json.dumps(value, indent=indent)
    assert plain_json(text) == text


@given(VALUES, st.text(st.sampled_from('/,"{}[] a*')), st.text(st.sampled_from('/,"{}[] a\n')))
def test_comments_change_neither_the_value_nor_any_place(value: Any, line: str, block: str):
    text = json.dumps(value, indent=2)
    for comment in (f"//{line}\n", f"/*{block}*/"):
        commented = re.sub(r"(?m)^(?=[ \]}])|\Z", lambda _, comment=comment: comment, text)
        plain = plain_json(commented)
        assert json.loads(plain) == value
        assert [len(part) for part in plain.split("\n")] == [len(part) for part in commented.split("\n")]


def test_the_line_of_a_mistake_is_the_line_of_the_file(tmp_path: Path):
    text = '// one\n/* two\nthree */\n{"mcpServers": {"s": \n{"command": nope}}}\n'
    with pytest.raises(ConfigError, match=r"mcp\.json' is not JSON: .*line 5 column 13"):
        load_mcp_config(written(tmp_path / "mcp.json", text))


BAD_FILES = [
    ("[]", "must be a JSON object; write"),
    ("{", "is not JSON"),
    ('{"mcpServers": {"s": {"command": "a"}, "s": {"command": "b"}}}', "the key 's' stands twice"),
    ("{}", r'names no server; write {"mcpServers"'),
    ('{"mcpservers": {}}', "names no server; 'mcpservers' is not read"),
    ('{"mcpServers": []}', "'mcpServers' of the MCP configuration must be an object"),
    ('{"mcpServers": {"s": {"command": "a", "disabled": true}}}', "every server .* is .disabled"),
    ('{"mcpServers": {"s": {"command": "a"}}, "servers": {"s": {"command": "a"}}}', "'s' is named in 'mcpServers' and"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_mcp_config(written(tmp_path / "mcp.json", text))


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nothing\.json' cannot be read: No such file"):
        load_mcp_config(tmp_path / "nothing.json")


def test_both_top_keys_are_read_and_foreign_ones_named(caplog: pytest.LogCaptureFixture):
    data = {"inputs": [], "mcpServers": {"a": {"command": "x"}}, "servers": {"b": {"command": "y"}}}
    assert [s.name for s in load_mcp_config(data)] == ["a", "b"]
    assert [r.getMessage() for r in caplog.records if "ignored: inputs" in r.getMessage()]


# --- entries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "transport"),
    [
        ({"command": "p"}, "stdio"),
        ({"type": "stdio", "command": "p"}, "stdio"),
        ({"url": "http://h/mcp"}, "http"),
        ({"serverUrl": "http://h/mcp"}, "http"),
        ({"httpUrl": "http://h/mcp"}, "http"),
        ({"type": "http", "url": "http://h/sse"}, "http"),
        ({"transport": "streamable-http", "url": "http://h"}, "http"),
        ({"type": "streamableHttp", "url": "http://h"}, "http"),
        ({"url": "http://h/sse"}, "sse"),
        ({"url": "http://h/sse/?k=1"}, "sse"),
        ({"url": "http://h/sse/mcp"}, "http"),
        ({"type": "sse", "transport": "sse", "url": "http://h/x"}, "sse"),
    ],
)
def test_the_transport_is_named_or_follows(entry: dict[str, Any], transport: str):
    (only,) = load_mcp_config({"servers": {"s": entry}})
    assert (only.transport, only.url is not None) == (transport, transport != "stdio")


def test_the_fields_of_an_entry_arrive():
    stdio = spec(args=["-v"], env={"K": "v"}, cwd="/tmp", description=None)
    assert stdio == ServerSpec(name="s", command="prog", args=("-v",), env={"K": "v"}, cwd="/tmp")
    assert remote(headers={"A": "b"}) == ServerSpec(name="s", transport="http", url="https://h/mcp", headers={"A": "b"})


def test_a_disabled_server_is_left_out_and_said(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "arenarl")
    data = {"mcpServers": {"off": {"command": "a", "disabled": True}, "on": {"command": "b", "disabled": False}}}
    assert [s.name for s in load_mcp_config(data)] == ["on"]
    assert "'off' is disabled" in caplog.text


def test_foreign_keys_are_one_warning(caplog: pytest.LogCaptureFixture):
    spec(autoApprove=[], alwaysAllow=[SECRET], timeout=5000, arg=["x"])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and SECRET not in record.getMessage()
    for part in ("'s'", "autoApprove", "alwaysAllow", "arg (did you mean args?)", "x-env.limits, in seconds"):
        assert part in record.getMessage()


@pytest.mark.parametrize(
    ("command", "args", "says"),
    [
        ("npx", ["-y", "@scope/pkg"], "@scope/pkg@VERSION"),
        ("npx", ["-y", "pkg@latest", "."], "pkg@VERSION"),
        ("npx", ["-y", "pkg@1.2.3"], None),
        ("npx", ["-y", "@scope/pkg@1.2.3"], None),
        ("npx", ["--package", "pkg@1", "program"], None),
        ("npx", ["-p", "pkg", "program"], "pkg@VERSION"),
        ("/usr/bin/npx", ["pkg"], "pkg@VERSION"),
        ("uvx", ["pkg"], "pkg==VERSION"),
        ("uvx", ["pkg==1.2", "--flag"], None),
        ("uvx", ["pkg@1.2"], None),
        ("uvx", ["--python", "3.12", "--from=pkg", "program"], "pkg==VERSION"),
        ("uvx", ["-p", "3.12", "pkg==1"], None),
        ("npx", ["./local"], None),
        ("node", ["pkg"], None),
        ("npx", [], None),
    ],
)
def test_a_package_without_a_version_is_a_warning(command: str, args: list[str], says: str | None, caplog):
    spec(command=command, args=args)
    assert (says in caplog.text) if says else not caplog.records


# --- variables and places ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("${ARENARL_TEST_TOKEN}", SECRET),
        ("${env:ARENARL_TEST_TOKEN}!", f"{SECRET}!"),
        ("${ARENARL_UNSET:-d e}", "d e"),
        ("${ARENARL_UNSET:-}", ""),
        ("${ARENARL_TEST_TOKEN:-d}", SECRET),
        ("$ARENARL_TEST_TOKEN $5", "$ARENARL_TEST_TOKEN $5"),
        ("${WORKDIR}/a", "/w/a"),
        ("${SEED}-${EPISODE}", "7-e"),
    ],
)
@pytest.mark.usefixtures("environment")
def test_variables_are_filled_in_at_launch(text: str, filled: str):
    made = spec(args=[text], env={"K": text})
    assert made.args == (text,) and made.env == {"K": text}
    launch = made.launch({"WORKDIR": "/w", "SEED": "7", "EPISODE": "e"})
    assert (launch.args, launch.env) == ((filled,), {"K": filled})


@pytest.mark.usefixtures("environment")
def test_an_episodes_variable_never_comes_from_the_environment():
    with pytest.raises(ConfigError, match=r"args\[0\] needs the episode's WORKDIR"):
        spec(args=["${WORKDIR}"]).launch()


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        ({"command": "${ARENARL_UNSET}"}, "command"),
        ({"args": ["a", "${ARENARL_UNSET}"]}, r"args\[1\]"),
        ({"env": {"K": "${env:ARENARL_UNSET}"}}, r"env\['K'\]"),
        ({"cwd": "${ARENARL_UNSET}"}, "cwd"),
        ({"envFile": "${ARENARL_UNSET}"}, "env_file"),
    ],
)
@pytest.mark.usefixtures("environment")
def test_an_unset_variable_is_refused_at_load(entry: dict[str, Any], field: str):
    with pytest.raises(ConfigError, match=rf"server 's': {field} needs the environment variable ARENARL_UNSET; set it"):
        spec(**entry)


@pytest.mark.usefixtures("environment")
def test_an_unset_variable_of_a_remote_server_is_refused_at_load():
    with pytest.raises(ConfigError, match=r"headers\['A'\] needs the environment variable ARENARL_UNSET"):
        remote(headers={"A": "Bearer ${ARENARL_UNSET}"})
    assert remote(url="${ARENARL_UNSET:-http://d}/mcp").launch().url == "http://d/mcp"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${input:key}", r"server 's': args\[0\] asks a person for \$\{input:key\}; write \$\{VAR\}"),
        ("${command:x}", r"args\[0\] has a placeholder that is not"),
        ("${A:-${B}}", r"args\[0\] has a placeholder that is not"),
        ("${}", r"args\[0\] has a placeholder that is not"),
    ],
)
def test_other_placeholders_are_refused(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        spec(args=[text])


@pytest.mark.parametrize("folder", [".", ".vscode", ".cursor"])
def test_places_are_relative_to_the_project(tmp_path: Path, folder: str):
    entries = {
        "plain": {"command": "./run.sh", "args": ["${workspaceFolder}/a", "${userHome}"]},
        "moved": {"command": "./run.sh", "cwd": "sub"},
        "own": {"command": "run", "cwd": "${WORKDIR}"},
        "named": {"command": "run", "args": ["${WORKDIR}"]},
        "pooled": {"command": "run", "x-env": {"scope": "pool"}},
        "far": {"url": "http://h"},
    }
    plain, moved, private, *placeless = load_mcp_config(
        written(tmp_path / folder / "mcp.json", json.dumps({"servers": entries}))
    )
    root = str(tmp_path)
    assert (plain.command, plain.cwd, plain.args) == (f"{root}/run.sh", root, (f"{root}/a", str(Path.home())))
    assert (moved.command, moved.cwd, private.cwd) == ("./run.sh", f"{root}/sub", "${WORKDIR}")
    assert [one.cwd for one in placeless] == [None, None, None]


# --- secrets -----------------------------------------------------------------------------------------------------

ENV_FILE = f"""# secrets
export A={SECRET}
B = "two words"

C='it''s'
D=
K=from the file
"""


@pytest.mark.usefixtures("environment")
def test_values_of_the_environment_are_in_no_repr_pickle_or_fingerprint(monkeypatch: pytest.MonkeyPatch):
    made = spec(args=["--key=${ARENARL_TEST_TOKEN}"], env={"T": "${ARENARL_TEST_TOKEN}"}, cwd="/${ARENARL_TEST_TOKEN}")
    far = remote(url="https://h/${ARENARL_TEST_TOKEN}", headers={"A": "Bearer ${ARENARL_TEST_TOKEN}"})
    assert made.launch().args == (f"--key={SECRET}",) and far.launch().headers == {"A": f"Bearer {SECRET}"}
    before = made.fingerprint, far.fingerprint
    for one in (made, far):
        assert SECRET not in repr(one) + repr(one.launch()) and SECRET.encode() not in pickle.dumps(one)
        assert pickle.loads(pickle.dumps(one)) == one and hash(pickle.loads(pickle.dumps(one))) == hash(one)
    monkeypatch.setenv("ARENARL_TEST_TOKEN", "another")
    assert (made.fingerprint, far.fingerprint) == before


def test_an_env_file_is_read_at_launch_only(tmp_path: Path):
    file = written(tmp_path / ".env", ENV_FILE)
    path = written(
        tmp_path / "mcp.json", json.dumps({"servers": {"s": {"command": "p", "envFile": ".env", "env": {"K": "v"}}}})
    )
    (made,) = load_mcp_config(path)
    assert made.env_file == str(file)
    assert SECRET not in repr(made) and SECRET.encode() not in pickle.dumps(made)
    assert made.launch().env == {"A": SECRET, "B": "two words", "C": "it''s", "D": "", "K": "v"}
    file.write_text("A=later\n")
    assert made.launch().env == {"A": "later", "K": "v"}


@pytest.mark.parametrize("line", ["NOVALUE", "=x", f"A B={SECRET}", f"A=\0{SECRET}"])
def test_a_bad_line_of_an_env_file_is_refused_without_its_value(tmp_path: Path, line: str):
    file = written(tmp_path / "e", f"A=1\n{line}\n")
    with pytest.raises(ConfigError, match=r"server 's': env_file '.*', line 2 is not KEY=VALUE") as caught:
        spec(envFile=str(file))
    assert SECRET not in str(caught.value)


def test_a_missing_env_file_is_refused_at_load(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"env_file '.*none' cannot be read: No such file"):
        spec(envFile=str(tmp_path / "none"))


def test_literal_secrets_are_masked_in_repr():
    assert (
        repr(spec(env={"K": SECRET}))
        == "ServerSpec(name='s', command='prog', env={'K': '***'}, reset='respawn', max_calls=1)"
    )
    shown = repr(remote(url=f"https://u:{SECRET}@h/mcp?key={SECRET}", headers={"A": SECRET}))
    assert SECRET not in shown and "https://***@h/mcp?***" in shown and "'A': '***'" in shown


@pytest.mark.parametrize(
    "entry",
    [
        {"env": {"K": f"{SECRET}\0"}},
        {"env": {"K": f"{SECRET}${{"}},
        {"env": {"K": [SECRET]}},
        {"env": [SECRET]},
        {"env": {"": SECRET}},
        {"env": {"K": f"{SECRET}${{input:x}}"}},
        {"env": {"K": SECRET}, "x-env": {"scoop": SECRET}},
        {"env": {"K": SECRET}, "timeouts": SECRET},
        {"env": {"K": SECRET}, "headers": {"A": SECRET}},
        {"env": {"K": SECRET}, "x-env": {"profile": "no such"}},
    ],
)
def test_no_message_holds_a_secret(entry: dict[str, Any], caplog: pytest.LogCaptureFixture):
    try:
        said = repr(spec(**entry))
    except ConfigError as error:
        said = str(error)
    assert said and SECRET not in said + caplog.text


def test_an_entry_that_is_no_object_is_refused_without_showing_it():
    with pytest.raises(ConfigError, match=r"server 's' must be an object with .*, not str") as caught:
        load_mcp_config({"mcpServers": {"s": SECRET}})
    assert SECRET not in str(caught.value)


def test_the_fingerprint_follows_what_decides_the_answers():
    one = ServerSpec(name="s", command="p", args=("a",), env={"K": "v"})
    same = ServerSpec(name="other", command="p", args=("a",), env={"K": "v"}, call_timeout=5, scope="pool")
    others = [
        ServerSpec(name="s", command="p", args=("b",), env={"K": "v"}),
        ServerSpec(name="s", command="p", args=("a",), env={"K": "w"}),
        ServerSpec(name="s", command="p", args=("a",), env={"K": "v"}, cwd="/"),
        ServerSpec(name="s", transport="inproc", factory=lambda: None),
    ]
    assert one.fingerprint == same.fingerprint
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == 5
    assert re.fullmatch(r"[0-9a-f]{64}", one.fingerprint)
    again = ServerSpec(name="s", transport="inproc", factory=lambda: None)
    assert again != others[-1] and again.fingerprint == others[-1].fingerprint


# --- x-env -------------------------------------------------------------------------------------------------------


def test_every_key_of_our_block_arrives():
    limits = {
        "start_timeout": 1.5,
        "call_timeout": 2,
        "close_grace": 0.1,
        "max_message_bytes": 9,
        "max_calls": 3,
        "max_uses": 4,
    }
    made = own(
        scope="pool", reset="tool", reset_tool="clear", allow=["a", "b"], deny=["b"], cache_tools=["a"],
        trust_annotations=True, era="auto", limits=limits,
    )  # fmt: skip
    assert made == ServerSpec(
        name="s", command="prog", scope="pool", reset="tool", reset_tool="clear", allow=("a", "b"), deny=("b",),
        cache_tools=("a",), trust_annotations=True, era="auto", **limits,
    )  # fmt: skip


BAD_ENTRIES = [
    ({"x-env": {"scop": "pool"}}, "server 's': x-env has the unknown key 'scop'; did you mean 'scope'"),
    ({"x-env": {"zzz": 1}}, "x-env has the unknown key 'zzz'; known are scope, reset"),
    (
        {"x-env": {"limits": {"call_timout": 1}}},
        r"x-env\.limits has the unknown key 'call_timout'; did you mean 'call_timeout'",
    ),
    ({"x-env": {"call_timeout": 1}}, r"x-env has the unknown key 'call_timeout'; it belongs in x-env\.limits"),
    ({"x-env": {"limits": {"scope": "pool"}}}, r"x-env\.limits has the unknown key 'scope'; it belongs in x-env"),
    ({"x-env": []}, r"x-env and x-env\.limits must be objects"),
    ({"x-env": {"limits": 5}}, r"x-env and x-env\.limits must be objects"),
    ({"scope": "shared"}, "'scope' stands beside the command; it belongs in x-env"),
    ({"call_timeout": 5}, r"'call_timeout' stands beside the command; it belongs in x-env\.limits"),
    ({"x-env": {"scope": "group"}}, "scope='group' is refused; use one of episode, pool, shared"),
    ({"x-env": {"reset": "files"}}, "reset='files' is refused; scope 'episode' can have respawn"),
    ({"x-env": {"limits": {"max_calls": 1.5}}}, r"max_calls=1\.5 is refused; give a positive whole number"),
    ({"x-env": {"limits": {"call_timeout": 0}}}, "call_timeout=0 is refused; give a positive number of seconds"),
    ({"x-env": {"limits": {"call_timeout": "5"}}}, "call_timeout='5' is refused"),
    ({"x-env": {"allow": "a"}}, "allow='a' is refused; give a list of strings"),
    ({"x-env": {"deny": [1]}}, r"deny=\[1\] is refused; give a list of strings"),
    ({"x-env": {"trust_annotations": "yes"}}, "trust_annotations='yes' is refused; use true or false"),
    ({"x-env": {"era": "old"}}, "era='old' is refused; use one of auto, legacy, 2026-07-28"),
    (
        {"x-env": {"profile": "filesytem"}},
        r"server 's': x-env\.profile 'filesytem' is unknown; did you mean 'filesystem'",
    ),
    ({"x-env": {"profile": ["git"]}}, r"x-env\.profile \['git'\] is unknown"),
    ({"args": "--flag"}, "args='--flag' is refused; give a list of strings"),
    ({"args": [5]}, r"args=\[5\] is refused"),
    ({"command": ""}, "command='' is refused; transport 'stdio' needs a command"),
    ({"url": "http://h"}, "transport='stdio' is refused; it takes no url"),
    ({"headers": {"a": "b"}}, "transport='stdio' is refused; it takes no headers"),
    ({"type": "http"}, "transport='http' is refused; it takes no command"),
    ({"type": "ws"}, "type='ws' is unknown; use one of stdio, http"),
    ({"type": []}, r"type=\[\] is unknown"),
    ({"type": "stdio", "transport": "sse"}, "type and transport differ"),
    ({"disabled": "no"}, "disabled must be true or false"),
]


@pytest.mark.parametrize(("entry", "message"), BAD_ENTRIES)
def test_a_bad_entry_is_refused_by_name(entry: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        spec(**entry)


BAD_SPECS = [
    ({}, "command=None is refused; transport 'stdio' needs a command"),
    ({"command": "c", "factory": print}, "it takes no factory"),
    ({"transport": "inproc"}, "needs a factory"),
    ({"transport": "inproc", "factory": "no_colon"}, "module:function"),
    ({"transport": "inproc", "factory": print, "command": "c"}, "it takes no command"),
    ({"transport": "http"}, "transport 'http' needs a url"),
    ({"transport": "http", "url": "u", "env_file": "f"}, "it takes no env_file"),
    ({"transport": "tcp"}, "use one of stdio, http, sse, inproc"),
    ({"command": "c", "env": {"K": "a\0b"}}, r"env\['K'\]='\*\*\*'"),
    ({"command": "c", "env": {"A=B": "x"}}, r"env='\*\*\*' is refused; give an object whose keys are names"),
    ({"command": "c", "args": 5}, "args=5 is refused; give a list of strings"),
    ({"command": "c", "reset": "tool"}, "scope 'episode' can have respawn"),
    ({"command": "c", "scope": "pool", "reset": "tool"}, "reset='tool' needs a reset_tool"),
    ({"command": "c", "reset_tool": "x"}, "reset='tool' needs a reset_tool, and nothing else does"),
    ({"command": "c", "args": ["${WORKDIR}"], "scope": "shared"}, r"outlives the episode and cannot have its \$\{WORKDIR\}"),
    ({"command": "c", "args": ["${SEED}"], "scope": "pool"}, r"outlives the episode and cannot have its \$\{SEED\}"),
    ({"command": "c", "args": ["${EPISODE}"], "scope": "pool", "reset": "respawn"}, r"cannot have its \$\{EPISODE\}"),
    ({"transport": "http", "url": "u", "scope": "pool"}, "transport 'http' has no files here; use 'tool' or 'respawn'"),
    ({"command": "c", "max_uses": True}, "max_uses=True is refused"),
    ({"command": "c", "start_timeout": float("inf")}, "start_timeout=inf is refused"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "message"), BAD_SPECS)
def test_a_bad_spec_is_refused(values: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        ServerSpec(name="s", **values)


@pytest.mark.parametrize(
    ("scope", "reset", "calls"), [("episode", "respawn", 1), ("pool", "files", 1), ("shared", "none", 16)]
)
def test_what_is_not_said_follows_from_the_scope(scope: Any, reset: str, calls: int):
    made = ServerSpec(name="s", command="c", scope=scope)
    assert (made.reset, made.max_calls) == (reset, calls)


# --- profiles ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_makes_a_spec(name: str):
    profile, made = find_profile(name), own(profile=name)
    assert (made.scope, made.reset, made.cache_tools) == (profile.scope, profile.reset, profile.cache_tools)
    assert (dict(made.env), made.cwd) == (dict(profile.env), profile.cwd)
    assert own(profile=name, scope="episode").reset == "respawn"


def test_profiles_know_what_makes_a_server_repeatable():
    git, memory = find_profile("git"), find_profile("memory")
    assert git.env["GIT_AUTHOR_DATE"] == git.env["GIT_COMMITTER_DATE"] == "2026-01-01T00:00:00 +0000"
    assert memory.env == {"MEMORY_FILE_PATH": "${WORKDIR}/memory.jsonl"}
    assert "git_commit" not in git.cache_tools and "create_entities" not in memory.cache_tools
    assert find_profile("time").scope == "shared" and not find_profile("time").cache_tools


def test_what_the_entry_says_wins_over_its_profile():
    made = spec(
        env={"GIT_AUTHOR_NAME": "Me", "X": "y"},
        cwd="/r",
        **{"x-env": {"profile": "git", "cache_tools": [], "reset": "respawn"}},
    )
    assert (made.env["GIT_AUTHOR_NAME"], made.env["GIT_COMMITTER_NAME"], made.env["X"]) == ("Me", "Agent", "y")
    assert (made.scope, made.reset, made.cache_tools, made.cwd) == ("pool", "respawn", (), "/r")
    assert own(profile="git", scope="shared").reset == "none"
    assert own(profile="filesystem", reset="tool", reset_tool="clear").reset_tool == "clear"
    assert remote(**{"x-env": {"profile": "time"}}).scope == "shared"


def test_a_profile_of_another_name_is_refused():
    with pytest.raises(ConfigError, match="profile 'zzz' is unknown; known are filesystem, memory"):
        find_profile("zzz")


# --- virtual environments ----------------------------------------------------------------------------------------


def test_a_command_is_taken_from_its_virtual_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/only/here")
    server = program(tmp_path / "env" / "bin" / "serve")
    entry = {"command": "serve", "x-env": {"venv": "env"}}
    (made,) = load_mcp_config(written(tmp_path / "mcp.json", json.dumps({"mcpServers": {"s": entry}})))
    assert made.command == str(server)
    expected = {"VIRTUAL_ENV": str(tmp_path / "env"), "PATH": f"{tmp_path}/env/bin:/only/here"}
    assert made.launch().env == expected
    kept = spec(command="/bin/sh", env={"PATH": "/p"}, **{"x-env": {"venv": str(tmp_path / "env")}})
    assert (kept.command, kept.launch().env["PATH"]) == ("/bin/sh", f"{tmp_path}/env/bin:/p")


def test_a_missing_virtual_environment_or_command_is_refused(tmp_path: Path):
    program(tmp_path / "bin" / "serve")
    written(tmp_path / "bin" / "no-program", "")
    with pytest.raises(
        ConfigError, match=r"x-env\.venv='.*none' is no virtual environment; '.*none/bin' does not exist"
    ):
        own(venv=str(tmp_path / "none"))
    for command in ("absent", "no-program"):
        with pytest.raises(
            ConfigError, match=f"server 's': there is no command '{command}' in '.*bin'; install it there"
        ):
            spec(command=command, **{"x-env": {"venv": str(tmp_path)}})
    with pytest.raises(ConfigError, match=r"x-env\.venv=5 is no virtual environment"):
        own(venv=5)
    with pytest.raises(ConfigError, match=r"x-env\.venv is for a server with a command"):
        remote(**{"x-env": {"venv": str(tmp_path)}})


def test_a_server_in_the_trainers_own_environment_is_a_warning(caplog: pytest.LogCaptureFixture):
    load_mcp_config({"mcpServers": {"mine": {"command": sys.executable}, "theirs": {"command": "sh"}}})
    assert [record.getMessage() for record in caplog.records] == [
        "MCP server 'mine' runs in the trainer's own environment; give it another one with x-env.venv"
    ]
