"""Tool calls in the stream."""

from __future__ import annotations

from kldtui.spans import call_tokens
from kldtui.vocab import from_pieces

PIECES = [b"Say ", "漢".encode(), b' {"na', b'me": "f", "arguments"', b': {"a": 1}', b"}", b" done"]


def test_tokens_of_a_call_are_found_with_other_scripts_before_it() -> None:
    vocab = from_pieces(dict(enumerate(PIECES)), "test")
    inside = call_tokens(vocab, range(len(PIECES)))
    assert inside.tolist() == [False, False, True, True, True, True, False]


def test_text_without_calls_has_none() -> None:
    vocab = from_pieces(dict(enumerate(PIECES)), "test")
    assert not call_tokens(vocab, [0, 1, 6]).any()
    assert call_tokens(vocab, []).tolist() == []
