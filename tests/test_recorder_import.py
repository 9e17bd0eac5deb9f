"""`record import`: logged conversations as they happened, and only what the model wrote scored."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kldtui.engines.llama_server import LlamaServer
from kldtui.recorder.prompts import PromptFileError
from kldtui.recorder.trace import Conversation, read_trace
from kldtui.recorder.turns import Reader, TurnChunk, to_score
from tests.builders_recorder import call, chatml, quant_server, said, text_of

TOOLS = [{"type": "function", "function": {"name": "weather"}}]
ASKED = said("user", "Paris?")
CALLED = said(
    "assistant", None, tool_calls=[call("weather", '{"city":"Paris"}')], reasoning_content="ask it"
)
AGENT = (
    said("system", "Help."),
    said("user", "2+2?"),
    said("assistant", "Four.", reasoning_content="easy"),
    ASKED,
    CALLED,
    said("tool", "sunny", tool_call_id="c1"),
    said("assistant", "It is sunny.", reasoning_content="so"),
    said("user", "Thanks"),
    said("assistant", "Welcome."),
)
Template = Callable[[dict[str, Any]], str]


async def read(
    *messages: dict[str, Any],
    template: Template = chatml,
    passed: dict[str, Any] | None = None,
    **server: Any,
) -> tuple[list[TurnChunk], list[str]]:
    async with quant_server(template=template, n_ctx=4096, **server) as fake:
        engine = LlamaServer(fake.url)
        await engine.connect()
        reader = Reader(engine, await engine.end_ids() or frozenset())
        found = await reader.chunks(Conversation(1, messages, passed or {}))
        await engine.close()
    return found, reader.warnings


def written(chunk: TurnChunk) -> list[str]:
    return [text_of(chunk.tokens[a:b]) for a, b in chunk.turns]


def tagged(chunk: TurnChunk) -> list[tuple[str, str]]:
    return [(name, text_of(chunk.tokens[a:b])) for name, a, b in chunk.tags]


# ── what the model wrote ─────────────────────────────────────────────────────────────────────


async def test_each_turn_is_what_the_model_wrote_on_top_of_its_prompt() -> None:
    (chunk,), warnings = await read(
        said("system", "Help."),
        said("user", "Hi"),
        said("assistant", "Hello."),
        said("user", "Bye"),
        said("assistant", "Ciao."),
    )
    assert written(chunk) == ["Hello.</s>", "Ciao.</s>"]
    assert text_of(chunk.tokens[: chunk.turns[0][0]]) == (
        "<s>system\nHelp.</s>\n<s>user\nHi</s>\n<s>assistant\n"
    )
    assert text_of(chunk.tokens).endswith("<s>user\nBye</s>\n<s>assistant\nCiao.</s>")
    assert warnings == []
    assert tagged(chunk) == [
        ("system", "<s>system\nHelp.</s>\n"),
        ("user", "<s>user\nHi</s>\n"),
        ("assistant", "Hello.</s>"),
        ("user", "\n<s>user\nBye</s>\n"),
        ("assistant", "Ciao.</s>"),
    ]


async def test_thinking_answer_and_calls_are_told_apart() -> None:
    (chunk,), warnings = await read(
        ASKED,
        {**CALLED, "content": "Let me look."},
        said("tool", "sunny", tool_call_id="c1"),
        said("assistant", "It is sunny."),
        passed={"tools": TOOLS},
    )
    assert warnings == []
    assert tagged(chunk) == [
        ("user", "<s>tools 1</s>\n<s>user\nParis?</s>\n"),
        ("thinking", "<think>ask it</think>\n"),
        ("assistant", "Let me look."),
        ("call", '<call>{"name":"weather","arguments":{"city":"Paris"}}</s>'),
        ("tool", "\n<s>tool\nsunny</s>\n"),
        ("assistant", "It is sunny.</s>"),
    ]
    assert len(chunk.turns) == 2


async def test_where_history_is_rewritten_a_turn_is_a_chunk_of_its_own() -> None:
    found, warnings = await read(*AGENT)
    assert [written(chunk) for chunk in found] == [
        ["<think>easy</think>\nFour.</s>"],
        [
            '<think>ask it</think>\n<call>{"name":"weather","arguments":{"city":"Paris"}}</s>',
            "<think>so</think>\nIt is sunny.</s>",
        ],
        ["Welcome.</s>"],
    ]
    assert [chunk.messages for chunk in found] == [(0, 2), (0, 6), (0, 8)]
    assert warnings == []
    assert "easy" not in text_of(found[1].tokens), "as it was: the template had dropped it"
    last = tagged(found[2])
    assert last == [
        ("system", "<s>system\nHelp.</s>\n"),
        ("user", "<s>user\n2+2?</s>\n"),
        ("assistant", "<s>assistant\nFour.</s>"),
        ("user", "\n<s>user\nParis?</s>\n"),
        ("assistant", '<s>assistant\n<call>{"name":"weather","arguments":{"city":"Paris"}}</s>'),
        ("tool", "\n<s>tool\nsunny</s>"),
        ("assistant", "\n<s>assistant\nIt is sunny.</s>"),
        ("user", "\n<s>user\nThanks</s>\n"),
        ("assistant", "Welcome.</s>"),
    ]


async def test_a_template_that_keeps_thinking_makes_one_chunk() -> None:
    (chunk,), warnings = await read(*AGENT, template=partial(chatml, forgets=False))
    assert len(chunk.turns) == 4
    assert warnings == []


async def test_a_template_in_which_roles_must_alternate() -> None:
    (chunk,), warnings = await read(
        said("user", "Hi"),
        said("assistant", "Hello."),
        said("user", "Bye"),
        said("assistant", "Ciao."),
        template=partial(chatml, alternates=True),
    )
    assert written(chunk) == ["Hello.</s>", "Ciao.</s>"]
    assert warnings == []


async def test_words_that_look_like_ends_or_tags_are_only_words() -> None:
    (chunk,), _ = await read(
        said("user", "What is <think> and <call>?"),
        said("assistant", "<think>no</think> <s assistant"),
        said("user", "ok"),
        said("assistant", "<call>"),
    )
    assert [name for name, _ in tagged(chunk)] == ["user", "assistant", "user", "assistant"]


async def test_a_template_without_an_end_of_turn() -> None:
    def plain(body: dict[str, Any]) -> str:
        return chatml(body).replace("</s>\n", "\n")

    (chunk,), warnings = await read(
        said("user", "Hi"), said("assistant", "Hello."), said("user", "Bye"), template=plain
    )
    assert written(chunk) == ["Hello.\n"]
    assert warnings == []


async def test_a_prompt_whose_end_no_later_rendering_has() -> None:
    """As with thinking switched off: the prompt closes it, and the history does not say so."""

    def quick(body: dict[str, Any]) -> str:
        text = chatml(body)
        return text + "<think></think>\n" if text.endswith("<s>assistant\n") else text

    found, warnings = await read(
        said("user", "Hi"),
        said("assistant", "Hello."),
        said("user", "Bye"),
        said("assistant", "Ciao."),
        template=quick,
    )
    assert [written(chunk) for chunk in found] == [["Hello.</s>"], ["Ciao.</s>"]]
    assert text_of(found[0].tokens).endswith("<s>assistant\n<think></think>\nHello.</s>")
    assert all("that its rendering has not" in words for words in warnings)
    assert len(warnings) == 2


async def test_bos_is_there_once() -> None:
    (chunk,), _ = await read(
        said("user", "Hi"),
        said("assistant", "Hello."),
        add_bos=True,
        template=lambda body: chatml(body).replace("<s>", "."),
    )
    assert chunk.tokens[0] == 1
    assert chunk.tokens.count(1) == 1


# ── what cannot be had is said ───────────────────────────────────────────────────────────────


async def test_what_the_template_leaves_out_is_said() -> None:
    _, warnings = await read(ASKED, CALLED, template=partial(chatml, calls=False))
    assert warnings == ["line 1, message 1: the template leaves out the model's calls"]

    def blunt(body: dict[str, Any]) -> str:
        messages = [
            {k: v for k, v in m.items() if k != "reasoning_content"} for m in body["messages"]
        ]
        return chatml({**body, "messages": messages})

    _, warnings = await read(*AGENT[:3], template=blunt)
    assert warnings == ["line 1, message 2: the template leaves out what the model thought"]


async def test_tools_that_the_template_does_not_show_are_said() -> None:
    def toolless(body: dict[str, Any]) -> str:
        return chatml({name: value for name, value in body.items() if name != "tools"})

    tools = {"tools": TOOLS}
    said_so = ["line 1: the template leaves out the tools: the model is never shown them"]
    assert (await read(*AGENT[:3], template=toolless, passed=tools))[1] == said_so
    assert (await read(*AGENT[:3], passed=tools))[1] == []


async def test_a_second_answer_in_a_row_is_context_and_not_scored() -> None:
    (chunk,), warnings = await read(
        said("user", "Hi"),
        said("assistant", "Hello."),
        said("assistant", "Again."),
        said("user", "Bye"),
        said("assistant", "Ciao."),
    )
    assert written(chunk) == ["Hello.</s>", "Ciao.</s>"]
    assert warnings == ["line 1, message 2 is not scored: it goes on from another of its own"]
    assert "Again." in text_of(chunk.tokens)


async def test_a_template_that_refuses_is_said() -> None:
    def never(body: dict[str, Any]) -> str:
        raise ValueError("no")

    found, warnings = await read(said("user", "Hi"), said("assistant", "Hello."), template=never)
    assert found == []
    assert "the template refuses what comes before" in warnings[0]


# ── the stream ───────────────────────────────────────────────────────────────────────────────


async def test_only_what_was_written_is_scored_and_tools_and_tags_stay() -> None:
    found, _ = await read(*AGENT, passed={"tools": TOOLS})
    chunks, tools = to_score(found)
    assert tools == [TOOLS]
    for chunk, made in zip(chunks, found, strict=True):
        want = [t for a, b in made.turns for t in range(a, b)]
        assert chunk.ts.tolist() == want
        assert chunk.prompt_length == made.turns[0][0]
        assert chunk.fields["tools"] == 0
        assert chunk.fields["source"]["line"] == 1
        ends = np.array([stop for _, _, stop in chunk.fields["tags"]])
        assert (np.diff(ends) > 0).all(), "tags are in order"
        assert json.loads(json.dumps(chunk.fields)) == chunk.fields


# ── files ────────────────────────────────────────────────────────────────────────────────────

HI = [said("user", "Hi"), said("assistant", "Hello.")]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (json.dumps({"messages": HI}), [1]),
        (json.dumps({"messages": HI}, indent=1), [1]),
        (json.dumps(HI), [1]),
        (json.dumps([{"messages": HI}, {"messages": HI}]), [1, 1]),
        (json.dumps(HI) + "\n\n" + json.dumps({"messages": HI}), [1, 3]),
        (
            json.dumps(
                {"request": {"messages": HI[:1]}, "response": {"choices": [{"message": HI[1]}]}}
            ),
            [1],
        ),
        (json.dumps({"messages": HI[:1], "choices": [{"message": HI[1]}]}), [1]),
    ],
)
def test_conversations_are_read_however_they_were_logged(
    tmp_path: Path, text: str, lines: list[int]
) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    found = read_trace(path)
    assert [one.line for one in found] == lines
    assert all(list(one.messages) == HI for one in found)


def test_arguments_and_reasoning_take_the_form_that_templates_read(tmp_path: Path) -> None:
    message = said(
        "assistant", None, tool_calls=[call("f", {"city": "Köln"})], reasoning="hm", name=None
    )
    path = tmp_path / "trace"
    path.write_text(json.dumps({"messages": [HI[0], message], "tools": TOOLS, "temperature": 1}))
    (found,) = read_trace(path)
    assert found.passed == {"tools": TOOLS}
    read_back = found.messages[1]
    assert read_back["tool_calls"][0]["function"]["arguments"] == '{"city": "Köln"}'
    assert read_back["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no conversations"),
        ("{", "line 1: is no JSON"),
        ('{"messages": []}', "line 1: has no messages"),
        ('{"messages": [{"role": "user"}, 3]}', "line 1: has no messages"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "nothing in it was written by"),
        (json.dumps(HI) + "\n{]", "line 2: is no JSON"),
    ],
)
def test_what_is_wrong_with_a_trace_names_the_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(PromptFileError, match=words):
        read_trace(path)
