"""One checkpoint as exporters and predicates read it: logical tensors in bounded memory, and the decoded objects.

A step that was made again from a redo log is read in the same way; its tensors are in memory already.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from capture.load.assignments import Assignment, assign
from capture.load.objects import read_objects
from capture.load.read_into import read_into
from capture.redo.steps import RedoRef, find_step
from capture.state.dtypes import torch_dtype
from catalog.access.pins import pin_while_alive
from catalog.errors import NotFoundError
from catalog.history import History
from catalog.read.fragments import StoredTensor, choose, stored_tensors
from catalog.records import CheckpointRef, RunFacts
from dshistory.tensors.stream import NOTHING_HELD, FragmentStream, Held

if TYPE_CHECKING:
    from capture.load.rebuilt import RebuiltStep

__all__ = ["CheckpointTensors", "MadeAgain"]

MadeAgain: TypeAlias = Callable[[RedoRef], "RebuiltStep"]
"""Makes a step of a redo log again."""


class CheckpointTensors:
    """The tensors and objects of one checkpoint; nothing is read before it is asked for, and it is not removed
    meanwhile.

    advance: is called with the bytes of every piece that was read
    made_again: makes a step of a redo log again, where not each is made by itself
    """

    def __init__(
        self,
        history: History,
        ref: CheckpointRef,
        *,
        advance: Callable[[int], None],
        made_again: MadeAgain | None = None,
    ) -> None:
        self.ref = ref
        self._root = history.root
        self._history = history
        self._advance = advance
        step = _step(history, ref)
        make = made_again or partial(_made_again, history)
        self._rebuilt = make(step) if isinstance(step, RedoRef) else None
        pin_while_alive(self, history.paths, step.base if isinstance(step, RedoRef) else ref)
        self.tensors = stored_tensors(history.state_extents(ref) if self._rebuilt is None else self._rebuilt.extents)

    @cached_property
    def facts(self) -> RunFacts:
        """The facts of the checkpoint's run."""
        return self._history.run_facts(self.ref.run)

    @cached_property
    def objects(self) -> Mapping[str, Any]:
        """The decoded objects by name, as rank 0 stored them."""
        if self._rebuilt is not None:
            return self._rebuilt.objects(0)
        extents = self._history.extents(self.ref, kinds=("object", "object_tensor"))
        return read_objects(self._root, choose(extents, rank=0))

    @property
    def held(self) -> Held:
        """The part of its tensors that is in memory and not on the disk."""
        return NOTHING_HELD if self._rebuilt is None else self._rebuilt.held

    @property
    def nbytes(self) -> int:
        """The size of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def of_kind(self, kind: str) -> dict[str, StoredTensor]:
        """Return the tensors of one kind by name; empty when there are none."""
        return {name: tensor for (one, name), tensor in self.tensors.items() if one == kind}

    def parameters(self, weights: str) -> dict[str, StoredTensor]:
        """Return a tensor for every parameter, by its first name: "model" gives the weights as the forward pass uses
        them, "master" the fp32 weights that the optimizer updates, the name of a State Provider its average of them.

        With "master", parameters without a master weight (frozen ones) are as the model has them. NotFoundError when
        the checkpoint has no weights, low-precision weights only, or no such average of each of them.
        """
        model, master = self.of_kind("model"), self.of_kind("master")
        if not model:
            raise NotFoundError(f"checkpoint {self.ref} has no weights (kind 'model'), so there is nothing to export")
        if weights == "model":
            return model
        if weights != "master":
            return self._averages(weights, model, prefix=self._prefix(weights))
        low = sorted(name for name, tensor in model.items() if tensor.dtype in ("BF16", "F16"))
        if low and not master:
            raise NotFoundError(
                f"checkpoint {self.ref} has no master weights: {low[0]!r} and {len(low) - 1} more are "
                f"{model[low[0]].dtype} alone; export weights='model', as safetensors, huggingface, dcp or torch"
            )
        return {**model, **{name: master[name] for name in model.keys() & master.keys()}}

    @cached_property
    def buffers(self) -> dict[str, StoredTensor]:
        """The persistent buffers by name; where ranks differ, those of rank 0."""
        transient = self.objects.get("buffers", {}).get("non_persistent", ())
        return {name: tensor for name, tensor in self.of_kind("buffer").items() if name not in transient}

    def state_dict(self, weights: str) -> dict[str, StoredTensor]:
        """Return the tensors of `module.state_dict()`, parameters and buffers, each under its first name, sorted by
        name. Buffers that an average has too are those of the average.
        """
        return dict(sorted({**self.parameters(weights), **self.buffers, **self._buffers_of(weights)}.items()))

    def aliases(self) -> dict[str, str]:
        """Return {further name: first name} of tied tensors."""
        kinds = (self.of_kind("model"), self.buffers)
        return {alias: name for kind in kinds for name, tensor in kind.items() for alias in tensor.aliases}

    def _buffers_of(self, weights: str) -> dict[str, StoredTensor]:
        """Return the persistent buffers that an average has too, as it has them."""
        if weights in ("model", "master"):
            return {}
        average, prefix = self.of_kind(weights), self._prefix(weights)
        return {name: average[prefix + name] for name in self.buffers if prefix + name in average}

    def _prefix(self, kind: str) -> str:
        """Return what stands before the names of the model's weights in the tensors of a kind, as `module.` in a torch
        AveragedModel: of all that are found, the one with which most weights are found, and of those the shortest.
        NotFoundError when the checkpoint has no such kind.
        """
        model, average = self.of_kind("model"), self.of_kind(kind)
        if not average:
            kinds = ", ".join(sorted({one for one, _ in self.tensors}))
            raise NotFoundError(
                f"checkpoint {self.ref} has no weights of kind {kind!r}: weights= is 'model', 'master' or the name "
                f"of a State Provider; the kinds are {kinds}"
            )
        known = {name for tensor in model.values() for name in (tensor.name, *tensor.aliases)}
        cuts = ((name, [0, *(i + 1 for i, letter in enumerate(name) if letter == ".")]) for name in average)
        found = Counter(name[:at] for name, places in cuts for at in places if name[at:] in known)
        return min(found, key=lambda prefix: (-found[prefix], len(prefix)), default="")

    def _averages(self, kind: str, model: Mapping[str, StoredTensor], *, prefix: str) -> dict[str, StoredTensor]:
        average = self.of_kind(kind)
        found: dict[str, StoredTensor] = {}
        for name, weight in model.items():
            names = (prefix + known for known in (name, *weight.aliases))
            tensor = next((average[known] for known in names if known in average), None)
            if tensor is None or tensor.shape != weight.shape:
                has = "none" if tensor is None else f"one of shape {tensor.shape}, not {weight.shape}"
                raise NotFoundError(
                    f"checkpoint {self.ref}: {kind} has no tensor for each weight of the model: for {name!r} {has}; "
                    f"its tensors are {', '.join(sorted(average)[:5])}{', ...' if len(average) > 5 else ''}; "
                    f"dshistory.restore({self.ref.step}, kinds={kind!r}) reads them as they are"
                )
            found[name] = tensor
        return found

    def pieces(self, tensor: StoredTensor) -> Iterator[torch.Tensor]:
        """Yield the elements front to back, flat, in bounded pieces. A piece that is a whole fragment is verified."""
        stream = FragmentStream(self._root, tensor, held=self.held)
        while numel := stream.ready():
            piece = stream.take(numel)
            self._advance(piece.nbytes)
            yield piece

    def whole(self, tensor: StoredTensor) -> torch.Tensor:
        """Return the whole tensor in host memory."""
        made = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype))
        flat, at = made.view(-1), 0
        for piece in self.pieces(tensor):
            flat[at : at + piece.numel()] = piece
            at += piece.numel()
        return made

    def loaded(self, weights: str = "model") -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Read the parameters, and all buffers, into host memory, each under all of its names; every byte is verified.

        `weights` is as for `parameters`. The buffers are those of rank 0, and include those that are not persistent.
        """
        found: list[dict[str, torch.Tensor]] = []
        assignments: list[Assignment] = []
        aliases = {name: tensor.aliases for (kind, name), tensor in self.tensors.items() if kind in ("model", "buffer")}
        for tensors in (self.parameters(weights), self.of_kind("buffer") | self._buffers_of(weights)):
            made: dict[str, torch.Tensor] = {}
            for name, stored in tensors.items():
                tensor = torch.empty(stored.shape, dtype=torch_dtype(stored.dtype))
                assignments += assign(stored.fragments, tensor, start=0, numel=stored.numel)
                made |= dict.fromkeys((name, *aliases.get(name, ())), tensor)
            found.append(made)
        self.fill(assignments)
        return found[0], found[1]

    def fill(self, assignments: Sequence[Assignment]) -> None:
        """Read the assigned parts of tensors into their destinations, each verified against its fragment's checksum."""
        read_into(self._root, assignments, {} if self._rebuilt is None else self._rebuilt.kept())
        self._advance(sum(each.numel * each.destination.element_size() for each in assignments))


def _step(history: History, ref: CheckpointRef) -> CheckpointRef | RedoRef:
    try:
        return find_step(history, ref)
    except NotFoundError:
        # It was there a moment ago: pinning it says that it was removed.
        return ref


def _made_again(history: History, step: RedoRef) -> "RebuiltStep":
    # Only here, so that reading a checkpoint loads none of what makes updates.
    from capture.redo.rebuild import rebuilt_step

    return rebuilt_step(history, step)
