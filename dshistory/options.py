"""What an option may be when it is one of a few words: said once, for checks, help and completion."""

from dataclasses import dataclass
from typing import Annotated, Final

from dshistory.metrics import METRICS

__all__ = [
    "DIFF_METRICS",
    "EXPORT_FORMATS",
    "GROUPINGS",
    "WEIGHTS",
    "Choices",
    "ExportFormat",
    "Grouping",
    "Metric",
    "Weights",
]


@dataclass(frozen=True)
class Choices:
    """Stands in an annotation beside `str`: the words that the parameter may be."""

    words: tuple[str, ...]


DIFF_METRICS: Final[tuple[str, ...]] = (
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
"""The numbers of a row of a diff, in the order of its columns."""

GROUPINGS: Final = ("tensor", "layer", "kind")
EXPORT_FORMATS: Final = ("safetensors", "torch", "dcp", "huggingface", "deepspeed", "universal")
WEIGHTS: Final = ("model", "master")

Metric = Annotated[str, Choices(METRICS)]
"""What a trajectory is about: a step itself, or the way from the checkpoint before."""

Grouping = Annotated[str, Choices(GROUPINGS)]
"""What a row of a diff stands for."""

ExportFormat = Annotated[str, Choices(EXPORT_FORMATS)]
"""What `export` writes."""

Weights = Annotated[str, Choices(WEIGHTS)]
"""Which weights `export` writes: those of the model, or the fp32 ones that the optimizer updates."""
