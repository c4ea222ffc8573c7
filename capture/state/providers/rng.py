"""The random number generators of a process: python, numpy, torch CPU and, once it is in use, torch CUDA."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from capture.state.interface import Available, ReadAt, TensorItem
from catalog.records import Placement

__all__ = ["RandomState"]


class RandomState:
    """The four global generators; each rank keeps its own. Must be the last provider: any other may draw."""

    read_at: ReadAt = "step"
    is_looked_at = False

    def __repr__(self) -> str:
        return "<RandomState: Python, NumPy, torch>"

    def tensors(self) -> Sequence[TensorItem]:
        return ()

    def objects(self) -> Mapping[str, tuple[Any, Placement]]:
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
        return {"rng": (state, "rank_local")}

    def prepare(self, available: Available) -> None:
        """Nothing to make: the generators are always there."""

    def finish(self, available: Available) -> None:
        state = available.objects.get("rng")
        if state is None:
            return
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"])
