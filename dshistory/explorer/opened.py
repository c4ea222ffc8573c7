"""The history that an explorer has open, and how it shows itself."""

from pathlib import Path
from typing import Self

from catalog.history import History
from dshistory.reports import show

__all__ = ["OpenedHistory"]


class OpenedHistory:
    """One history, opened for reading."""

    def __init__(self, history: History) -> None:
        self.history = history

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open the history in a folder. Raises NotFoundError when there is none, FormatError for a newer version."""
        return cls(History.open(path))

    @property
    def root(self) -> Path:
        """The folder of the history."""
        return self.history.root

    def _named(self, run: str | None) -> str | None:
        """Return the run of which a user gave the name, or its beginning."""
        return None if run is None else self.history.run_named(run)

    def __repr__(self) -> str:
        return repr(show.overview(self.history))

    def _repr_html_(self) -> str:
        return show.overview(self.history)._repr_html_()
