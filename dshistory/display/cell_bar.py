"""A bar of progress in a notebook's cell that leaves nothing behind: when the work ends, also by an error, it is empty.

It is one output that is replaced again and again, not a widget: a saved notebook keeps what an output shows last, and
of a widget what it showed first.
"""

import time
from html import escape
from typing import Any, Final

__all__ = ["CellBar"]

_BETWEEN_S: Final = 0.1
"""The bar is not drawn more often."""


class CellBar:
    """The share that is done of `total`, shown once the work has taken `patience_s`."""

    def __init__(self, total: int, *, description: str, patience_s: float) -> None:
        self._total, self._done, self._description = total, 0, description
        self._next = time.monotonic() + patience_s
        self._beside = ""
        self._shown: Any = None

    def update(self, count: int) -> None:
        """Report that `count` more are done."""
        self._done += count
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _BETWEEN_S
            self._show()

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        """Show `text` behind the description, at once or from the next update on."""
        self._beside = f" ({text})"
        if refresh:
            self.update(0)

    def close(self) -> None:
        """Leave an empty output."""
        if self._shown is not None:
            self._shown.update({"text/plain": "", "text/html": ""}, raw=True)

    def _show(self) -> None:
        share = min(1.0, self._done / max(1, self._total))
        text = f"{self._description}: {share:.0%}{self._beside}"
        bar = f'<progress value="{share:.3f}" style="vertical-align:middle"></progress>'
        data = {"text/plain": text, "text/html": f"{escape(text)} {bar}"}
        if self._shown is None:
            from IPython.display import display

            self._shown = display(data, raw=True, display_id=True)
        else:
            self._shown.update(data, raw=True)
