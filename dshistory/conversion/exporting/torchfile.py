"""Writes weights as a state dict by `torch.save`; `torch.load(..., weights_only=True)` reads it."""

from pathlib import Path

import torch

from dshistory.conversion.exporting.options import Options
from dshistory.conversion.exporting.weights import T, Weights

__all__ = ["write_torch"]


def write_torch(checkpoint: Weights[T], target: Path, options: Options) -> None:
    """Write one file with `{name: tensor}`; tied names share one tensor, as they did in the model.

    Holds all weights in memory.
    """
    options.require_only("torch", "weights")
    state = {name: checkpoint.whole(tensor) for name, tensor in checkpoint.state_dict(options.weights).items()}
    state.update({alias: state[name] for alias, name in checkpoint.aliases().items()})
    torch.save(state, target)
