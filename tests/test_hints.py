"""Tool calls in raw text: where one closes, and what does not parse (a guess, never a label)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kldtui.hints import closes_at, find_calls, hint

PROMPT = "User: weather?\nAssistant: "
CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


def test_the_call_of_case_20_does_not_parse() -> None:
    found = hint("", '{"name":"read_file","arguments":"{')
    assert found is not None
    assert found.kind == "does_not_parse"
    assert found.words.startswith("does not parse")
    assert found.to_json() == {"kind": "does_not_parse", "words": found.words}


def test_a_call_that_was_only_cut_is_said_not_to_parse_so_far() -> None:
    found = hint("", '{"name":"read_file","arguments":"{', complete=False)
    assert found is not None
    assert "so far" in found.words


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "arguments": {"a": 1,}}',
        '{"name": "f", "arguments": {"a": "b}}',
        '{"name": "f", "arguments": {a: 1}}',
        '{"name": "f", "arguments": {"a": "x\ny"}}',
        "<tool_call>\n{'name': 'f'}\n</tool_call>".replace("'name'", '"name"'),
        '<tool_call>{"name": "f", "arguments": {]}</tool_call>',
        '{"name": "f", "arguments": "not json"}',
        '{"name": "f", "arguments": "[1]"}',
    ],
)
def test_malformed_calls_are_hinted_at(text: str) -> None:
    assert hint(PROMPT, text) is not None


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        '{"name": "f", "arguments": "{\\"a\\": 1}"}',
        '{"type": "function", "function": {"name": "f", "arguments": {}}}',
        '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
        "<tool_call>" + CALL + "</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>1</parameter>\n</function>\n</tool_call>",
        "void f() { return; } and {braces} and “quotes",
        'It sent {"city": "Paris"',
        "<think>a { b</think> plain words",
    ],
)
def test_what_is_well_formed_or_no_call_gets_no_hint(text: str) -> None:
    assert hint(PROMPT, text) is None


def test_a_call_that_opened_in_the_prefix_is_judged_as_a_whole() -> None:
    assert hint(PROMPT + '{"name": "f", ', '"arguments": {"a": }}') is not None
    assert hint(PROMPT + '{"name": "f", ', '"arguments": {"a": 1}}') is None


def test_faults_of_the_prefix_alone_are_not_the_branchs() -> None:
    assert hint('{"name": "f", "arguments": {,}}\n', "fine") is None


@pytest.mark.parametrize(
    ("before", "text", "end"),
    [
        ("", CALL + " more", len(CALL)),
        (CALL[:20], CALL[20:] + "x", len(CALL)),
        (CALL + "\n", "and so on", None),
        ("<tool_call>", CALL, None),
        ("<tool_call>", CALL + "</tool_call>\n", len("<tool_call></tool_call>") + len(CALL)),
        ("", "[" + CALL, None),
        ("", "[" + CALL + ", " + CALL + "]", len(CALL) * 2 + 4),
        ("", '{"city": "Paris"} {"a": {"b": 1}}', None),
        ("", 'if (x) { y = "}"; }', None),
        ("", '{"name": "f", "arguments": {"code": "if (a) { b }"}', None),
        ("", '{"name": "f", "arguments": {"code": "say \\"}}\\" "}}', 51),
        ("", '{"name":"f","arguments":"{\n' + CALL, 28 + len(CALL) - 1),
    ],
)
def test_where_a_call_closes(before: str, text: str, end: int | None) -> None:
    assert closes_at(before + text, len(before)) == end


def test_talk_about_a_tag_opens_no_call_of_its_own() -> None:
    text = "Answer within <tool_call> tags.\n<tool_call>" + CALL + "</tool_call>"
    assert hint("", text) is None
    assert find_calls(text)[0].body == CALL


@pytest.mark.parametrize("arguments", ["[1]", "5", "null", "true", '"[1]"'])
def test_arguments_that_are_no_object_are_a_fault(arguments: str) -> None:
    found = hint("", '{"name": "f", "arguments": ' + arguments + "}")
    assert found is not None
    assert found.kind == "arguments_do_not_parse"
    assert "no object" in found.words


NAMES = st.text(st.characters(codec="utf-8"), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=80)
@given(st.dictionaries(NAMES, JSON, max_size=3), st.data())
def test_any_well_formed_call_closes_exactly_at_its_end(
    arguments: dict[str, object], data: st.DataObject
) -> None:
    call = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
    cut = data.draw(st.integers(0, len(call) - 1))
    assert closes_at(call + " tail", cut) == len(call)
    assert hint(call[:cut], call[cut:]) is None


@settings(deadline=None, max_examples=150)
@given(st.text(alphabet='{}[]"\\:,name argumts<tol_c>/\n', max_size=60), st.booleans())
def test_no_text_is_too_odd(text: str, complete: bool) -> None:
    hint("", text, complete=complete)
    end = closes_at(text, 0)
    assert end is None or 0 < end <= len(text)
