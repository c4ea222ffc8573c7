"""The types of the verbs' arguments and the words that they may be, for checks, help and completion."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from catalog.records import CheckpointRef
from dshistory.metrics import METRICS

if TYPE_CHECKING:
    from dshistory.replays.result import ReplayTable
    from dshistory.trends.bisect import Checkpoint

__all__ = [
    "DIFF_METRICS",
    "EXPORT_FORMATS",
    "GROUPINGS",
    "PARTS",
    "UNDO",
    "VERIFIED",
    "Changes",
    "Choices",
    "Command",
    "ExportFormat",
    "Grouping",
    "Metric",
    "Part",
    "Predicate",
    "Ref",
    "ReplayPredicate",
    "SkippedSteps",
    "Steps",
    "Undo",
    "Verified",
]

Ref = int | str | CheckpointRef
"""A checkpoint: a step (of the current run and its parents), -1 or "latest", "best", a tag, "run:step" or "run:best".
"""

Steps = Ref | Sequence[Ref]
"""Several checkpoints: a list of references, or as text "10, 20" or "last 10"; a lone one is a list of one."""

Predicate = str | Callable[["Checkpoint"], Any]
"""A condition on a checkpoint: on a metric, as "loss > 4.5", or a function of a `dshistory.trends.bisect.Checkpoint`.
"""


Changes = Mapping[str, Any] | Sequence[str] | Callable[[Any, Any], object] | None
"""A replay's changes are a dict as {"lr_scale": 0.5}, texts as "lr_scale=0.5", or a function of the module and the
optimizer.
"""

ReplayPredicate = Callable[["ReplayTable"], Any] | None
"""A condition on the result of a replay, a `dshistory.replays.result.ReplayTable`."""

SkippedSteps = int | str | Sequence[int | str] | None
"""Steps by number, or as text with ranges: "83-90"."""

Command = Sequence[str] | None
"""A program with its arguments; on the command line all that stands behind `--`."""


@dataclass(frozen=True)
class Choices:
    """The words that a parameter may be; stands beside `str` in its annotation."""

    words: tuple[str, ...]


DIFF_METRICS: Final[tuple[str, ...]] = (
    "times_usual",
    "relative_update",
    "update_norm",
    "cosine",
    "max_change",
    "changed_share",
    "sign_flips",
    "norm_before",
    "norm_after",
    "nonfinite_before",
    "nonfinite_after",
)
"""The metrics of a row of a diff, in the order of its columns."""

GROUPINGS: Final = ("tensor", "layer", "kind")
VERIFIED: Final = ("step", "next")
PARTS: Final = ("layer", "tensor", "group")
UNDO: Final = ("skip", "redo")
EXPORT_FORMATS: Final = ("safetensors", "torch", "dcp", "huggingface", "deepspeed", "universal")

Metric = Annotated[str, Choices(METRICS)]
"""A metric of a trajectory: of one checkpoint, or of the change since the checkpoint before."""

Verified = Annotated[str, Choices(VERIFIED)]
"""How far a rebuilt step is verified: up to the step itself, or on to the checkpoint after it."""

Grouping = Annotated[str, Choices(GROUPINGS)]
"""The rows of a diff: one for each tensor, layer or kind."""

Part = Annotated[str, Choices(PARTS)]
"""The rows of an attribution: one for each layer, tensor or group of the optimizer."""

Undo = Annotated[str, Choices(UNDO)]
"""To see whether a jump is gone, a replay leaves out batches, or begins again without a change."""

ExportFormat = Annotated[str, Choices(EXPORT_FORMATS)]
"""A format that `export` writes."""
