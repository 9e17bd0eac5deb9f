"""Tokens laid into lines, by arithmetic on widths alone.

Knows: cell widths and forced breaks as arrays.
Must not know: text, styles, Textual.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Wrapped:
    """Tokens 0…n-1 laid greedily into lines of `width` cells; a token is never split.

    widths: int array[n], cells of each token. breaks: bool array[n], true where a line ends after
    the token. openers: bool array[n], true where a token may begin a line (a word's first one);
    a word wider than a line is broken between its tokens. A token wider than a line has a line of
    its own. Laying out costs two binary searches a line, looking up costs one.
    """

    def __init__(
        self,
        widths: NDArray[np.integer],
        breaks: NDArray[np.bool_],
        width: int,
        openers: NDArray[np.bool_] | None = None,
    ) -> None:
        self.n = int(widths.size)
        self.width = max(1, width)
        self.ends = np.cumsum(widths, dtype=np.int64)
        forced = np.flatnonzero(breaks) + 1
        words = None if openers is None else np.flatnonzero(openers)
        starts = [0] if self.n else []
        at, next_forced = 0, 0
        while at < self.n:
            used = int(self.ends[at - 1]) if at else 0
            stop = int(np.searchsorted(self.ends, used + self.width, side="right"))
            stop = max(stop, at + 1)
            if words is not None and stop < self.n:
                word = int(np.searchsorted(words, stop, side="right")) - 1
                if word >= 0 and words[word] > at:
                    stop = int(words[word])
            while next_forced < forced.size and forced[next_forced] <= at:
                next_forced += 1
            if next_forced < forced.size:
                stop = min(stop, int(forced[next_forced]))
            at = stop
            if at < self.n:
                starts.append(at)
        self.starts = np.array(starts, np.int64)

    @property
    def lines(self) -> int:
        return int(self.starts.size)

    def line_of(self, token: int) -> int:
        """The line that holds a token."""
        return int(np.searchsorted(self.starts, token, side="right")) - 1

    def span(self, line: int) -> tuple[int, int]:
        """The tokens of a line, as [first, last)."""
        if not 0 <= line < self.lines:
            return (self.n, self.n)
        stop = int(self.starts[line + 1]) if line + 1 < self.lines else self.n
        return int(self.starts[line]), stop

    def column_of(self, token: int) -> int:
        """The cell at which a token begins within its line."""
        first, _ = self.span(self.line_of(token))
        before = int(self.ends[token - 1]) if token else 0
        return before - (int(self.ends[first - 1]) if first else 0)

    def token_at(self, line: int, column: int) -> int | None:
        """The token over a cell; the line's last one beyond its end; None outside all lines."""
        first, stop = self.span(line)
        if first == stop:
            return None
        base = int(self.ends[first - 1]) if first else 0
        token = int(np.searchsorted(self.ends, base + max(0, column), side="right"))
        return min(max(token, first), stop - 1)
