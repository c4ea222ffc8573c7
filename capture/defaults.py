"""Where the history is when nobody says: `$DSHISTORY`, else `./history`."""

import os
from pathlib import Path

__all__ = ["history_path"]


def history_path(history: Path | str | None) -> Path:
    """The absolute folder that `history` means."""
    return Path(history or os.environ.get("DSHISTORY") or "history").expanduser().resolve()
