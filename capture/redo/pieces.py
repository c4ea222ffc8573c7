"""Lets an optimizer update a large tensor piece by piece, where that gives the same bits as the whole tensor at once.

What an update computes on its way then stays in the processor's cache, and in memory that is used again: as large as a
flat tensor of DeepSpeed, it would be new memory at each operation, whose first touch takes longer than the update.

Whether the bits are the same is tried here and now, on numbers of all sizes: torch computes the last elements of a
tensor, and of each thread's part of it, by other instructions than those before, and some of its updates then round
otherwise (decision 0061).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

__all__ = ["Pieces"]

_PIECE_ELEMENTS: Final = 1 << 20
_TRIED_ELEMENTS: Final = 8205
_TRIED_PIECE: Final = 61
"""Nearly half of such a piece is no whole pair of the widest registers, so it is computed as the end of a tensor is."""


class Pieces:
    """The pieces of what an optimizer updates. They share the memory of the whole, and their state that of its state.

    make: makes an optimizer of the same class from param groups
    """

    def __init__(self, optimizer: torch.optim.Optimizer, make: Callable[..., torch.optim.Optimizer]) -> None:
        self._optimizer = optimizer
        self._make = make
        self._cut: dict[torch.Tensor, list[torch.Tensor]] = {}
        self._tried: dict[object, bool] = {}

    def of(self, tensors: Sequence[torch.Tensor], group: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return what the optimizer is to update in the place of `tensors`, with the options of their param group."""
        found: list[torch.Tensor] = []
        for tensor in tensors:
            grad = tensor.grad
            if grad is None or tensor.numel() <= _PIECE_ELEMENTS or not self._is_same(tensor, grad, group):
                self._make_whole(tensor)
                found.append(tensor)
                continue
            if tensor not in self._cut:
                self._cut[tensor] = self._pieces_of(tensor)
            for piece, part in zip(self._cut[tensor], _parts(grad, _PIECE_ELEMENTS), strict=True):
                piece.grad = part
            found += self._cut[tensor]
        return found

    def update_ended(self) -> None:
        """Bring what the pieces have as their state into that of the whole tensors, where it is not there already."""
        for tensor, pieces in self._cut.items():
            whole, begin = self._optimizer.state[tensor], 0
            for piece in pieces:
                end = begin + piece.numel()
                state = self._optimizer.state[piece]
                for name, value in state.items():
                    if not _is_elementwise(value, piece):
                        whole[name] = value
                        continue
                    if not _is_elementwise(whole.get(name), tensor):
                        whole[name] = torch.empty(tensor.shape, dtype=value.dtype)
                    shared = whole[name].view(-1)[begin:end]
                    if value.data_ptr() != shared.data_ptr():
                        # The update has made it anew, as the first one does.
                        state[name] = shared.copy_(value)
                begin = end

    def _make_whole(self, tensor: torch.Tensor) -> None:
        """Forget the pieces of a tensor: its own updates would not be counted in their state."""
        for piece in self._cut.pop(tensor, ()):
            self._optimizer.state.pop(piece, None)

    def _pieces_of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        pieces = list(_parts(tensor.detach(), _PIECE_ELEMENTS))
        for name, value in self._optimizer.state.get(tensor, {}).items():
            if _is_elementwise(value, tensor):
                values: Iterator[Any] = _parts(value, _PIECE_ELEMENTS)
            else:
                # A count of updates is advanced in each of them.
                values = (value.clone() if isinstance(value, torch.Tensor) else value for _ in pieces)
            for piece, part in zip(pieces, values, strict=True):
                self._optimizer.state[piece][name] = part
        return pieces

    def _is_same(self, tensor: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> bool:
        """Return whether an update with such options gives pieces the bits of the whole: which operations it makes
        depends on the options that are on, and not on their values."""
        # A fused update goes through memory once: there is nothing to win.
        if group.get("fused") or not (tensor.is_contiguous() and grad.is_contiguous()):
            return False
        options = {name: value for name, value in group.items() if name != "params"}
        on = frozenset((name, type(value), _is_on(value)) for name, value in options.items())
        key = tensor.dtype, grad.dtype, torch.get_num_threads(), on
        if key not in self._tried:
            self._tried[key] = self._try(tensor.dtype, grad.dtype, options)
        return self._tried[key]

    def _try(self, dtype: torch.dtype, grad_dtype: torch.dtype, options: Mapping[str, Any]) -> bool:
        weights, *grads = _numbers()
        made = []
        for size in (_TRIED_ELEMENTS, _TRIED_PIECE):
            tensor = weights.to(dtype)
            pieces = list(_parts(tensor, size))
            optimizer = self._make([{**options, "params": pieces}])
            for grad in grads:
                for piece, part in zip(pieces, _parts(grad.to(grad_dtype), size), strict=True):
                    piece.grad = part
                step = type(optimizer).step
                getattr(step, "__wrapped__", step)(optimizer)
            states = [optimizer.state[piece] for piece in pieces]
            kinds = [name for name, value in states[0].items() if _is_elementwise(value, pieces[0])]
            made.append([tensor, *(torch.cat([state[name] for state in states]) for name in kinds)])
        whole, in_pieces = made
        return len(whole) == len(in_pieces) and all(map(_are_same_bits, whole, in_pieces))


def _numbers() -> Iterator[torch.Tensor]:
    """Yield weights and the gradients of two updates: numbers of all sizes, and what is none."""
    generator = torch.Generator().manual_seed(0)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 3e38])
    for most in (1, 10, 10):
        size = torch.randint(-40, most, (_TRIED_ELEMENTS,), generator=generator)
        numbers = torch.ldexp(torch.randn(_TRIED_ELEMENTS, generator=generator), size)
        places = torch.randint(0, _TRIED_ELEMENTS, (8 * len(special),), generator=generator)
        numbers[places] = special.repeat(8)
        yield numbers


def _parts(tensor: torch.Tensor, elements: int) -> Iterator[torch.Tensor]:
    yield from torch.split(tensor.view(-1), elements)


def _is_elementwise(value: object, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape


def _is_on(value: object) -> bool:
    return any(value) if isinstance(value, tuple) else bool(value)


def _are_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
