"""What `kldtui record` writes is what docs/run-format.md specifies."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
from click.testing import CliRunner

from kldtui.cli import cli
from tests.builders_recorder import chatml, own_pair, quant_server, reference, said, score_run

SCHEMA = json.loads((Path(__file__).parents[1] / "docs" / "run.schema.json").read_text())


def check(path: Path) -> int:
    """Validate each line; how many there are."""
    validator = jsonschema.Draft202012Validator(SCHEMA)
    lines = path.read_text("utf-8").splitlines()
    for line in lines:
        validator.validate(json.loads(line))
    return len(lines)


async def test_scores_and_rollouts_keep_to_the_schema(tmp_path: Path) -> None:
    ref = reference(tmp_path / "ref.kld")
    async with quant_server() as server:
        await score_run(server, ref, tmp_path / "q.run", whole=True)
    assert check(tmp_path / "q.run") > 40
    for path in await own_pair(tmp_path):
        assert check(path) > 20


def test_imports_keep_to_the_schema(tmp_path: Path) -> None:
    trace, run = tmp_path / "trace.json", tmp_path / "ref.run"
    messages = [said("user", "hi"), said("assistant", "Yo.", reasoning_content="so")]
    tools = [{"type": "function", "function": {"name": "f"}}]
    trace.write_text(json.dumps({"messages": messages, "tools": tools}))
    with quant_server(template=chatml, n_ctx=128).in_thread() as server:
        done = CliRunner().invoke(
            cli, ["record", "import", str(trace), "--server", server.url, "-o", str(run)]
        )
    assert done.exit_code == 0, done.stderr
    assert check(run) > 20
    chunk = json.loads(run.read_text("utf-8").splitlines()[1])
    assert [name for name, _, _ in chunk["tags"]] == ["user", "thinking", "assistant"]
    assert len(chunk["turns"]) == 1
