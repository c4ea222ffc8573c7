"""The history that an explorer has open, and how it shows itself."""

from pathlib import Path
from typing import TYPE_CHECKING, Self

from catalog.history import History
from dshistory.options import Ref
from dshistory.reports import show

if TYPE_CHECKING:
    from capture.load.rebuilt import RebuiltStep
    from capture.redo.steps import RedoRef
    from catalog.records import CheckpointRef

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

    def _steps(self, *refs: Ref) -> "tuple[list[CheckpointRef], dict[CheckpointRef, RebuiltStep]]":
        """Return the steps that are named, and in memory those that were not captured and are in a redo log."""
        from capture.redo.steps import RedoRef, find_step

        found = [find_step(self.history, ref) for ref in refs]
        redo = {step.ref: step for step in found if isinstance(step, RedoRef)}
        return [step.ref if isinstance(step, RedoRef) else step for step in found], self._rebuilt(redo)

    def _readable(self, ref: Ref) -> "CheckpointRef":
        """Return the checkpoint that is named, or the step of a redo log: `CheckpointTensors` reads both."""
        from capture.redo.steps import RedoRef, find_step

        step = find_step(self.history, ref)
        return step.ref if isinstance(step, RedoRef) else step

    def _rebuilt(self, steps: "dict[CheckpointRef, RedoRef]") -> "dict[CheckpointRef, RebuiltStep]":
        if not steps:
            return {}
        from capture.redo.rebuild import rebuilt_step

        return {ref: rebuilt_step(self.history, step) for ref, step in steps.items()}

    def __repr__(self) -> str:
        return repr(show.overview(self.history))

    def _repr_html_(self) -> str:
        return show.overview(self.history)._repr_html_()
