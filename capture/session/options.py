"""The options of a session, checked where a user gives them."""

from dataclasses import dataclass
from typing import Any, get_args

from capture.changes.change_detector import Check
from capture.on_full import OnFull
from capture.state.weights_only import Rounded, What
from catalog.errors import SetupError
from catalog.retention.policy import Policy

__all__ = ["SessionOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """The arguments of `capture.enable` that decide how a session behaves, in the meaning described there. SetupError,
    with the argument and its value, for one that it may not be.

    also_at: further steps that are captured
    keep: the policy of what stays; None keeps everything
    compact: whether checkpoints that are not the newest are packed beside the training
    redo: whether what each update consumes is recorded
    what, dtype: what the checkpoints hold
    """

    every: int = 50
    on_full: OnFull = "wait"
    check: Check = "sampled"
    stats_every: int = 1
    strict: bool = False
    sigterm_limit_s: float | None = None
    fingerprints: bool = True
    also_at: frozenset[int] = frozenset()
    keep: Policy | None = None
    compact: bool = False
    redo: bool = False
    what: What = "state"
    dtype: Rounded | None = None

    def is_due(self, step: int) -> bool:
        """Return whether a step is to be captured."""
        return step % self.every == 0 or step in self.also_at

    def __post_init__(self) -> None:
        if not _is_whole(self.every) or self.every < 1:
            raise SetupError(f"every={self.every!r}: give a whole number of optimizer steps, 1 or more")
        if self.on_full not in get_args(OnFull):
            raise SetupError(f'on_full={self.on_full!r}: give "wait" or "skip"')
        if self.check not in get_args(Check):
            raise SetupError(f'check={self.check!r}: give "sampled", "versions" or "hash"')
        if not _is_whole(self.stats_every) or self.stats_every < 0:
            raise SetupError(
                f"stats_every={self.stats_every!r}: give a whole number of optimizer steps, or 0 for no statistics"
            )
        if self.what not in get_args(What):
            raise SetupError(f'what={self.what!r}: give "state", or "weights" for a history to look at only')
        if self.dtype is not None and self.dtype not in get_args(Rounded):
            raise SetupError(f'dtype={self.dtype!r}: give "bf16", "fp16", or None for the weights as they are')
        if self.dtype is not None and self.what == "state":
            raise SetupError(
                f'dtype={self.dtype!r}: a training can\'t go on from rounded weights: give what="weights" too, for a '
                "history to look at only, or leave dtype= out"
            )
        if self.redo and self.what == "weights":
            raise SetupError(
                'redo=True: a step is made again from the whole state, and what="weights" captures no more '
                "than the weights: leave one of them out"
            )
        for name in ("strict", "fingerprints", "redo", "compact"):
            if not isinstance(getattr(self, name), bool):
                raise SetupError(f"{name}={getattr(self, name)!r}: give True or False")
        limit_s: Any = self.sigterm_limit_s
        real = isinstance(limit_s, (int, float)) and not isinstance(limit_s, bool)
        if limit_s is not None and not (real and 0 < limit_s < float("inf")):
            raise SetupError(f"sigterm_limit_s={limit_s!r}: give a number of seconds above 0, or None")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
