"""Replies of model judges: what is a verdict, and what is not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arenarl.errors import ConfigError
from arenarl.judge_prompt import reply_schema
from arenarl.judge_reply import MAX_CHARS, read_mark, read_verdict
from arenarl.judge_rubrics import RUBRICS, Part, Rubric, load_rubric
from arenarl.types import Abstention, Mark, Verdict
from tests.judging import A_MARKS, B_MARKS, RESEARCH, TRAVEL, reply_text, reply_value

GOOD = reply_text()
KINDS = {
    "truncated", "too_long", "no_json", "bad_json", "two_objects", "extra_text", "nan", "duplicate_key", "missing",
    "not_a_number", "out_of_range",
}  # fmt: skip


def read(text: str, finish_reason: str = "stop") -> Verdict | Abstention:
    return read_verdict(text, finish_reason, TRAVEL)


def changed(mark: object) -> str:
    """The good reply with another first mark of A, written as JSON text."""
    return GOOD.replace('"breadth": 8', f'"breadth": {mark}')


def test_travel_scores_are_the_weighted_sums_worked_by_hand():
    verdict = read(GOOD)
    assert (verdict.score_a, verdict.score_b) == pytest.approx((6.6, 6.2))
    assert verdict.dimensions["path/breadth"] == (8, 3)
    assert verdict.dimensions["answer/clarity"] == (4, 9)
    assert tuple(verdict.dimensions) == TRAVEL.dimensions and verdict.raw == GOOD


def test_research_weighs_path_and_answer_alike():
    # A 0.5 * mean(6, 6, 9) + 0.5 * mean(4, 5, 5, 6) = 6.0; B 0.5 * 1 + 0.5 * 2.5 = 1.75
    text = reply_text(RESEARCH, (6, 6, 9, 4, 5, 5, 6), (1, 1, 1, 2.5, 2.5, 2.5, 2.5))
    verdict = read_verdict(text, "stop", RESEARCH)
    assert (verdict.score_a, verdict.score_b) == pytest.approx((6.0, 1.75))


def test_the_mark_of_one_attempt_is_its_weighted_sum():
    assert read_mark(reply_text(TRAVEL, A_MARKS), "stop", TRAVEL) == Mark(score=pytest.approx(6.6))


def test_a_mark_that_is_not_there_is_no_mark():
    assert read_mark("{}", "stop", TRAVEL) == Abstention(reason="missing: path/marks/A/breadth", raw="{}")


ACCEPTED = {
    "bare": GOOD,
    "white space": f"\n  {GOOD}\n",
    "pretty": json.dumps(reply_value(), indent=2),
    "fenced": f"```json\n{GOOD}\n```",
    "fence without a language": f"```\n{GOOD}\n```",
    "fence on one line": f"```JSON {GOOD}```",
    "thought": f"<think>A {{is}} better. </think>\n{GOOD}",
    "thought that the template opened": f"A is better.\n</think>\n\n{GOOD}",
    "thought and fence": f"<think></think>```json\n{GOOD}\n```",
    "a fence in a comment": GOOD.replace("fine", "```json", 1),
    "a thought's end in a comment": GOOD.replace("fine", "</think>", 1),
    "winner and totals, which we ignore": f'{GOOD[:-1]}, "winner": "B", "total": {{"A": 1, "B": 99}}}}',
    "no comments": json.dumps({part: {"marks": value["marks"]} for part, value in reply_value().items()}),
    "decimals": changed("8.0"),
}


@pytest.mark.parametrize("text", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted(text):
    verdict = read(text)
    assert (verdict.score_a, verdict.score_b) == pytest.approx((6.6, 6.2))


REFUSED = {
    "": "no_json: ",
    "Both are good, but A is better: 8 to 7.": "no_json: ",
    f"Here is my verdict: {GOOD}": "no_json: ",
    f"[{GOOD}]": "no_json: ",
    f"<think>A is better. {GOOD}": "no_json: ",
    GOOD + GOOD: "two_objects: ",
    f"```json\n{GOOD}\n```\n```json\n{GOOD}\n```": "two_objects: ",
    f"{GOOD}\nSo A wins.": "extra_text: 'So A wins.'",
    GOOD[:-1]: "bad_json: ",
    GOOD.replace('"', "'"): "bad_json: ",
    GOOD[:-1] + ",}": "bad_json: ",
    f"```json\n{GOOD}": "no_json: ",
    changed("NaN"): "nan: NaN",
    changed("-Infinity"): "nan: -Infinity",
    changed("1e999"): "nan: 1e999",
    changed(11): "out_of_range: path/marks/A/breadth is 11",
    changed(10.001): "out_of_range: path/marks/A/breadth is 10.001",
    changed(-1): "out_of_range: path/marks/A/breadth is -1",
    changed('"8"'): "not_a_number: path/marks/A/breadth is '8'",
    changed('"8/10"'): "not_a_number: path/marks/A/breadth is '8/10'",
    changed("8/10"): "bad_json: ",
    changed("true"): "not_a_number: path/marks/A/breadth is a bool",
    changed("null"): "not_a_number: path/marks/A/breadth is a NoneType",
    changed("[8]"): "not_a_number: path/marks/A/breadth is a list",
    changed('8, "breadth": 9'): "duplicate_key: 'breadth'",
    GOOD.replace('"clarity": 9', '"clarty": 9'): "missing: answer/marks/B/clarity",
    GOOD.replace('"B"', '"b"'): "missing: path/marks/B/breadth",
    reply_text(TRAVEL, A_MARKS): "missing: path/marks/B/breadth",
    '{"path": 7, "answer": 7}': "missing: path/marks/A/breadth",
    changed("9" * 5000): "bad_json: ",
    '{"path": ' * 20_000: "bad_json: it is nested too deeply",
    "[" * 100_000: "no_json: ",
    changed("[" * 90_000): "bad_json: it is nested too deeply",
    "{" + '"a": 1,' * 20_000: "bad_json: ",
    GOOD + " " * MAX_CHARS: "too_long: ",
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.items(), ids=[text[:30] for text in REFUSED])
def test_refused(text, reason):
    result = read(text)
    assert isinstance(result, Abstention) and result.reason.startswith(reason)
    assert result.kind in KINDS and len(result.reason) < 300 and result.raw == text[:MAX_CHARS]


def test_a_reply_that_was_cut_is_none_even_if_it_can_be_read():
    assert read(GOOD, "length").kind == "truncated"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["path", "marks", "A", "breadth"]), inner),
    max_leaves=8,
)  # fmt: skip

fragments = st.lists(st.sampled_from([GOOD, "```", "<think>", "</think>", "{", "}", "x"])).map("".join)


@given(st.text() | json_values.map(json.dumps) | fragments)
def test_whatever_is_written_is_a_verdict_in_range_or_a_reason(text):
    result = read(text)
    if isinstance(result, Verdict):
        assert 0 <= result.score_a <= 10 and 0 <= result.score_b <= 10
    else:
        assert result.kind in KINDS


@given(st.lists(st.floats(0, 10), min_size=14, max_size=14))
def test_swapped_marks_swap_the_scores(marks):
    one, other = read(reply_text(TRAVEL, marks[:7], marks[7:])), read(reply_text(TRAVEL, marks[7:], marks[:7]))
    assert (one.score_a, one.score_b) == (other.score_b, other.score_a)


@pytest.mark.parametrize("rubric", ["travel", "research"])
def test_a_rubric_has_the_same_dimensions_and_weights_in_both_languages(rubric):
    en, zh = RUBRICS[rubric]["en"], RUBRICS[rubric]["zh"]
    assert en.dimensions == zh.dimensions and len(en.dimensions) == 7
    assert [part.weight for part in en.parts] == [part.weight for part in zh.parts]


def test_the_schema_admits_the_good_reply_and_none_that_we_would_refuse():
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(reply_schema(TRAVEL, "AB"))
    assert validator.is_valid(reply_value())
    for bad in (11, -1, "8", True, None):
        assert not validator.is_valid(reply_value(TRAVEL, (bad, *A_MARKS[1:]), B_MARKS))
    assert not validator.is_valid(reply_value() | {"winner": "A"})
    assert list(reply_value()["path"]) == list(reply_schema(TRAVEL, "AB")["properties"]["path"]["properties"])


def test_a_rubric_of_ones_own_from_a_file(tmp_path):
    part = {"name": "answer", "weight": 1, "text": "Mark it.", "dimensions": {"order": "Tidy.", "wit": "Funny."}}
    (tmp_path / "own.json").write_text(json.dumps({"name": "own", "parts": [part]}))
    rubric = load_rubric(tmp_path / "own.json")
    assert rubric.score({"answer/order": 3, "answer/wit": 8}) == 5.5
    assert load_rubric(rubric) is rubric


def test_what_is_no_rubric_is_refused_with_the_remedy(tmp_path):
    path = tmp_path / "own.json"
    bad = [
        '{"name": "x"}',
        "[]",
        "{",
        '{"name": "x", "parts": [{"nam": "a"}]}',
        '{"name": "x", "parts": [], "more": 1}',
    ]
    for text in bad:
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"own\.json"):
            load_rubric(path)
    for name in ("tavel", tmp_path / "none.json"):
        with pytest.raises(ConfigError, match="rubric"):
            load_rubric(name)
    with pytest.raises(ConfigError, match="language='fr'"):
        load_rubric("travel", "fr")


def part(name: str = "a", weight: float = 1.0, **dimensions: str) -> Part:
    return Part(name=name, weight=weight, text="", dimensions=dimensions)


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ((part(x="t", weight=0.5),), "add up"),
        ((part("a", 2.0, x="t"), part("b", -1.0, x="t")), "positive"),
        ((part("a", 0.5, x="t"), part("a", 0.5, x="t")), "twice"),
        ((part(),), "dimensions"),
        ((part("a b", x="t"),), "'a b'"),
        ((part(**{"x/y": "t"}),), "'x/y'"),
        ((part(x="t", weight=float("nan")),), "add up"),
    ],
)
def test_a_rubric_that_cannot_be_scored_is_refused(parts, match):
    with pytest.raises(ConfigError, match=match):
        Rubric(name="r", parts=parts)
