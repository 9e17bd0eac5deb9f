"""Where in a reference's stream an answer's positions lie.

Knows: that a prediction depends on its prefix alone.
Must not know: servers' fields, what the rows are compared for.

A position of an answer stands for every position of the reference with the same prefix:
- where the file has the prompt's ids, the chunks that begin with the same ids;
- else, with a vocabulary and the prompt as text, the places behind as many tokens with that text;
- else, where the answer says how many tokens its prompt had, the one chunk that goes on there as
  the answer does, for `_ENOUGH` tokens at least.
From there on its positions count for as long as its tokens are those of the stream: where the
answer went its own way, the position itself counts (what came before is the same), the later ones
do not. The first token of a chunk may be another id if it is the same one everywhere: BOS in its
place (llama.cpp's perplexity tool evaluates chunks so).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kldtui.errors import StreamMismatch, UnsupportedRecording
from kldtui.recordings.base import Recording, prompt_length
from kldtui.recordings.foreign.answer import Answer, Step
from kldtui.recordings.foreign.kinds import ForeignFile
from kldtui.recordings.foreign.recording import ForeignChunk, ForeignRecording, spoken

_ENOUGH = 4
"""Tokens that must agree before an answer without a prompt is taken to belong to a chunk."""


class Pieces(Protocol):
    """As much of a vocabulary as is needed to find ids by their bytes."""

    def piece(self, id: int) -> bytes | None: ...

    def ids(self) -> Iterable[int]: ...


@dataclass(frozen=True, slots=True)
class _Place:
    chunk: int
    n_prompt: int


class _Text:
    """A vocabulary, both ways; read when it is needed first."""

    def __init__(self, find: Callable[[], Pieces]) -> None:
        self._find = find
        self._pieces: Pieces | None = None
        self._ids: dict[bytes, list[int]] | None = None

    @property
    def pieces(self) -> Pieces:
        if self._pieces is None:
            self._pieces = self._find()
        return self._pieces

    @property
    def is_known(self) -> bool:
        """Whether there is any text."""
        return any(True for _ in self.pieces.ids())

    def piece(self, id: int) -> bytes:
        return self.pieces.piece(id) or b""

    def ids(self, data: bytes) -> list[int]:
        """The ids of these bytes, ascending."""
        if self._ids is None:
            self._ids = defaultdict(list)
            for id in sorted(self.pieces.ids()):
                self._ids[self.piece(id)].append(id)
        return self._ids.get(data, []) if data else []

    def joined(self, tokens: NDArray[np.int32]) -> str:
        data = b"".join(self.piece(int(token)) for token in tokens)
        return data.decode("utf-8", "replace")


class _Stream:
    """The reference's tokens, and ways to find a beginning among them."""

    def __init__(self, ref: Recording) -> None:
        self.tokens = [ref.tokens(chunk) for chunk in range(ref.shape.n_chunk)]
        self._beginnings: tuple[int, dict[bytes, list[int]]] = (0, {})
        self._texts: tuple[int, list[tuple[int, str]]] | None = None

    def beginning_with(self, prompt: Sequence[int]) -> list[int]:
        """The chunks that begin with these ids, the first apart. Ask in the order of lengths."""
        length = len(prompt)
        if self._beginnings[0] != length:
            found: dict[bytes, list[int]] = defaultdict(list)
            for number, tokens in enumerate(self.tokens):
                if tokens.size >= length:
                    found[tokens[1:length].tobytes()].append(number)
            self._beginnings = (length, found)
        return self._beginnings[1].get(np.array(prompt[1:], np.int32).tobytes(), [])

    def with_text(self, text: str, n_prompt: int, pieces: _Text) -> list[_Place]:
        """The places behind so many tokens whose text is this; the first token may be another
        (BOS), or not shown. Ask in the order of lengths."""
        if self._texts is None or self._texts[0] != n_prompt:
            known = [
                (number, pieces.joined(tokens[1:n_prompt]))
                for number, tokens in enumerate(self.tokens)
                if tokens.size >= n_prompt
            ]
            self._texts = (n_prompt, known)
        out = []
        for number, rest in self._texts[1]:
            if text.endswith(rest):
                first = text[: len(text) - len(rest)]
                if not first or pieces.ids(first.encode("utf-8", "replace")):
                    out.append(_Place(number, n_prompt))
        return out


def beside(file: ForeignFile, ref: Recording, find: Callable[[], Pieces]) -> ForeignRecording:
    """The recording that the file is of the reference's stream: its chunks, some positions scored.

    find: gives the vocabulary; asked only where the file has text in place of ids.
    Raises StreamMismatch, naming the first difference, where no answer belongs to the stream, and
    UnsupportedRecording where there is no vocabulary and no ids.
    """
    placing = _Placing(file, ref, _Text(find))
    placing.all_answers()
    return placing.result()


