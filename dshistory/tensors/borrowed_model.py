"""A user's model whose tensors are those of a history for a while, and its own again afterwards.

Invariant: when the block ends, however it ends, every parameter and buffer has the bits that it had, every gradient and
mode is the one that was there. Tensors keep their memory: values are copied in and out.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Final, Self

import torch

from capture.active_sessions import sessions_of
from capture.state.unwrap import logical_name, unwrapped
from catalog.errors import MismatchError, SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.tensors.checkpoint_tensors import CheckpointTensors, MadeAgain

__all__ = ["BorrowedModel", "Tensors"]

Tensors = Mapping[str, torch.Tensor]

_SHOWN: Final = 3


class BorrowedModel:
    """A context manager; `load` gives the model other values, in the mode for evaluation and without gradients.

    A session that captures the model waits for it as for any other declared edit (`session.modify()`). The values that
    are put back are kept in host memory meanwhile. SetupError when `model` is no module.
    """

    def __init__(self, model: torch.nn.Module, *, verb: str) -> None:
        if not isinstance(model, torch.nn.Module):
            raise SetupError(f"{verb}: model={model!r}: give the torch module that takes the weights")
        self.model = model
        self._inner = unwrapped(model)
        self._undo = ExitStack()
        self._parameters = _named(self._inner.named_parameters(remove_duplicate=False))
        self._buffers = _named(self._inner.named_buffers(remove_duplicate=False))
        self._transient = {
            logical_name(f"{path}.{name}" if path else name)
            for path, module in self._inner.named_modules()
            for name in module._non_persistent_buffers_set
        }

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            for session in sessions_of([self.model, self._inner]):
                undo.enter_context(session.modify())
            values = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in self.tensors.values()]
            grads = [(one, one.grad, one.requires_grad) for one in self._parameters.values()]
            modes = [(module, module.training) for module in self.model.modules()]
            undo.callback(_put_back, values, grads, modes)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    @property
    def parameters(self) -> Tensors:
        """The model's parameters by logical name; tied ones stand under each of their names."""
        return self._parameters

    @property
    def buffers(self) -> Tensors:
        """The model's buffers by logical name, in the same way."""
        return self._buffers

    @property
    def tensors(self) -> Tensors:
        """The parameters and buffers, each once, by its first name."""
        named = {**self._parameters, **self._buffers}
        first = {id(tensor): name for name, tensor in reversed(named.items())}
        return {name: tensor for name, tensor in named.items() if first[id(tensor)] == name}

    def load(self, weights: Tensors, buffers: Tensors, *, where: str) -> None:
        """Copy values by logical name into the model: its parameters, its persistent buffers, and of its other buffers
        those that are given in the same shape. Values of another dtype are converted to the model's.

        MismatchError, which begins with `where` and names the tensors, when the model has others or other shapes;
        nothing is copied then. Buffers that the model does not have are left out.
        """
        given = {**buffers, **weights}
        needed = {
            **self._parameters,
            **{name: one for name, one in self._buffers.items() if name not in self._transient},
        }
        problems = [
            f"{name!r} has shape {tuple(given[name].shape)} there and {tuple(tensor.shape)} in the model"
            for name, tensor in needed.items()
            if name in given and given[name].shape != tensor.shape
        ][:_SHOWN]
        for names, what in ((needed.keys() - given.keys(), "model"), (weights.keys() - self._here(), "history")):
            if names:
                problems.append(f"{len(names)} only in the {what} ({', '.join(sorted(names)[:_SHOWN])})")
        if problems:
            raise MismatchError(f"{where} does not fit the model: {'; '.join(problems)}; build the model as it was")
        fitting = {
            name: self._buffers[name]
            for name in self._transient & self._buffers.keys() & given.keys()
            if self._buffers[name].shape == given[name].shape
        }
        self.model.eval()
        with torch.no_grad():
            for name, tensor in (needed | fitting).items():
                tensor.copy_(given[name])
        for tensor in self._parameters.values():
            tensor.grad = None

    def put(self, values: Tensors) -> None:
        """Copy some of the values that `load` would take; the other tensors stay as they are."""
        here = {**self._parameters, **self._buffers}
        with torch.no_grad():
            for name, value in values.items():
                here[name].copy_(value)

    def load_checkpoint(
        self,
        history: History,
        ref: CheckpointRef,
        *,
        weights: str = "model",
        made_again: MadeAgain | None = None,
    ) -> torch.nn.Module:
        """Load a checkpoint and return the model; `weights` is as for `CheckpointTensors.parameters`, and `made_again`
        as for `CheckpointTensors`."""
        stored = CheckpointTensors(history, ref, advance=lambda nbytes: None, made_again=made_again)
        parameters, buffers = stored.loaded(weights)
        self.load(parameters, buffers, where=f"checkpoint {ref}")
        return self.model

    def _here(self) -> set[str]:
        return {*self._parameters, *self._buffers}


def _named(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {logical_name(name): tensor for name, tensor in tensors}


def _put_back(
    values: list[tuple[torch.Tensor, torch.Tensor]],
    grads: list[tuple[torch.Tensor, torch.Tensor | None, bool]],
    modes: list[tuple[torch.nn.Module, bool]],
) -> None:
    with torch.no_grad():
        for tensor, value in values:
            tensor.copy_(value)
    for parameter, grad, required in grads:
        parameter.grad = grad
        parameter.requires_grad_(required)
    for module, training in modes:
        module.training = training
