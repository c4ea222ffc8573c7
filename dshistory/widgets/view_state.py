"""Holds what the user has chosen in the explorer: one immutable object, from which the whole view is drawn."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from dshistory.patterns import Patterns

if TYPE_CHECKING:
    from dshistory.options import Ref

__all__ = ["ABSOLUTE", "COLOURS", "OWN_PAST", "Part", "ViewState"]

Part = Literal["timeline", "layers", "anomalies", "detail", "diff", "rows", "runs", "comparison", "picture"]
"""A part of the view that is drawn by itself; `rows` are those shown of the diff, `picture` that of the comparison."""

ABSOLUTE: Final = "absolute"
OWN_PAST: Final = "against its own past"
COLOURS: Final = (ABSOLUTE, OWN_PAST)
"""The colours of the heat map mean the value, or the value relative to the usual one of the same layer before."""


@dataclass(frozen=True)
class ViewState:
    """The selections of the widget; a gesture makes a new one."""

    names: Patterns = "*"
    kinds: Patterns = "model"
    metric: str = "relative_update"
    colour: str = ABSOLUTE
    timeline: str = "loss"
    first: int | None = None
    last: int | None = None
    picked: tuple[str, int] | None = None
    """A layer or a tensor, and a step."""
    compared: "tuple[Ref, Ref] | None" = None
    """The two checkpoints of the diff."""
    order: tuple[str, bool | None] | None = None
    """The column that sorts the rows of the diff, and whether it descends, None for its usual direction; None for the
    diff's own order."""
    page: int = 0
    """The page of the diff's rows, from 0."""
    runs: tuple[str, ...] = ()
    """The runs that are chosen, in the order of the choice."""
    picture: str = "loss"
    """The picture of the chosen runs shows this, as `ComparedRuns.plot` names it."""
    gesture: Part = "layers"
    """The part that the last gesture was about: the line of code and the table are that part's."""
