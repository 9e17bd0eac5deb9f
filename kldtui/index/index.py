"""Columns over the scored positions of a reference: one table for it and one for each quant.

Knows: recordings, the order in which their positions are read, and who reads them.
Must not know: how rows are decoded, text, screens, or what is done with the columns.

`scan` fills the tables and may run in a thread while others read them; readers take no lock. What
an entry's mark says stands is whole: `state` for what the first pass gives, `rest` for the rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kldtui.analysis import PAIR_DTYPE, REF_DTYPE, Kernels, NumpyKernels, State, load_fast
from kldtui.index.cache import Keeper, compiled_folder
from kldtui.index.crew import Crew, Fills, Standby
from kldtui.index.layout import Layout
from kldtui.index.passes import Worker, half_read, unread
from kldtui.index.saved import SavedTable
from kldtui.index.streams import StreamCheck
from kldtui.index.sweep import Sweep, sweep_or_worker
from kldtui.index.table import Table
from kldtui.index.way import Way
from kldtui.index.work import Filler, Spans, Wanted, fill, runs
from kldtui.position import Position
from kldtui.recordings.base import Recording, as_even

Stage = Literal["roots", "rest", "waiting"]
STAGES: tuple[Stage, ...] = ("roots", "rest")
_PENDING = {"roots": unread, "rest": half_read}

_BLOCK_BYTES = 4 << 20
"""Bytes of one recording in a span."""
_CREW_SECONDS = 0.5
_YIELD_SECONDS = 0.15
_POLL_SECONDS = 1.0
_SAVE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pass is; `first:last` is the flat range in which the latest entries lie.

    stage: "roots" is the first pass, "rest" the second; "waiting": nothing is left to do but to
    wait for a recording that is still being written, or for another program's scan.
    done, total: positions. bytes_per_s counts records of full recordings; it is 0 where all are
    top-N runs. seconds_left: of this pass.
    """

    done: int
    total: int
    bytes_per_s: float
    seconds_left: float | None
    first: int
    last: int
    stage: Stage = "roots"


