"""The filter language, and which roots are near ties: what a list is asked for and shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from kldtui.branching import RR, Branch, Place
from kldtui.errors import KldtuiError, LabelFileError, RecordingError
from kldtui.facts import brief_at
from kldtui.index import Index
from kldtui.position import Position
from kldtui.report import flip_rows, pair_stats
from kldtui.review.listing import Filter, parse_filter
from kldtui.review.session import Session
from kldtui.roots import RootQuery, Thresholds
from kldtui.vocab import NONE
from tests.builders import make_stream, write_kld
from tests.builders_index import scan_all
from tests.builders_run import CHUNK, HEADER, raw_run
from tests.ui.review import open_review, write_pair

NAMES = ("a", "my quant", "my quant 2", "near", "q4(1)")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "words", ["", "near", "chunk:3 cost>0.5 label:2 the end", "nofloor branched kld>0.1"]
)
def test_a_filter_that_is_described_is_read_again_whatever_the_quants_name(
    name: str, words: str
) -> None:
    wanted = parse_filter(f"{words} quant:{name}", NAMES)
    assert wanted.quant == name
    assert parse_filter(wanted.describe(), NAMES) == wanted


@pytest.mark.parametrize("word", ["chunk:²", "chunk:", "chunk:" + "9" * 5000])
def test_what_is_no_chunk_number_is_said_to_be_none(word: str) -> None:
    with pytest.raises(KldtuiError, match="is not a chunk"):
        parse_filter(word)


@pytest.mark.parametrize("words", ["chunk:2 chunk:3", "near far", "label:1 label:2", "ties moved"])
def test_words_that_cannot_both_hold_are_refused(words: str) -> None:
    first, second = words.split()
    with pytest.raises(KldtuiError, match=f"{first} and {second} cannot both hold"):
        parse_filter(words)


def lists_of_one(folder: Path) -> Index:
    """Two runs of the best token alone: a flip, an agreement, a flip whose cost is not known."""
    lines = [("ref", [4, 4, 4]), ("quant", [5, 4, 6])]
    paths = []
    for name, best in lines:
        rows = [
            {"chunk": 0, "t": t, "token": CHUNK["tokens"][t], "top": [[token, -1.0]]}
            for t, token in zip((1, 2, 3), best, strict=True)
        ]
        if name == "ref":
            rows[0]["top"] = [[4, -1.0], [5, -1.1]]
        paths.append(raw_run(folder / name, [HEADER, CHUNK, *rows]))
    session = Session.open(paths[0], [("quant", paths[1])])
    return scan_all(session.index)


def test_only_roots_whose_cost_is_known_to_be_small_are_near_ties(tmp_path: Path) -> None:
    index = lists_of_one(tmp_path)
    thresholds = Thresholds(0.3)
    briefs = [brief_at(index, i, 0, thresholds) for i in range(3)]
    assert [brief.near_tie for brief in briefs] == [True, False, False]
    assert briefs[2].cost < 0.3
    stats = pair_stats(index, 0, thresholds)
    assert (stats.roots, stats.near_ties) == (2, 1)
    found = flip_rows(index, ["quant"], lambda p: 9, RootQuery(), thresholds, NONE)
    assert [row.near_tie for row in found] == [True, False]


def test_near_and_far_part_the_roots(tmp_path: Path) -> None:
    ref = lists_of_one(tmp_path).layout.n
    session = Session.open(tmp_path / "ref", [("quant", tmp_path / "quant")], near_tie=0.3)
    scan_all(session.index)
    assert ref == session.index.layout.n
    assert session.listed(parse_filter("near"), "position").tolist() == [0]
    assert session.listed(parse_filter("far"), "position").tolist() == [2]
    assert session.listed(Filter(), "queue").tolist()[-1] == 0  # near ties after all others
    evidence = [session.evidence(session.facts(i, 0))["near_tie"] for i in range(3)]
    assert evidence == [True, False, False]


def test_roots_that_the_floor_flips_too_and_those_that_it_does_not(tmp_path: Path) -> None:
    session = open_review(tmp_path, ("q4",), floor=write_pair(tmp_path)[2])
    scan_all(session.index)
    every = session.listed(Filter(), "position").tolist()
    also = session.listed(parse_filter("floor"), "position").tolist()
    only = session.listed(parse_filter("nofloor"), "position").tolist()
    assert [str(session.position(i)) for i in also] == ["c0:t13"]
    assert sorted(also + only) == every


def test_roots_with_branches_are_found_wherever_these_are_kept(tmp_path: Path) -> None:
    session = open_review(tmp_path, ("q4", "q8"))
    scan_all(session.index)
    assert session.listed(parse_filter("branched"), "position").tolist() == []
    for name, t in (("q4", 10), ("q8", 13)):
        place = session.place(Position(0, t), session.names.index(name))
        session.remember(made_at(place, name))
    session.set_label(session.facts_of(Position(0, 10), 0), "1", "hand")
    session.close()
    again = open_review(tmp_path, ("q4", "q8"))
    scan_all(again.index)
    again.remember(made_at(again.place(Position(0, 13), 1), "q8"))

    def found(words: str) -> list[str]:
        return [str(again.position(i)) for i in again.listed(parse_filter(words), "position")]

    assert found("branched") == ["c0:t10", "c0:t13"]
    assert found("branched quant:q4") == ["c0:t10"]
    assert found("branched unlabelled") == ["c0:t13"]


def made_at(place: Place, quant: str) -> Branch:
    """A short branch of the ref token."""
    return Branch(
        position=place.position,
        arm=RR,
        quant=quant,
        start_id=place.starts["ref"],
        start_data=b"x",
        prefix_ids=[0],
        stop="eog",
    )


def test_labels_of_quants_that_are_not_open_are_not_counted(tmp_path: Path) -> None:
    session = open_review(tmp_path, ("q4", "q8"))
    scan_all(session.index)
    for k in (0, 1):
        session.set_label(session.facts_of(Position(0, 13), k), "1", "hand")
    session.count_anew()
    assert session.labelled() == (2, 5)
    session.close()
    alone = open_review(tmp_path, ("q8",))
    scan_all(alone.index)
    alone.count_anew()
    assert alone.labelled() == (1, 1)


def test_a_recording_without_chunks_is_not_reviewed(tmp_path: Path) -> None:
    path = write_kld(tmp_path / "none.kld", make_stream(0, 8, 4))
    with pytest.raises(RecordingError, match=r"none\.kld: holds no chunks"):
        Session.open(path, [("q", path)])


def test_of_recordings_that_do_not_go_together_none_stays_open(tmp_path: Path) -> None:
    ref, *_ = write_pair(tmp_path)
    other = write_kld(tmp_path / "other.kld", make_stream(2, 8, 4))
    before = len(list(Path("/dev/fd").iterdir()))
    with pytest.raises(KldtuiError):
        Session.open(ref, [("q4", tmp_path / "q4.kld"), ("other", other)])
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_of_a_review_whose_vocabulary_cannot_be_read_nothing_stays_open(tmp_path: Path) -> None:
    ref, q4, _ = write_pair(tmp_path)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    before = len(list(Path("/dev/fd").iterdir()))
    with pytest.raises(KldtuiError):
        Session.open(ref, [("q4", q4)], tokenizer=broken)
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_the_index_is_closed_though_labels_cannot_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_review(tmp_path)
    closed: list[bool] = []
    monkeypatch.setattr(session.index, "close", lambda: closed.append(True))
    assert session.labels is not None

    def refuse() -> None:
        raise LabelFileError("no room")

    monkeypatch.setattr(session.labels, "close", refuse)
    with pytest.raises(LabelFileError):
        session.close()
    assert closed == [True]
