"""The defaults of what users leave out: the history's folder and the staging memory."""

import os
from pathlib import Path

from catalog.errors import SetupError

__all__ = ["DEFAULT_BUDGET_BYTES", "history_path"]

DEFAULT_BUDGET_BYTES = 256 << 20
"""The staging memory of a writer."""


def history_path(history: Path | str | None) -> Path:
    """Return the absolute folder that `history` means; without one `$DSHISTORY`, else `./history`. SetupError for
    anything but a path.
    """
    if history is not None and (not isinstance(history, (str, os.PathLike)) or "\0" in os.fspath(history)):
        raise SetupError(f"history={history!r}: give the path of a folder, or None for $DSHISTORY, else ./history")
    return Path(history or os.environ.get("DSHISTORY") or "history").expanduser().resolve()
