"""Tokens laid into lines, by arithmetic on widths alone.

Knows: cell widths and forced breaks as arrays.
Must not know: text, styles, Textual.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray


class Wrapped:
    """Tokens 0…n-1 laid greedily into lines of `width` cells.

    widths: int array[n], cells of each token. breaks: bool array[n], true where a line ends with
    the token. tails: int array[n], of a token that ends a line, the cells that follow its line
    feed: they begin the next line. openers: bool array[n], true where a token may begin a line (a
    word's first one); a word wider than a line is broken between its tokens. A token wider than a
    line has a line of its own. Laying out costs two binary searches a line, looking up costs one.
    """

    def __init__(
        self,
        widths: NDArray[np.integer],
        breaks: NDArray[np.bool_],
        width: int,
        openers: NDArray[np.bool_] | None = None,
        tails: NDArray[np.integer] | None = None,
    ) -> None:
        self.n = int(widths.size)
        self.width = max(1, width)
        self._tails = np.zeros(self.n, np.int64) if tails is None else np.where(breaks, tails, 0)
        self._tails = np.minimum(self._tails, self.width - 1)
        self._breaks = breaks
        self.ends = np.cumsum(widths - self._tails, dtype=np.int64)
        # Of lists single numbers are read some times faster than of arrays.
        ends: list[int] = self.ends.tolist()
        forced: list[int] = (np.flatnonzero(breaks) + 1).tolist()
        words: list[int] = [] if openers is None else np.flatnonzero(openers).tolist()
        starts = [0] if self.n else []
        at, next_forced, before = 0, 0, 0
        while at < self.n:
            room = self.width - self._indent_at(at)
            stop = max(bisect_right(ends, before + room, at), at + 1)
            if words and stop < self.n:
                word = bisect_right(words, stop) - 1
                if word >= 0 and words[word] > at:
                    stop = words[word]
            while next_forced < len(forced) and forced[next_forced] <= at:
                next_forced += 1
            if next_forced < len(forced):
                stop = min(stop, forced[next_forced])
            at, before = stop, ends[stop - 1]
            if at < self.n or (self._tails[at - 1] and self._breaks[at - 1]):
                starts.append(at)
        self.starts = np.array(starts, np.int64)

    def _before(self, token: int) -> int:
        """Cells of all that is laid before a token, tails apart."""
        return int(self.ends[token - 1]) if token else 0

    def _indent_at(self, token: int) -> int:
        return int(self._tails[token - 1]) if token and self._breaks[token - 1] else 0

    @property
    def lines(self) -> int:
        return int(self.starts.size)

    def line_of(self, token: int) -> int:
        """The line that a token begins in."""
        return int(np.searchsorted(self.starts, token, side="right")) - 1

    def span(self, line: int) -> tuple[int, int]:
        """The tokens that begin in a line, as [first, last)."""
        if not 0 <= line < self.lines:
            return (self.n, self.n)
        stop = int(self.starts[line + 1]) if line + 1 < self.lines else self.n
        return int(self.starts[line]), stop

    def indent(self, line: int) -> int:
        """Cells at a line's begin that belong to the token before it."""
        return self._indent_at(self.span(line)[0]) if 0 <= line < self.lines else 0

    def column_of(self, token: int) -> int:
        """The cell at which a token begins within its line."""
        first, _ = self.span(self.line_of(token))
        return self._before(token) - self._before(first) + self._indent_at(first)

    def token_at(self, line: int, column: int) -> int | None:
        """The token over a cell; the line's last one beyond its end; None outside all lines."""
        if not 0 <= line < self.lines:
            return None
        first, stop = self.span(line)
        indent = self._indent_at(first)
        if column < indent or first == stop:
            return first - 1
        target = self._before(first) + column - indent
        token = int(np.searchsorted(self.ends, max(target, self._before(first)), side="right"))
        return min(max(token, first), stop - 1)
