"""The options of an export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catalog.errors import SetupError

__all__ = ["Options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of all formats; each format refuses, by name, those that mean nothing to it.

    `weights`: model, master, or the name of a State Provider that averages them.
    `shard_bytes`: the most bytes of tensors in one file; a larger tensor has a file to itself. `config`: a Hugging Face
    config.json, a folder with one, or its content. `zero_stage`, `world_size`: the DeepSpeed layout to write.
    """

    weights: str = "model"
    shard_bytes: int | None = None
    config: Path | str | dict[str, Any] | None = None
    zero_stage: int | None = None
    world_size: int | None = None

    def require_only(self, format: str, *allowed: str) -> None:
        """Raise SetupError for an option that was given and that `format` does not have."""
        optional = ("shard_bytes", "config", "zero_stage", "world_size")
        for name in optional:
            if name not in allowed and getattr(self, name) is not None:
                raise SetupError(f"{name} means nothing to the format {format!r}; leave it out")
        if "weights" not in allowed and self.weights not in ("model", "master"):
            raise SetupError(
                f"weights={self.weights!r} means nothing to the format {format!r}, which has the model's weights and "
                "the master weights both; leave it out"
            )
        if self.shard_bytes is not None and self.shard_bytes <= 0:
            raise SetupError(f"shard_bytes={self.shard_bytes}: must be a positive number of bytes")
