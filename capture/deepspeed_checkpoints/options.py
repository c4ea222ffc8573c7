"""The options of DeepSpeed's checkpoints, checked where a user gives them; imports no deepspeed."""

from dataclasses import dataclass, fields

from capture.snapshot.writer_choice import WriterOptions
from catalog.errors import SetupError

__all__ = ["EngineOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The arguments of `capture.checkpoint_engine`, in the meaning described there. SetupError, with the argument and
    its value, for one that it may not be.
    """

    writer: WriterOptions
    lazy: bool = True
    pickle: bool = False
    wait: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.name != "writer"):
            if not isinstance(getattr(self, name), bool):
                raise SetupError(f"{name}={getattr(self, name)!r}: give True or False")
