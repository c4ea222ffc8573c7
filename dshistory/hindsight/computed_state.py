"""A state dict that was computed from checkpoints: it goes into a model, into other formats, and is measured."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from capture.state.dtypes import dtype_name
from catalog.errors import SetupError
from dshistory.conversion import exporting
from dshistory.display.report import Report
from dshistory.display.table import Table
from dshistory.hindsight.combination import Combination
from dshistory.hindsight.measuring import Measured, measured
from dshistory.options import ExportFormat
from dshistory.tensors.borrowed_model import BorrowedModel
from dshistory.tensors.state_dict import RestoredState

__all__ = ["ComputedState"]


class ComputedState(RestoredState):
    """`{kind: {name: tensor}}` in host memory, as `h.restore` returns it, tied names included.

    Where the weights are among the kinds, the persistent buffers are the kind "buffer": `state_dict()` has both, as
    `model.load_state_dict` takes them.
    """

    def __init__(self, label: str, combination: Combination, *, root: Path) -> None:
        super().__init__()
        self.label = label
        self._combination = combination
        self._root = root
        for kind, tensors in combination.tensors.items():
            named = {
                known: tensor for name, tensor in tensors.items() for known in (name, *combination.aliases[kind, name])
            }
            self[kind] = named

    @property
    def taken_from_last(self) -> tuple[str, ...]:
        """The tensors of whole numbers that differ between the checkpoints, and are as the last of them has them."""
        return tuple(self._combination.taken)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return weights and persistent buffers by name, tied names included. SetupError when there are no weights."""
        return self._weights() | self.get("buffer", {})

    def evaluate(self, fn: Callable[[Any], Any], *, model: torch.nn.Module) -> Measured:
        """Return what `fn(model)` gives with this state in the model, a number or a dict of numbers, as
        `h.evaluate` does for checkpoints. Nothing is stored: a metric of a history belongs to one of its steps.

        The model is in the mode for evaluation meanwhile, and as it was afterwards. MismatchError when the state does
        not fit it; SetupError when `fn` returns something else.
        """
        with BorrowedModel(model, verb="evaluate") as borrowed:
            borrowed.load(self._weights(), self.get("buffer", {}), where=self.label)
            return measured(fn, model, what=self.label)

    def export(
        self,
        path: Path | str,
        *,
        format: ExportFormat = "safetensors",
        shard_bytes: int | None = None,
        config: Path | str | None = None,
        model: Any = None,
        overwrite: bool = False,
    ) -> Table:
        """Write the state in another format: safetensors, huggingface, dcp or torch, as `h.export` does for a
        checkpoint, with the same options and errors."""
        source = _InMemory(self.label, self._weights(), self.get("buffer", {}), self._aliases())
        options = exporting.options(
            weights="model", shard_bytes=shard_bytes, config=config, model=model, zero_stage=None, world_size=None
        )
        return exporting.export_weights(
            source, Path(path), root=self._root, format=format, options=options, overwrite=overwrite
        )

    def _weights(self) -> dict[str, torch.Tensor]:
        kinds = [kind for kind in self if kind != "buffer"]
        if "model" in kinds:
            return self["model"]
        if len(kinds) != 1:
            raise SetupError(
                f"{self.label} has the kinds {', '.join(kinds)}: compute it with kinds='model' for weights"
            )
        return self[kinds[0]]

    def _aliases(self) -> dict[str, str]:
        return {alias: name for (_, name), others in self._combination.aliases.items() for alias in others}

    def _summary(self) -> Report:
        return Report(self.label, {}, super()._summary().tables)


@dataclass(frozen=True)
class _Held:
    """A tensor in memory, described as writers need it."""

    tensor: torch.Tensor
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


@dataclass(frozen=True)
class _InMemory:
    """Weights in memory as the exporting writers read them."""

    ref: str
    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    tied: dict[str, str]

    def parameters(self, weights: str) -> dict[str, _Held]:
        return self._described(self.weights)

    def state_dict(self, weights: str) -> dict[str, _Held]:
        return self._described(self.weights | self.buffers)

    def aliases(self) -> dict[str, str]:
        return {alias: name for alias, name in self.tied.items() if alias in self.weights or alias in self.buffers}

    def pieces(self, tensor: _Held) -> Iterator[torch.Tensor]:
        yield tensor.tensor.reshape(-1)

    def whole(self, tensor: _Held) -> torch.Tensor:
        return tensor.tensor

    def _described(self, tensors: dict[str, torch.Tensor]) -> dict[str, _Held]:
        return {
            name: _Held(tensor, dtype_name(tensor.dtype, what=name))
            for name, tensor in sorted(tensors.items())
            if name not in self.tied
        }
