"""Histories of weights alone, for those who only look: nothing else of a training is kept, and the copies of the
weights may be rounded.

Only the parameters are rounded, where they have 32 bits or more: buffers are few, and often statistics that 8 bits of
mantissa would spoil. A training can't go on from such a checkpoint.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import torch

from capture.state.interface import Available, ChangedByForward, HoldsWeights, ReadAt, StateProvider, TensorItem
from catalog.records import Placement

__all__ = ["Rounded", "What", "facts_of", "weights_of"]

What = Literal["state", "weights"]
"""A history holds all that a training needs to go on, or its weights and buffers."""

Rounded = Literal["bf16", "fp16"]
"""The weights in the file are rounded to this type."""

_DTYPES: Final[Mapping[Rounded, torch.dtype]] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_WIDE: Final = (torch.float32, torch.float64)


def weights_of(providers: Sequence[StateProvider], dtype: Rounded | None) -> list[StateProvider]:
    """Return providers of the weights and buffers among what `providers` list, and of nothing else, with the weights to
    be rounded to `dtype`."""
    rounded_to = None if dtype is None else _DTYPES[dtype]
    found: list[StateProvider] = []
    for provider in providers:
        if isinstance(provider, HoldsWeights):
            found.append(_Weights(provider, rounded_to))
        elif isinstance(provider, ChangedByForward):
            found.append(provider)
    return found


def facts_of(what: What, dtype: Rounded | None) -> dict[str, Any]:
    """Return what `run.json` says of it, which `RunFacts.holds` reads."""
    return {"what": what, "dtype": dtype}


class _Weights:
    """The weights of another provider, which is asked for nothing else."""

    read_at: ReadAt = "before_update"

    def __init__(self, provider: HoldsWeights, rounded_to: torch.dtype | None) -> None:
        self._provider = provider
        self._rounded_to = rounded_to

    def __repr__(self) -> str:
        return f"<the weights of {self._provider!r}>"

    def tensors(self) -> Sequence[TensorItem]:
        return [
            replace(item, rounded_to=self._rounded_to) if item.tensor.dtype in _WIDE else item
            for item in self._provider.weights()
        ]

    def objects(self) -> Mapping[str, tuple[Any, Placement]]:
        return {}

    def fingerprint(self) -> Hashable:
        return self._provider.fingerprint()

    def roots(self) -> tuple[Iterable[Any], Sequence[torch.Tensor]]:
        return self._provider.roots()

    def prepare(self, available: Available) -> None:
        """Nothing to make: nothing is restored through this."""

    def finish(self, available: Available) -> None:
        """Nothing to refresh: nothing is restored through this."""
