"""Which server a saved answer is from, by its fields; and what is known but of no use.

Knows: how to tell the kinds apart, and how the events of a stream are put together.
Must not know: what the kinds' fields mean, references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kldtui.errors import (
    DamagedRecording,
    NotARecording,
    RecordingError,
    UnsupportedRecording,
)
from kldtui.recordings.foreign import llama_completion, openai, sglang, vllm
from kldtui.recordings.foreign.answer import Answer, AnswerError, Gathered, Unusable
from kldtui.recordings.foreign.objects import Object, read_objects
from kldtui.recordings.run_lines import shown

READ = (
    "a .kld file of llama-perplexity, a kldtui-run, or saved answers of llama-server, vLLM, "
    "SGLang or an OpenAI API"
)

Fields = dict[str, Any]
_Reader = Callable[[Fields, Fields, int, Gathered], list[Answer]]


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    is_kind: Callable[[Fields], bool]
    read: _Reader


_KINDS = (
    _Kind("vllm", vllm.is_kind, vllm.read),
    _Kind("sglang", sglang.is_kind, sglang.read),
    _Kind("llama", llama_completion.is_kind, llama_completion.read),
    _Kind("openai", openai.is_kind, openai.read),
)

_NO_IDS = "run the model with llama-server instead, and record it: kldtui record score"


def _has(*names: str) -> Callable[[Fields], bool]:
    return lambda answer: all(name in answer for name in names)


_REFUSED: tuple[tuple[Callable[[Fields], bool], str], ...] = (
    (_has("doc_id", "resps"), "answers of lm-evaluation-harness: kldtui answers reads them"),
    (_has("results", "configs"), "results of lm-evaluation-harness, without log-probabilities"),
    (_has("added_tokens", "model"), "a tokenizer.json: give it as --tokenizer"),
    (_has("model_info", "stats"), f"an answer of LM Studio, which gives no ids: {_NO_IDS}"),
    (_has("done", "created_at"), f"an answer of Ollama, which gives no ids: {_NO_IDS}"),
    (_has("generated_text"), f"an answer of Text Generation Inference: {_NO_IDS}"),
    (_has("candidates", "usageMetadata"), "an answer of Gemini, which gives no ids of tokens"),
    (
        lambda answer: answer.get("object") == "response" and "output" in answer,
        "an answer of OpenAI's Responses API: ask with chat completions and top_logprobs",
    ),
    (
        lambda answer: answer.get("type") == "message" and "content" in answer,
        "an answer of Anthropic's API, which gives no log-probabilities",
    ),
    (
        lambda answer: str(answer.get("format", "")).startswith("kldtui-"),
        "a file of kldtui's own, but no recording",
    ),
    (
        _has("arm", "start_id", "prefix_ids"),
        "a file of branches, not a recording: give it as --branches, to review them",
    ),
)  # fmt: skip


@dataclass
class ForeignFile:
    """What was read of a file: its answers, and what they bring along. format: of the first."""

    path: Path
    format: str
    answers: list[Answer]
    gathered: Gathered
    problems: list[str]


def read_file(path: Path) -> ForeignFile:
    """Read all answers of a file.

    Raises NotARecording, UnsupportedRecording naming a kind that is known but of no use,
    DamagedRecording naming the line, RecordingError where the file cannot be read.
    """
    problems: list[str] = []
    gathered = Gathered()
    answers: list[Answer] = []
    unusable: list[str] = []
    errors: list[str] = []
    name, line = "", 1
    try:
        for one, kind in _whole_answers(path, problems, errors):
            line = one.line
            name = name or _format(kind.name, one.answer)
            try:
                answers += kind.read(one.answer, one.request, line, gathered)
            except Unusable as error:
                unusable.append(f"line {line}: {error}")
    except AnswerError as error:
        raise DamagedRecording(f"{path}: line {line}: {error}; record it again") from None
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise DamagedRecording(
            f"{path}: line {line} or behind it: laid out as no server does it "
            f"({type(error).__name__}); record it again"
        ) from None
    if not answers:
        raise _nothing(path, unusable, errors)
    for words, bad in (("answers of no use", unusable), ("errors of the server", errors)):
        if bad:
            problems.append(f"{len(bad):,} {words}; the first: {bad[0]}")
    problems += [f"{count:,} {words}" for words, count in sorted(gathered.counts.items()) if count]
    return ForeignFile(path, name, answers, gathered, problems)


def _format(kind: str, answer: Fields) -> str:
    if kind == "openai":
        return openai.format_of(answer)
    return {"llama": llama_completion.FORMAT, "vllm": vllm.FORMAT, "sglang": sglang.FORMAT}[kind]


def _nothing(path: Path, unusable: list[str], errors: list[str]) -> RecordingError:
    if unusable:
        return UnsupportedRecording(f"{path}: {unusable[0]}")
    if errors:
        return NotARecording(f"{path}: holds only an error of a server: {errors[0]}")
    return NotARecording(f"{path}: holds no answers; kldtui reads {READ}")


def _whole_answers(
    path: Path, problems: list[str], errors: list[str]
) -> Iterator[tuple[Object, _Kind]]:
    """Each answer with its kind, the events of a stream put together."""
    parts: list[Object] = []
    held: _Kind | None = None
    for one in read_objects(path, problems):
        if one.answer.get("choices") == []:  # the last event of some streams: usage alone
            parts += [one] if parts else []
            continue
        if _is_error(one.answer):
            errors.append(_error_words(one.answer["error"]))
            continue
        kind = _kind_of(path, one)
        if parts and held is not None and (kind is not held or not _goes_on(held, parts, one)):
            yield _joined(held, parts), held
            parts = []
        more = kind.name == "llama" and llama_completion.is_part(one.answer)
        if more or (kind.name == "openai" and (parts or openai.is_part(one.answer))):
            parts.append(one)
        elif parts:
            yield _joined(kind, [*parts, one]), kind
            parts = []
        else:
            yield one, kind
        held = kind
    if parts and held is not None:
        events = [part.answer for part in parts]
        if held.name == "llama" or not openai.ends(events):
            problems.append(f"the stream of line {parts[0].line} does not end")
        yield _joined(held, parts), held


def _goes_on(kind: _Kind, parts: list[Object], one: Object) -> bool:
    """Whether an object belongs to the events that came before it."""
    if kind.name == "openai":
        before = parts[-1].answer.get("id")
        same = before is not None and before == one.answer.get("id")
        return same or not openai.ends([part.answer for part in parts])
    return True


def _joined(kind: _Kind, parts: list[Object]) -> Object:
    merge = llama_completion.merge if kind.name == "llama" else openai.merge
    return Object(parts[0].line, merge([part.answer for part in parts]), parts[0].request)


def _kind_of(path: Path, one: Object) -> _Kind:
    for kind in _KINDS:
        if kind.is_kind(one.answer):
            return kind
    for is_kind, words in _REFUSED:
        if is_kind(one.answer):
            raise UnsupportedRecording(f"{path}: is {words}")
    names = ", ".join(sorted(map(str, one.answer))[:6])
    raise NotARecording(
        f"{path}: line {one.line}: no server's answer with log-probabilities (fields: "
        f"{shown(names)}); kldtui reads {READ}"
    )


def _is_error(answer: Fields) -> bool:
    """Whether a server says only that it failed: answers and branches have the field too."""
    if answer.get("error") is None:
        return False
    known = (*(kind.is_kind for kind in _KINDS), *(is_kind for is_kind, _ in _REFUSED))
    return not any(is_kind(answer) for is_kind in known)


def _error_words(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return shown(message)
