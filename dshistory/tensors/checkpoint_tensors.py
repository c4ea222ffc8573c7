"""One checkpoint as an exporter sees it: logical tensors in bounded memory, and the decoded objects."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, Literal, get_args

import torch

from capture.load.assignments import Assignment, choose
from capture.load.read_into import read_extents, read_into
from capture.state.dtypes import torch_dtype
from capture.state.objects import decode_object
from catalog.errors import NotFoundError, SetupError
from catalog.history import History
from catalog.records import CheckpointRef, RunFacts
from dshistory.tensors.stream import FragmentStream, StoredTensor, stored_tensors

__all__ = ["CheckpointTensors", "Weights", "checked_weights"]

Weights = Literal["model", "master"]
"""model: the weights as the forward pass uses them; master: the fp32 ones that the optimizer updates."""

_OBJECTS: Final = ("object", "object_tensor")


def checked_weights(name: str) -> Weights:
    """The choice itself. SetupError, with both choices, for any other."""
    for known in get_args(Weights):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise SetupError(f"weights={name!r}: must be one of {', '.join(get_args(Weights))}")


class CheckpointTensors:
    """The tensors and objects of one checkpoint; nothing is read before it is asked for. `advance` hears of every byte."""

    def __init__(self, history: History, ref: CheckpointRef, *, advance: Callable[[int], None]) -> None:
        self.ref = ref
        self._root = history.root
        self._history = history
        self._advance = advance
        self._extents = history.extents(ref)
        self.tensors = stored_tensors(self._extents)

    @cached_property
    def facts(self) -> RunFacts:
        """The facts of the checkpoint's run."""
        return self._history.run_facts(self.ref.run)

    @cached_property
    def objects(self) -> Mapping[str, Any]:
        """The stored objects, as rank 0 has them."""
        chosen = choose([extent for extent in self._extents if extent.kind in _OBJECTS], rank=0).by_key
        rows = [members[0] for members in chosen.values()]
        data = dict(zip(((row.kind, row.name) for row in rows), read_extents(self._root, rows), strict=True))
        shapes = {row.name: row.shape for row in rows}

        def tensor(name: str) -> torch.Tensor:
            return data["object_tensor", name].view(shapes[name])

        return {
            name: decode_object(name, flat.numpy().tobytes(), tensor=tensor)
            for (kind, name), flat in data.items()
            if kind == "object"
        }

    def of_kind(self, kind: str) -> dict[str, StoredTensor]:
        """The tensors of one kind by name; empty when there are none."""
        return {name: tensor for (one, name), tensor in self.tensors.items() if one == kind}

    def parameters(self, weights: Weights) -> dict[str, StoredTensor]:
        """A tensor for every parameter, by its first name. Of "master", parameters without one (frozen ones) are as the
        model has them.

        NotFoundError when the checkpoint has low-precision weights only."""
        model, master = self.of_kind("model"), self.of_kind("master")
        if not model:
            raise NotFoundError(f"checkpoint {self.ref} has no weights (kind 'model'), so there is nothing to export")
        if weights == "model":
            return model
        low = sorted(name for name, tensor in model.items() if tensor.dtype in ("BF16", "F16"))
        if low and not master:
            raise NotFoundError(
                f"checkpoint {self.ref} has no master weights: {low[0]!r} and {len(low) - 1} more are "
                f"{model[low[0]].dtype} alone; export weights='model', as safetensors, huggingface, dcp or torch"
            )
        return {**model, **{name: master[name] for name in model.keys() & master.keys()}}

    @cached_property
    def buffers(self) -> dict[str, StoredTensor]:
        """The persistent buffers by name; of what differs from rank to rank, rank 0's."""
        transient = self.objects.get("buffers", {}).get("non_persistent", ())
        return {name: tensor for name, tensor in self.of_kind("buffer").items() if name not in transient}

    def state_dict(self, weights: Weights) -> dict[str, StoredTensor]:
        """What `module.state_dict()` held, each tensor under its first name: parameters, then buffers, sorted by name."""
        return dict(sorted({**self.parameters(weights), **self.buffers}.items()))

    def aliases(self, weights: Weights) -> dict[str, str]:
        """Further name -> first name, of tied tensors."""
        kinds = (self.of_kind("model"), self.buffers)
        return {alias: name for kind in kinds for name, tensor in kind.items() for alias in tensor.aliases}

    def pieces(self, tensor: StoredTensor) -> Iterator[torch.Tensor]:
        """The elements front to back, flat, a bounded piece at a time, each verified against its checksum if it is whole."""
        stream = FragmentStream(self._root, tensor)
        while numel := stream.ready():
            piece = stream.take(numel)
            self._advance(piece.nbytes)
            yield piece

    def whole(self, tensor: StoredTensor) -> torch.Tensor:
        """The tensor in host memory."""
        made = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype))
        flat, at = made.view(-1), 0
        for piece in self.pieces(tensor):
            flat[at : at + piece.numel()] = piece
            at += piece.numel()
        return made

    def fill(self, assignments: Sequence[Assignment]) -> None:
        """Read the assigned parts of tensors into their destinations, each verified against its fragment's checksum."""
        read_into(self._root, assignments)
        self._advance(sum(each.numel * each.destination.element_size() for each in assignments))
