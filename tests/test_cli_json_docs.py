"""docs/json.md: each name that `--json` prints is documented, and each documented one printed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kldtui.cli import cli
from tests.builders import make_logits, make_stream, write_kld
from tests.builders_served import REF, ROOT, server, write_served
from tests.fake_server import EOG
from tests.test_answers import choice, samples_at
from tests.ui.review import open_review

DOCS = Path(__file__).parents[1] / "docs" / "json.md"
NAME = r"[a-z][a-z0-9_]*"


def printed(*words: str | Path) -> Any:
    done = CliRunner().invoke(cli, [*map(str, words), "--json"], prog_name="kldtui")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def names_in(value: Any) -> Iterator[str]:
    """Names of all objects in it, at any depth; numbers as names (percentiles) apart."""
    if isinstance(value, dict):
        yield from (name for name in value if re.fullmatch(NAME, name))
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from names_in(each)


def section(command: str) -> str:
    text = DOCS.read_text("utf-8").split(f"\n## `kldtui {command} ")[1]
    return text.split("\n", 1)[1].split("\n## ")[0]


def documented(command: str) -> set[str]:
    """Names in the first column of its tables: `a`, `b` and `…_error` is four of them."""
    names = set()
    for row in re.findall(r"^\| (.*?) \|", section(command), re.MULTILINE):
        own = re.findall(rf"`({NAME})`", row)
        names |= {*own, *(name + end for name in own for end in re.findall(r"`…(_\w+)`", row))}
    return names


def mentioned(command: str) -> set[str]:
    """Names anywhere in its section, with the ends (`…_low`) that it says they may have."""
    text = section(command)
    names = set(re.findall(NAME, " ".join(re.findall(r"`([^`]*)`", text))))
    ends = re.findall(r"`…(_\w+)`", text)
    return names | {name + end for name in names for end in ends}


def of_pairs(folder: Path) -> dict[str, Any]:
    """Two whole recordings, and a run of the quant: then KLDs are bounds."""
    stream = make_stream(3, 8, 16)
    ref = write_kld(folder / "ref.kld", stream, make_logits(stream, 1))
    quant = write_kld(folder / "quant.kld", stream, make_logits(stream, 2))
    run = folder / "q.gguf-run"
    words = ["record", "convert", str(quant), "-o", str(run), "--top-n", "3"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    both = (ref, "--quant", quant, "--quant", run)
    return {
        "stats": printed("stats", *both),
        "flips": printed("flips", *both),
        "inspect": printed("inspect", ref),
        "cache list": printed("cache", "list"),
    }


def of_answers(folder: Path) -> dict[str, Any]:
    base = samples_at(folder / "b", "arc", [choice(i, 0, 0) for i in range(4)])
    quant = samples_at(folder / "q", "arc", [choice(i, 0, int(i == 2)) for i in range(4)])
    return {"answers": printed("answers", base, quant, "--list")}


def of_labels(folder: Path) -> dict[str, Any]:
    session = open_review(folder)
    for _ in session.index.scan():
        pass
    root = next(i for i in range(session.index.layout.n) if session.flips(i))
    session.set_label(session.facts(root, 0), "1", "order")
    session.close()
    found = printed("labels", folder / "labels.json")
    for each in found:
        each["classes"] = {}  # names of classes, which docs/labels.md has
    return {"labels": found}


def of_a_floor(folder: Path) -> dict[str, Any]:
    ref, quant = write_served(folder)
    with server(REF, [*b"ok", EOG]).in_thread() as one, server(REF, [*b"ok", EOG]).in_thread() as b:
        where = ("--ref-server", one.url, "--against", b.url, "--roots", "1", "-n", "4")
        found = printed("floor", ref, "--quant", quant, *where)
    for engine in ("engine", "against"):
        assert {"verify", "dictionary"} <= set(found[engine])
        found[engine] = None  # docs/branch-json.md has its names
    return {"floor": found}


def test_names_of_a_branch_are_documented(tmp_path: Path) -> None:
    ref, quant = write_served(tmp_path)
    with server(REF, [*b"ok", EOG]).in_thread() as one:
        where = ("--root", ROOT, "--ref-server", one.url, "-n", "4")
        data = printed("branch", ref, "--quant", quant, *where)
    for each in data["arms"]:
        each["settings"] = each["server"]["details"] = None  # the engine's own names
    texts = [(DOCS.parent / name).read_text("utf-8") for name in ("branch-json.md", "labels.md")]
    code = " ".join(re.findall(r"`([^`\n]*)`", " ".join(texts)))
    known = set(re.findall(NAME, code))
    known |= {name.removesuffix("_id") + "_text" for name in known}
    assert set(names_in(data)) - known == set()


@pytest.mark.parametrize("make", [of_pairs, of_answers, of_labels, of_a_floor])
def test_names_are_documented_and_what_is_documented_is_there(
    tmp_path: Path, make: Callable[[Path], dict[str, Any]]
) -> None:
    for command, value in make(tmp_path).items():
        assert set(names_in(value)) - mentioned(command) == set(), command
        assert documented(command) - set(names_in(value)) == set(), command
