"""Texts that end another one, found while it is written."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Stops"]


class Stops:
    """Lets text through up to the first of some texts, and holds back what may be the beginning of one.

    The text ends where the first of them is complete; what comes before it is let through, it and the rest are not.

    Args:
        texts: none of them empty.

    Attributes:
        found: whether one was there.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.found = False
        self._texts = tuple(texts)
        self._held = ""

    def push(self, text: str) -> str:
        """What is certain to belong to the text, now that this follows."""
        if self.found:
            return ""
        self._held += text
        ends = [(at + len(stop), at) for stop in self._texts if (at := self._held.find(stop)) >= 0]
        if ends:
            self.found = True
            _, at = min(ends)  # the first that is complete; of those that end together the longest
            return self._take(at)
        return self._take(len(self._held) - self._n_uncertain())

    def finish(self) -> str:
        """What was held back, when nothing follows any more."""
        return "" if self.found else self._take(len(self._held))

    def _take(self, n: int) -> str:
        taken, self._held = self._held[:n], self._held[n:]
        return taken

    def _n_uncertain(self) -> int:
        """How much at the end may be the beginning of one of the texts."""
        longest = max(map(len, self._texts), default=0) - 1
        for n in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-n:]) for stop in self._texts):
                return n
        return 0
