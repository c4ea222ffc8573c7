"""The State Provider of a DeepSpeed optimizer: weights, master weights and optimizer state as fragments of logical
tensors.

It is duck-typed and imports no deepspeed. The items are views into the engine's own flat tensors, so a plan can
coalesce a whole partition into one run of memory. Values that every element of a flat shares (Adam's `step`) are stored
once per param group in the object `optimizer`.

Under ZeRO 3 `param.data` is never used. It is the gathered weight while a module runs, and an empty tensor otherwise;
for persistent parameters it stays gathered across steps and is stale after a restore. `param.ds_tensor`,
this rank's partition, changes only with an update, and `param.ds_shape`, the shape of the whole, never. A snapshot
therefore gathers nothing, needs no collective, and may read the weights until the next update.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from capture.loops.deepspeed.bias_correction import repeat_products
from capture.loops.deepspeed.flat_tensors import Flat, flat_tensors, flats_of, group_parameters, local_partition
from capture.loops.deepspeed.param_groups import (
    class_name,
    is_flat,
    match_groups,
    read_groups,
    set_shared,
    write_groups,
)
from capture.loops.deepspeed.topology import Topology, merge_groups
from capture.state.dtypes import torch_dtype
from capture.state.interface import Available, ReadAt, TensorItem
from capture.state.module_tree import ModuleTree, tensor_marks
from capture.state.optimizer_match import require_same_rule
from capture.state.optimizer_state import state_tensors
from catalog.errors import MismatchError, RestoreError, SetupError, UnsupportedError
from catalog.records import Placement

__all__ = ["ZeroState"]


class ZeroState:
    """The State Provider of `optimizer`, a DeepSpeed optimizer over the parameters of `module`.

    A restore writes the weights as they were stored. Where the checkpoint has them in another precision, they are
    derived from the restored master weights instead, as the optimizer itself does after an update. Optimizer state that
    this process does not have yet is created. State that the checkpoint does not have, because it was taken before the
    first update, is dropped.
    """

    read_at: ReadAt = "before_update"
    is_looked_at = False

    def __init__(self, optimizer: Any, module: torch.nn.Module, *, topology: Topology | None) -> None:
        """`topology` is given where the ranks hold different parameters; making the provider is then a collective."""
        self._optimizer = optimizer
        self._topology = topology
        self._tree = ModuleTree(module, of="parameters")
        self._restoring: Available | None = None
        self._created: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._steps: dict[str, torch.Tensor] = {}
        self._groups = self._local_groups() if topology is None else merge_groups(self._local_groups())

    def __repr__(self) -> str:
        return f"<ZeroState of {type(self._optimizer).__qualname__}>"

    def tensors(self) -> Sequence[TensorItem]:
        self._require_here()
        items = [*self._weights(), *self._masters(), *self._states()]
        if self._restoring is None:
            return self._own(items)
        kinds = {"master", *self._restoring.objects.get("optimizer", {"kinds": ()})["kinds"]}
        derived = self._derived(self._restoring)
        targets = (item for item in items if item.kind in kinds or (item.kind == "model" and item.name not in derived))
        return [*targets, *(TensorItem(name, "step", (), target) for name, target in self._steps.items())]

    def weights(self) -> Sequence[TensorItem]:
        self._require_here()
        return self._own(list(self._weights()))

    def fingerprint(self) -> Hashable:
        self._require_here()
        # Everything that decides which memory `tensors` lists, but no fragments: those follow from it, and computing
        # them at every snapshot would be slow.
        held = [getattr(parameter, "ds_tensor", parameter) for _, parameter, _ in self._tree]
        states = list(self._inner.state.values())
        values = [value for state in states for value in state.values()]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        keys = tuple(map(len, states)), tuple(chain.from_iterable(states)), tuple(map(type, values))
        return (
            self._tree.shape(),
            id(self._inner),
            keys,
            tensor_marks([*held, *flat_tensors(self._optimizer), *tensors]),
        )

    def roots(self) -> tuple[Iterable[Any], Sequence[torch.Tensor]]:
        self._require_here()
        holders, _ = self._tree.roots()
        # No item has an owner: all are views.
        held = [getattr(parameter, "ds_tensor", parameter) for _, parameter, _ in self._tree.found()]
        flats = flat_tensors(self._optimizer)
        states, tensors = state_tensors(self._inner.state.values())
        listed = [*held, *flats, *tensors]
        return chain(holders, (self._inner,), states, listed), listed

    def objects(self) -> Mapping[str, tuple[Any, Placement]]:
        return {"optimizer": (read_groups(self._inner, self._groups, self._flats()), "replicated")}

    def prepare(self, available: Available) -> None:
        self._forget()
        saved = available.objects.get("optimizer")
        if saved is not None:
            require_same_rule(saved["class"], class_name(self._inner))
            frozen = frozenset(name for name, parameter, _ in self._named() if not parameter.requires_grad)
            match_groups(self._groups, saved, frozen=frozen)
            for flat in self._flats():
                self._create_state(flat, saved, available)
            self._steps = self._step_targets(saved, available)
        self._restoring = available

    def finish(self, available: Available) -> None:
        saved = available.objects.get("optimizer")
        if saved is not None:
            write_groups(self._inner, saved)
            for flat in self._flats():
                self._install_state(flat, saved)
            repeat_products(self._inner)
            self._link_state()
        if self._derived(available):
            self._derive_weights()
        if hasattr(self._optimizer, "checkpoint_event_prologue"):
            # The gathered copies of persistent ZeRO 3 parameters are stale until they are released and gathered again.
            self._optimizer.checkpoint_event_prologue()
            self._optimizer.checkpoint_event_epilogue()
        self._forget()

    def _own(self, items: Sequence[TensorItem]) -> Sequence[TensorItem]:
        return items if self._topology is None else list(self._topology.own(items))

    def _require_here(self) -> None:
        if getattr(self._optimizer, "offloaded_states", None):
            raise SetupError(
                "the engine's states are offloaded; call engine.reload_states() before a snapshot or a restore"
            )

    def _forget(self) -> None:
        self._restoring = None
        self._created = {}
        self._steps = {}

    @property
    def _inner(self) -> Any:
        # Looked up each time, because DeepSpeed replaces the inner optimizer when it first sees an Adagrad.
        return self._optimizer.optimizer

    def _named(self) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
        """Yield every parameter once, with its first logical name and the further names that are tied to it."""
        for name, parameter, aliases in self._tree:
            yield self._logical(name), parameter, tuple(self._logical(alias) for alias in aliases)

    def _logical(self, name: str) -> str:
        return name if self._topology is None else self._topology.logical(name)

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter, _ in self._named()}

    def _flats(self) -> tuple[Flat, ...]:
        return flats_of(self._optimizer, self._names())

    def _local_groups(self) -> list[list[str]]:
        names = self._names()
        return [[names[id(parameter)] for parameter in group] for group in group_parameters(self._optimizer)]

    def _weights(self) -> Iterator[TensorItem]:
        written = self._written()
        for name, parameter, aliases in self._named():
            if not hasattr(parameter, "ds_tensor"):
                shape, mine = tuple(parameter.shape), written.get(name) if parameter.element_size() == 2 else None
                yield TensorItem(name, "model", shape, parameter.detach(), aliases=aliases, written=mine)
                continue
            start, part = local_partition(self._optimizer, parameter)
            # A rank whose partition is all padding has nothing of this parameter to write.
            if part.numel():
                yield TensorItem(name, "model", tuple(parameter.ds_shape), part, start, "partitioned", aliases=aliases)

    def _written(self) -> Mapping[str, tuple[int, int]]:
        """Return, of each weight of which the ranks hold disjoint ranges of the master, the range that this rank holds,
        which may be empty: who writes the master writes the same range of the weight, which need not be stored then.
        """
        flats = [flat for flat in self._flats() if flat.placement == "partitioned" and not flat.is_model]
        if self._topology is not None or not flats:
            return {}
        # Every rank has the same names here: who holds nothing of a master writes nothing of its weight.
        held = {name: (0, 0) for group in self._groups for name in group}
        return held | {one.name: (one.start, one.start + one.numel) for flat in flats for one in flat.fragments}

    def _masters(self) -> Iterator[TensorItem]:
        for flat in self._flats():
            if not flat.is_model:
                yield from _items(flat, "master", flat.tensor)

    def _states(self) -> Iterator[TensorItem]:
        for flat in self._flats():
            for key, value in self._state(flat).items():
                if is_flat(value, flat):
                    yield from _items(flat, key, value)
                elif isinstance(value, torch.Tensor) and value.dim() > 0:
                    raise UnsupportedError(
                        f"optimizer state {key!r} of {class_name(self._inner)} has shape {tuple(value.shape)}, the "
                        f"flat tensor that it belongs to has {tuple(flat.tensor.shape)}; it can't be addressed by "
                        "parameter, use an element-wise optimizer"
                    )

    def _state(self, flat: Flat) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._created.get(flat.tensor) or self._inner.state.get(flat.tensor, {})
        return state

    def _create_state(self, flat: Flat, saved: Mapping[str, Any], available: Available) -> None:
        held = {key for key, value in self._state(flat).items() if is_flat(value, flat)}
        kinds = set(saved["kinds"])
        if held and kinds and held != kinds:
            raise MismatchError(
                f"the checkpoint has optimizer state {sorted(kinds)} of {saved['class']}, this engine has "
                f"{sorted(held)} of {class_name(self._inner)}; use the same kind of optimizer"
            )
        if kinds and not held:
            dtypes = {kind: dtype for (kind, _), (_, dtype) in available.tensors.items()}
            # Kept here until the bytes have been read, and only then put into the optimizer's own state: a restore that
            # is refused must leave the optimizer able to train.
            self._created[flat.tensor] = {
                kind: torch.zeros_like(flat.tensor, dtype=torch_dtype(dtypes[kind]), requires_grad=False)
                for kind in saved["kinds"]
            }

    def _install_state(self, flat: Flat, saved: Mapping[str, Any]) -> None:
        self._inner.state[flat.tensor].update(self._created.get(flat.tensor, {}))
        if not saved["kinds"]:
            self._inner.state.pop(flat.tensor, None)
            return
        for key, values in saved["state"].items():
            set_shared(self._inner, flat, key, values[flat.group])
        if self._steps:
            set_shared(self._inner, flat, "step", self._common_step(flat.group))

    def _step_targets(self, saved: Mapping[str, Any], available: Available) -> dict[str, torch.Tensor]:
        """Return targets for `step` when the checkpoint has one per parameter, as plain torch optimizers have."""
        if "step" in saved["state"]:
            return {}
        names = (name for group in self._groups for name in group)
        return {name: torch.zeros(()) for name in names if ("step", name) in available.tensors}

    def _common_step(self, group: int) -> torch.Tensor:
        steps = [self._steps[name] for name in self._groups[group]]
        if any(not torch.equal(step, steps[0]) for step in steps):
            raise RestoreError(
                f"the parameters of optimizer group {group} had different numbers of updates in the checkpoint "
                f"({float(min(steps)):.0f} to {float(max(steps)):.0f}); a ZeRO partition counts them together, so "
                "training can't go on from there"
            )
        return steps[0]

    def _link_state(self) -> None:
        """Link the restored state to the parameters again, for DeepSpeed's `safe_get_full_optimizer_state`."""
        if hasattr(self._optimizer, "_lazy_init_hp_params_optimizer_state"):
            self._optimizer._hp_optimizer_states_linked = False
            if all(flat.tensor in self._inner.state for flat in self._flats()):
                self._optimizer._lazy_init_hp_params_optimizer_state()

    def _master_names(self) -> frozenset[str]:
        if all(flat.is_model for flat in self._flats()):
            return frozenset()
        return frozenset(name for group in self._groups for name in group)

    def _derived(self, available: Available) -> frozenset[str]:
        """Return the names of the weights that the checkpoint has in another precision.

        They must be derived from the master weights: converting them from the stored precision would not give the bits
        that an update gives.
        """
        masters = self._master_names()
        stored = {name: torch_dtype(dtype) for (kind, name), (_, dtype) in available.tensors.items() if kind == "model"}
        return frozenset(n for n, p, _ in self._named() if n in masters and stored.get(n, p.dtype) != p.dtype)

    def _derive_weights(self) -> None:
        if hasattr(self._optimizer, "update_lp_params"):
            self._optimizer.update_lp_params()
            return
        parameters = {name: parameter for name, parameter, _ in self._named()}
        for flat in self._flats():
            for fragment, master in flat.slices(flat.tensor):
                parameter = parameters[fragment.name]
                part = (
                    local_partition(self._optimizer, parameter)[1]
                    if hasattr(parameter, "ds_tensor")
                    else parameter.detach()
                )
                part.view(-1).copy_(master.reshape(-1))


def _items(flat: Flat, kind: str, value: torch.Tensor) -> Iterator[TensorItem]:
    for fragment, part in flat.slices(value):
        yield TensorItem(fragment.name, kind, fragment.shape, part, fragment.start, flat.placement)
