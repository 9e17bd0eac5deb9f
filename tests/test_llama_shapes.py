"""Answers and events of llama-server in every shape and cut: read right, or refused by name."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kldtui.engines.events import EventReader
from kldtui.engines.llama_shapes import align, read_part
from kldtui.errors import EngineBroke, UnusableEngine
from tests.fake_server import VOCABULARY, FakeLlama


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(sorted(VOCABULARY)), max_size=24))
def test_entries_find_their_tokens_whatever_is_cut_where(ids: list[int]) -> None:
    fake = FakeLlama(script=ids, prompt_length=1, n_ctx=99)
    body = {"prompt": [97], "n_predict": len(ids), "n_probs": 1}
    _, answer = fake._complete(body)
    part = read_part(answer)
    found = align(part.tokens, part.entries, VOCABULARY.__getitem__)
    assert [entry.id for entry in found if entry is not None] == [e.id for e in part.entries]
    assert all(
        entry is None or entry.id == id for id, entry in zip(part.tokens, found, strict=True)
    )


def entry(**fields: Any) -> dict[str, Any]:
    base = {"id": 5, "token": "x", "bytes": [120], "logprob": -0.5}
    base["top_logprobs"] = [dict(base)]
    return {"tokens": [5], "stop": False, "completion_probabilities": [base | fields]}


def test_a_log_probability_above_zero_is_refused() -> None:
    with pytest.raises(UnusableEngine, match=r"0\.83 as a log-probability"):
        read_part(entry(logprob=0.83))
    top = [{"id": 5, "token": "x", "bytes": [120], "logprob": 0.83}]
    with pytest.raises(UnusableEngine, match="cannot be above 0"):
        read_part(entry(top_logprobs=top))
    assert read_part(entry(logprob=1e-8)).entries[0].logp == 0.0


def test_speculative_decoding_is_recognised() -> None:
    with pytest.raises(UnusableEngine, match="speculative decoding"):
        read_part(entry(logprob=0.0, top_logprobs=[]))


def test_zero_probability_is_minus_infinity_and_nan_is_refused() -> None:
    top = [
        {"id": 7, "token": "y", "bytes": [121], "logprob": -3.4028234663852886e38},
        {"id": 6, "token": "z", "bytes": [122], "logprob": -1.0},
        {"id": 5, "token": "x", "bytes": [120], "logprob": -1.0},
        {"id": 8, "token": "w", "bytes": [119], "logprob": None},
    ]
    read = read_part(entry(top_logprobs=top)).entries[0].top
    assert [(c.id, c.logp) for c in read] == [
        (5, -1.0),
        (6, -1.0),
        (7, -math.inf),
        (8, -math.inf),
    ]
    with pytest.raises(UnusableEngine, match="NaN"):
        read_part(entry(logprob=math.nan))


@pytest.mark.parametrize(
    "event",
    [
        {"tokens": 5},
        {"completion_probabilities": [{"id": 5, "logprob": -1}]},
        {"completion_probabilities": ["x"]},
        {"completion_probabilities": [{"top_logprobs": [{"id": "a", "logprob": -1}]}]},
        {"timings": []},
        {"timings": 5},
    ],
)
def test_an_answer_of_no_known_shape_does_nothing_worse_than_break(event: dict[str, Any]) -> None:
    with contextlib.suppress(EngineBroke):
        read_part(event)


# ── events ───────────────────────────────────────────────────────────────────────────────────

EVENTS = [{"content": "美😀"}, {"content": "a\nb", "stop": False}, {"error": {"code": 1}}]
STREAM = (
    ': ping\n\ndata: {"content": "美😀"}\n\r\ndata:{"content": "a\\nb",\r\n'
    'data: "stop": false}\r\n\r\n: ping\n\nerror: {"code": 1}\n\ndata: [DONE]\n\n'
).encode()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    reader = EventReader()
    found = [e for a, b in itertools.pairwise(edges) for e in reader.feed(STREAM[a:b])]
    assert found + list(reader.close()) == EVENTS


def test_an_event_cut_by_the_end_is_dropped_and_a_whole_one_kept() -> None:
    reader = EventReader()
    assert list(reader.feed(b'data: {"a": 1}')) == []
    assert list(reader.close()) == [{"a": 1}]
    list(reader.feed(b'data: {"a": '))
    assert list(reader.close()) == []


def test_an_event_that_is_no_json_breaks_by_name() -> None:
    with pytest.raises(EngineBroke, match="no JSON"):
        list(EventReader().feed(b"data: <html>\n\n"))