class Index:
    """What a reference and its quants say of each other, position by position."""

    def __init__(
        self,
        ref: Recording,
        quants: Sequence[Recording],
        keeper: Keeper | None = None,
        way: Way | None = None,
    ) -> None:
        """Take the tables from `keeper`, or empty ones in memory. Raises StreamMismatch.

        way: of the program that this one's process scans for.
        """
        self._recording = ref
        self._quants = list(quants)
        self._checks = [StreamCheck(ref, quant) for quant in quants]
        self.common_chunks = [check.common for check in self._checks]
        self.layout = Layout.of(ref)
        n = self.layout.n
        tables: list[Table] = []
        with ExitStack() as opened:
            for of, dtype in [([ref], REF_DTYPE), *(([ref, q], PAIR_DTYPE) for q in quants)]:
                tables.append(keeper.table(of, dtype, n) if keeper else Table.empty(dtype, n))
                opened.callback(tables[-1].close)
            opened.pop_all()
        self.ref, *self.pairs = tables
        self._keeper, self._grown, self._closed = keeper, False, False
        self.notes = [check.notes() for check in self._checks]
        self._wanted = Wanted()
        self._way = way or Way()
        self._even = all(as_even(each) is not None for each in (ref, *quants))
        self._here: Sweep | Worker | None = None
        for table in self._tables:
            table.own()

    @property
    def _tables(self) -> list[Table]:
        return [self.ref, *self.pairs]

    @property
    def _all(self) -> range:
        return range(len(self.pairs))

    # -- what stands ---------------------------------------------------------------------------

    @property
    def drawn(self) -> bool:
        """Whether the reference says that its tokens were drawn at a temperature."""
        return self._recording.made.sampling is not None

    @property
    def absent(self) -> bool:
        """Whether the recordings are not here: the index stays as it is, and no row can be had."""
        return bool(getattr(self._recording, "absent", False))

    @property
    def kept(self) -> bool:
        """Whether what is filled outlives the program."""
        return all(table.kept for table in self._tables)

    @property
    def complete(self) -> bool:
        """Whether both passes are done everywhere."""
        return self.scanned(None)

    def scanned(self, chunks: tuple[int, int] | None) -> bool:
        """Whether both passes are done in chunks `a` up to, not including, `b`; in all."""
        spans = (self._spans(stage, self._all, *self.bounds(chunks)) for stage in STAGES)
        return all(each.next() is None for each in spans)

    def release(self) -> None:
        """Give back memory that only mirrors saved tables; what is read next comes back."""
        for table in self._tables:
            table.release()

    def close(self) -> None:
        """Save the tables, and let other programs fill them; scans end. Columns can be read."""
        self._closed = True
        if self._grown and self._keeper is not None:
            self._keep_grown(self._keeper)
        for table in self._tables:
            table.close()

    def _keep_grown(self, keeper: Keeper) -> None:
        """Save what was in memory alone, under what the recordings are by now."""
        for k, table in enumerate(self._tables):
            recordings = [self._recording, *self._quants[k - 1 : k]] if k else [self._recording]
            kept = keeper.table(recordings, table.dtype, len(table))
            if kept.kept and kept.own() and not kept["state"].any():
                kept.put(0, table[:])
            kept.close()

    # -- what somebody waits for ---------------------------------------------------------------

    def scan_position(self, position: Position) -> None:
        """Fill one position now, whole; nothing where it is not scored.

        Raises RecordingChanged, and StreamMismatch where its chunk is of another stream.
        """
        i = self.layout.index(position)
        if i is not None and not self.absent:
            if self._here is None:
                self._here = self._worker(NumpyKernels())
            self._fill_whole(self._here, [(i, i + 1)])

    def prefer(self, now: NDArray[np.int64], soon: NDArray[np.int64] | None = None) -> None:
        """Ask the running scan to take these flat indices first.

        now: what is on screen, whole and at once; few. soon: completed before all others once
        the first pass is done, in this order.
        """
        self._wanted.ask(now, np.zeros(0, np.int64) if soon is None else soon)

    def stand_back(self, seconds: float) -> None:
        """Have what this process does for long in other threads wait, and its crew: a person has
        pressed a key, and the interpreter, the caches and the memory are for what that leads to."""
        self._way.stand_back(seconds)

    def give_way(self) -> None:
        """To be called between short steps of what takes long (see `stand_back`)."""
        self._way.give_way()

    def _fill_whole(self, worker: Fills, spans: Sequence[tuple[int, int]]) -> None:
        for first, last in self._within_chunks(spans):
            low, high = self.layout.chunks(np.array([first, last - 1])).tolist()
            for check in self._checks:
                for chunk in range(low, high + 1):
                    check.chunk(chunk)
            if unread(self, self._all, first, last).any():
                worker.first(first, last, self._all)
            worker.second(first, last, self._all)

    def _within_chunks(self, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        for first, last in spans:
            at, end = max(0, first), min(last, self.layout.n)
            while at < end:
                stop = min(end, self._edge(at))
                yield at, stop
                at = stop

    def _edge(self, i: int) -> int:
        """Where a span that begins here must end: with its chunk, unless all are even."""
        if self._even:
            return self.layout.n
        return int(self.layout.chunk_slice(self.layout.position(i).chunk).stop)

    # -- the scan ------------------------------------------------------------------------------

    def scan(
        self,
        cancel: threading.Event | None = None,
        *,
        workers: int = 1,
        stages: Sequence[Stage] = STAGES,
        chunks: tuple[int, int] | None = None,
        compiled: bool = True,
        follow: bool = False,
        crew: Crew | None = None,
    ) -> Iterator[Progress]:
        """Fill what is pending: roots everywhere, then the rest; stops soon once `cancel` is set.

        workers: threads. chunks: only chunks `a` up to, not including, `b`. compiled: use
        compiled kernels where they are installed. follow: where a recording is still being
        written, wait for more instead of ending. crew: of this index; does what threads would.
        Raises RecordingChanged if a file is cut meanwhile, StreamMismatch where the streams turn
        out to differ, DamagedRecording; what was filled stays.
        """
        if self.absent:
            return
        try:
            ready = self._prepare(cancel)
            while ready and not _is_set(cancel) and not self._closed:
                mine = [k for k in self._all if self.pairs[k].own()]
                if mine or not self.pairs:
                    for stage in stages:
                        fillers = self._fillers(stage, mine, workers, compiled, crew)
                        yield from self._pass(stage, mine, cancel, chunks, fillers)
                others = [k for k in self._all if k not in mine]
                waiting = self._of_others(others, stages, chunks)
                if waiting is not None:
                    yield waiting
                elif follow and self._may_grow() and not _is_set(cancel):
                    n = self.layout.n
                    yield Progress(n, n, 0.0, None, n, n, "waiting")
                else:
                    return
                (cancel or threading.Event()).wait(_POLL_SECONDS)
                if waiting is None:
                    ready = not self.grow() or self._prepare(cancel)
        finally:
            for table in self._tables:
                table.save()
                table.release()

    def _of_others(
        self, numbers: Sequence[int], stages: Sequence[Stage], chunks: tuple[int, int] | None
    ) -> Progress | None:
        """How far another program is with the quants that it fills; None where it is done."""
        first, last = self.bounds(chunks)
        for stage in stages:
            left = self._left(stage, numbers, first, last)
            if left:
                done = last - first - left
                return Progress(done, last - first, 0.0, None, first, last, stage)
        return None

    def _prepare(self, cancel: threading.Event | None) -> bool:
        """What opening left out: all tokens are compared, and saved tables verified."""
        if self._keeper is not None:
            self._keeper.tidy()
        for recording in (self._recording, *self._quants):
            even = as_even(recording)
            if even is not None:
                even.examine(cancel)
        if not all(check.finish(cancel) for check in self._checks):
            return False
        self.notes = [check.notes() for check in self._checks]
        for table in self._tables:
            if table.own():
                table.verify()
        return True

    def bounds(self, chunks: tuple[int, int] | None) -> tuple[int, int]:
        """The flat range of chunks `a` up to, not including, `b`, as far as there are; of all."""
        if chunks is None:
            return 0, self.layout.n
        low, high = (min(max(0, c), self.layout.n_chunk) for c in chunks)
        if low >= high:
            return 0, 0
        ends = self.layout.chunk_slice(low), self.layout.chunk_slice(high - 1)
        return int(ends[0].start), int(ends[1].stop)

    def _pass(
        self,
        stage: Stage,
        numbers: Sequence[int],
        cancel: threading.Event | None,
        chunks: tuple[int, int] | None,
        fillers: Iterator[Filler],
    ) -> Iterator[Progress]:
        first, last = self.bounds(chunks)
        if self._spans(stage, numbers, first, last).next() is None:
            return
        spans = self._spans(stage, numbers, first, last)
        row_bytes = self._row_bytes(numbers)
        began = saved = time.monotonic()
        for filled, low, high in fill(spans, list(fillers), cancel, _YIELD_SECONDS):
            now = time.monotonic()
            rate = filled / (now - began) if now > began else 0.0
            left = (last - spans.at) / rate if rate else None
            yield Progress(spans.at - first, last - first, rate * row_bytes, left, low, high, stage)
            if now - saved > _SAVE_SECONDS:
                saved = now
                for table in self._tables:
                    table.save()
                    table.release()

    def crew(
        self, count: int, *, compiled: bool = True, after: float = _CREW_SECONDS
    ) -> Crew | None:
        """Processes to scan with, started `after` so many seconds if there is still work; close it.

        None where they cannot help: tables are in memory alone, or rows not all laid out alike.
        """
        recordings = [self._recording, *self._quants]
        evens = [as_even(recording) for recording in recordings]
        tables = [table.path for table in self._tables if isinstance(table, SavedTable)]
        if self.absent or self._keeper is None or len(tables) < len(self._tables):
            return None
        if not all(even is not None and even.reader(1) is not None for even in evens):
            return None
        paths = [recording.path for recording in recordings]
        way = self._way.share()
        return Crew(count, paths[0], paths[1:], tables, compiled=compiled, after=after, way=way)

    def _row_bytes(self, numbers: Sequence[int]) -> int:
        """What a position's codes take in the recordings that hold whole rows."""
        read = [self._recording, *(self._quants[k] for k in numbers)]
        return 2 * self._recording.shape.n_vocab * sum(recording.full for recording in read)

    def _fillers(
        self,
        stage: Stage,
        numbers: Sequence[int],
        workers: int,
        compiled: bool,
        crew: Crew | None,
    ) -> Iterator[Filler]:
        if crew is not None and not self._grown:
            for member in crew.members:
                here = partial(self._worker, NumpyKernels())
                yield self._filler(stage, numbers, Standby(member, here))
            return
        for _ in range(max(1, workers)):
            kernels = load_fast(compiled_folder()) if compiled and self._recording.full else None
            yield self._filler(stage, numbers, self._worker(kernels or NumpyKernels()))

    def _filler(self, stage: Stage, numbers: Sequence[int], worker: Fills) -> Filler:
        longest = self._longest()
        ahead = 0.0
        """Seconds that the list has had beyond those of the spans."""

        def fill_span(first: int, last: int) -> float:
            nonlocal ahead
            self._fill_whole(worker, runs(self._wanted.take_now(), longest))
            began = time.monotonic()
            if stage == "roots":
                worker.first(first, last, numbers)
                return time.monotonic() - began
            # A row by itself takes some times as long as one of a span: at most half of the time.
            if ahead <= 0:
                self._fill_whole(worker, runs(self._wanted.take_soon(), longest))
            now = time.monotonic()
            worker.second(first, last, numbers)
            took = time.monotonic() - now
            ahead = max(0.0, ahead) + (now - began) - took
            return took

        return fill_span

    def _worker(self, kernels: Kernels) -> Sweep | Worker:
        return sweep_or_worker(self, self._recording, self._quants, kernels)

    def _longest(self) -> int:
        return max(1, _BLOCK_BYTES // (2 * max(1, self._recording.shape.n_vocab)))

    def _spans(self, stage: Stage, numbers: Sequence[int], first: int, last: int) -> Spans:
        def of(a: int, b: int) -> NDArray[np.bool_]:
            return _PENDING[stage](self, numbers, a, b)

        return Spans(of, first, last, self._longest(), self._edge)

    def _left(self, stage: Stage, numbers: Sequence[int], first: int, last: int) -> int:
        """How many positions of a pass are pending; 0 for no numbers."""
        if not numbers:
            return 0
        return int(np.count_nonzero(_PENDING[stage](self, numbers, first, last)))

    # -- recordings that grow ------------------------------------------------------------------

    def _may_grow(self) -> bool:
        evens = [as_even(each) for each in (self._recording, *self._quants)]
        return any(each is not None and each.records < each.records_expected for each in evens)

    def grow(self) -> bool:
        """Take in what was written to the recordings since; True if there is more to scan.

        What has grown is kept in memory until the index is closed. Raises RecordingChanged.
        """
        ref = as_even(self._recording)
        grown = ref is not None and ref.refresh()
        if grown:
            layout = Layout.of(self._recording)
            self.ref = self.ref.grown(layout.n)
            self.pairs = [pair.grown(layout.n) for pair in self.pairs]
            self.layout = layout
        for number, quant in enumerate(self._quants):
            even = as_even(quant)
            if quant is self._recording or even is None:
                continue
            before = even.records
            if even.refresh():
                grown = True
                self._await(number, before, even.records)
        if grown:
            self._grown = True
            self.notes = [check.notes() for check in self._checks]
        return grown

    def _await(self, number: int, first: int, last: int) -> None:
        """Positions that a quant has recorded by now are not missing any more."""
        pair = self.pairs[number] = self.pairs[number].grown(self.layout.n)
        part = slice(first, min(last, len(pair)))
        missing = pair["state"][part] == State.MISSING
        pair["rest"][part][missing] = 0
        pair["state"][part][missing] = State.PENDING


def _is_set(cancel: threading.Event | None) -> bool:
    return cancel is not None and cancel.is_set()