class _Placing:
    def __init__(self, file: ForeignFile, ref: Recording, text: _Text) -> None:
        self._file, self._ref, self._text = file, ref, text
        self._stream = _Stream(ref)
        self._kind = ref.made.kind
        lengths = [prompt_length(ref, chunk) or 1 for chunk in range(ref.shape.n_chunk)]
        self._chunks = [
            ForeignChunk(tokens.copy(), length)
            for tokens, length in zip(self._stream.tokens, lengths, strict=True)
        ]
        self._counts: Counter[str] = Counter()
        self._firsts: Counter[int] = Counter()
        self._unplaced: list[str] = []
        self._textual = any(
            step.ids is None or step.token is None
            for answer in file.answers
            for step in (*answer.scored.values(), *answer.output)
            if not step.empty
        )

    def all_answers(self) -> None:
        self._check_text()
        later = []
        for answer in sorted(self._file.answers, key=lambda a: a.n_prompt or 0):
            places = self._places(answer)
            if not places:
                self._unplaced.append(f"line {answer.line}: {self._why_not(answer)}")
                continue
            first = answer.prompt[0] if answer.prompt else None
            if first is None:
                self._put(answer, places)
            else:
                later.append((answer, first, places))
        bos = self._bos(later)
        for answer, first, places in later:
            same = [p for p in places if first in (self._stream.tokens[p.chunk][0], bos)]
            if same:
                self._put(answer, same)
            else:
                self._unplaced.append(f"line {answer.line}: {self._why_not(answer)}")

    def _check_text(self) -> None:
        if self._textual and not self._text.is_known:
            raise UnsupportedRecording(
                f"{self._file.path}: its tokens are given as text, not as ids: give --tokenizer "
                "FILE (tokenizer.json or the model's GGUF file) to join them"
            )

    def _bos(self, later: list[tuple[Answer, int, list[_Place]]]) -> int | None:
        """The one id that stands in the place of every chunk's first token, if there is one."""
        others = {
            first
            for _, first, places in later
            if all(first != self._stream.tokens[place.chunk][0] for place in places)
        }
        if len(others) != 1:
            return None
        (bos,) = others
        self._firsts[bos] = sum(first == bos for _, first, _ in later)
        return bos

    # -- finding the place -----------------------------------------------------------------------

    def _places(self, answer: Answer) -> list[_Place]:
        if answer.prompt is not None:
            known = [-1 if id is None else id for id in answer.prompt]
            if known and -1 not in known[1:]:
                chunks = self._stream.beginning_with(known)
                return [_Place(chunk, len(known)) for chunk in chunks]
        if answer.prompt_text and answer.n_prompt and self._text.is_known:
            found = self._stream.with_text(answer.prompt_text, answer.n_prompt, self._text)
            if found:
                return found
        return self._by_number(answer)

    def _by_number(self, answer: Answer) -> list[_Place]:
        n_prompt = answer.n_prompt
        if n_prompt is None or n_prompt < 1:
            return []
        agreed = [self._agreed_at(answer, n_prompt, tokens) for tokens in self._stream.tokens]
        most = max(agreed, default=0)
        best = [chunk for chunk, count in enumerate(agreed) if count == most]
        return [_Place(best[0], n_prompt)] if most >= _ENOUGH and len(best) == 1 else []

    def _agreed_at(self, answer: Answer, n_prompt: int, tokens: NDArray[np.int32]) -> int:
        """How many known tokens of an answer are those of a chunk; 0 where its prompt's are not."""
        if tokens.size < n_prompt or not all(
            self._is(step, int(tokens[t])) for t, step in answer.scored.items()
        ):
            return 0
        return len(answer.scored) + self._agreed(answer.output, tokens[n_prompt:])

    def _agreed(self, steps: Sequence[Step], tokens: NDArray[np.int32]) -> int:
        """How many of the steps' own tokens are those of the stream, from the first on."""
        for i, (step, token) in enumerate(zip(steps, tokens.tolist(), strict=False)):
            if not self._is(step, token):
                return i
        return min(len(steps), tokens.size)

    def _is(self, step: Step, token: int) -> bool:
        if step.token is not None:
            return step.token == token
        return step.data is not None and step.data == self._text.piece(token)

    def _why_not(self, answer: Answer) -> str:
        """Where the answer's prompt differs from the chunk that is likest, with both ids."""
        prompt = answer.prompt
        if not prompt:
            return (
                "holds neither the ids of its prompt nor enough to find its place; keep the "
                'request with it: {"request": …, "response": …}'
            )
        best, at = 0, -1
        mine = np.array([-1 if id is None else id for id in prompt], np.int32)
        for number, tokens in enumerate(self._stream.tokens):
            both = min(mine.size, tokens.size)
            different = np.flatnonzero((mine[:both] != tokens[:both]) & (mine[:both] >= 0))
            until = int(different[0]) if different.size else both
            if until > at:
                best, at = number, until
        tokens = self._stream.tokens[best] if self._stream.tokens else np.empty(0, np.int32)
        if at < min(mine.size, tokens.size):
            extra = mine.size > 1 and np.array_equal(
                mine[1 : tokens.size + 1], tokens[: mine.size - 1]
            )
            hint = " (one token more stands before it: ask with the chunk's ids as they are)"
            return f"token {at} is {mine[at]}, chunk {best} has {tokens[at]}{hint if extra else ''}"
        return f"its prompt has {mine.size} tokens, chunk {best} only {tokens.size}"

    # -- taking what was said --------------------------------------------------------------------

    def _put(self, answer: Answer, places: list[_Place]) -> None:
        for place in places:
            tokens = self._stream.tokens[place.chunk]
            for t, step in answer.scored.items():
                self._say(place.chunk, t, step)
            count = self._agreed(answer.output, tokens[place.n_prompt :])
            last = min(count + 1, len(answer.output), tokens.size - place.n_prompt)
            for i, step in enumerate(answer.output[:last]):
                self._say(place.chunk, place.n_prompt + i, step)
            beyond = len(answer.output) - last
            if beyond and place.n_prompt + last < tokens.size:
                self._counts["positions left out: the answer had gone its own way before them"] += (
                    beyond
                )

    def _say(self, chunk: int, t: int, step: Step) -> None:
        stream = int(self._stream.tokens[chunk][t])
        if step.empty:
            self._counts["positions left out: nothing is said there of the best tokens"] += 1
            return
        known = self._in_ids(step, stream)
        if known is None:
            self._counts["positions left out: the best token's text is no token's"] += 1
            return
        self._check_ids(known)
        if t in self._chunks[chunk].said:
            self._counts["positions are there again; the last counts"] += 1
        self._chunks[chunk].said[t] = spoken(known, stream)

    def _in_ids(self, step: Step, stream: int) -> Step | None:
        """The step with ids, up to the first text that is no token's; None if that is the best."""
        token = step.token
        if token is None:
            token = stream if self._is(step, stream) else self._id(step.data or b"", stream)
        if step.ids is not None or step.invalid:
            ids = step.ids if step.ids is not None else np.empty(0, np.int32)
            return Step(token, None, step.logp, ids, (), step.logps, step.invalid)
        found: list[int] = []
        for data in step.texts:
            id = self._id(data, stream)
            if id is None or id in found:
                break
            found.append(id)
        if not found:
            return None
        return Step(token, None, step.logp, np.array(found, np.int32), (), step.logps[: len(found)])

    def _id(self, data: bytes, stream: int) -> int | None:
        ids = self._text.ids(data)
        if len(ids) > 1:
            self._counts[_COLLISIONS] += 1
        return stream if stream in ids else ids[0] if ids else None

    def _check_ids(self, step: Step) -> None:
        n_vocab = self._ref.shape.n_vocab
        if n_vocab and step.ids is not None and step.ids.size and step.ids.max() >= n_vocab:
            raise StreamMismatch(
                f"{self._file.path.name} is not of the stream of {self._ref.path.name}: it has "
                f"token {step.ids.max()}, n_vocab is {n_vocab}"
            )

    # -- what came of it -------------------------------------------------------------------------

    def result(self) -> ForeignRecording:
        if not any(chunk.said for chunk in self._chunks):
            why = self._unplaced[0] if self._unplaced else "nothing in it can be compared"
            raise StreamMismatch(
                f"{self._file.path.name} is not of the stream of {self._ref.path.name}: {why}"
            )
        problems = [*self._file.problems]
        problems += [f"{count:,} {words}" for words, count in self._counts.items() if count]
        for bos, count in self._firsts.items():
            words = f"answers read token {bos} in place of the chunk's first one: taken for BOS"
            problems.append(f"{count:,} {words}")
        if self._unplaced:
            problems.append(
                f"{len(self._unplaced):,} of {len(self._file.answers):,} answers belong to no "
                f"chunk of {self._ref.path.name}: left out; the first: {self._unplaced[0]}"
            )
        shape = self._ref.shape
        return ForeignRecording(
            self._file.path,
            self._file.format,
            shape.n_vocab,
            shape.n_ctx,
            self._chunks,
            kind=self._kind,
            pieces=self._file.gathered.pieces,
            engine=self._file.gathered.engine,
            problems=problems,
        )


_COLLISIONS = (
    "texts are those of several tokens: taken for the stream's token if it is among them, else for "
    "the lowest id"
)
