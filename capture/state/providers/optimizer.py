"""A plain torch optimizer's state, addressed by the logical names of the parameters it belongs to.

The object `optimizer`: `class`; `groups`, each the hyperparameters and `params`, the logical names; `kinds`, the state
kept as tensors shaped like their parameter; `other_kinds`, tensors of another shape, such as a 0-dim `step`; `values`,
by name, the state that is no tensor; `globals`, the state that belongs to no parameter, tensors by value.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import torch

from capture.state.dtensor import local_of_dtensors, local_part
from capture.state.dtypes import torch_dtype
from capture.state.interface import Available, ReadAt, TensorItem
from capture.state.module_tree import ModuleTree, tensor_marks
from capture.state.optimizer_match import require_same_rule, rule_facts
from capture.state.optimizer_state import state_tensors
from capture.state.own_kinds import OWN_KINDS
from catalog.errors import MismatchError, UnsupportedError
from catalog.records import Placement

__all__ = ["TorchOptimizer"]


class TorchOptimizer:
    """State tensors as live references (0-dim ones taken at once), hyperparameters and the rest as data.

    A restore creates the state that this optimizer does not have yet and drops what the checkpoint does not have, but
    only once the bytes are there: one that is refused leaves the optimizer as it was.
    """

    is_looked_at = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module,
        *,
        name: str = "optimizer",
        read_at: ReadAt | Callable[[], ReadAt] = "before_update",
    ) -> None:
        """`name` is the object's: each optimizer of several has another. `read_at` says when the object is read, whose
        hyperparameters a scheduler may move after the update; a function is asked every time.
        """
        self._optimizer = optimizer
        self._name = name
        self._read_at = read_at
        self._tree = ModuleTree(module, of="parameters")
        self._restored: dict[torch.Tensor, dict[str, torch.Tensor]] | None = None
        self._shared: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"<TorchOptimizer {self._name!r}: {type(self._optimizer).__qualname__}>"

    @property
    def read_at(self) -> ReadAt:
        return self._read_at() if callable(self._read_at) else self._read_at

    def tensors(self) -> Sequence[TensorItem]:
        return [
            _item(name, key, value)
            for name, parameter in self._named()
            for key, value in self._state(parameter).items()
            if isinstance(value, torch.Tensor) and key not in self._shared
        ]

    def fingerprint(self) -> Hashable:
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        states = [self._optimizer.state.get(parameter) or {} for parameter in parameters]
        values = [value for state in states for value in state.values()]
        # Others have no address; `tensors` refuses them by name.
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.layout is torch.strided]
        keys = tuple(map(len, states)), tuple(chain.from_iterable(states)), tuple(map(type, values))
        return self._tree.shape(), tuple(map(id, parameters)), keys, tensor_marks(tensors)

    def roots(self) -> tuple[Iterable[Any], Sequence[torch.Tensor]]:
        parameters = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        states, tensors = state_tensors(self._optimizer.state.values())
        return chain(parameters, states, tensors), local_of_dtensors(tensors)

    def objects(self) -> Mapping[str, tuple[Any, Placement]]:
        names = self._names()
        kinds: set[str] = set()
        other_kinds: set[str] = set()
        values: dict[str, dict[str, Any]] = {}
        for name, parameter in self._named():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    (kinds if value.shape == parameter.shape else other_kinds).add(key)
                else:
                    values.setdefault(name, {})[key] = value
        groups = [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [names[p] for p in group["params"]],
            }
            for group in self._optimizer.param_groups
        ]
        content = {
            **rule_facts(self._optimizer),
            "groups": groups,
            "kinds": sorted(kinds),
            "other_kinds": sorted(other_kinds - kinds),
            "values": values,
            "globals": self._globals(),
            "state": {},
        }
        return {self._name: (content, "replicated")}

    def prepare(self, available: Available) -> None:
        self._restored, self._shared = None, frozenset()
        saved = available.objects.get(self._name)
        if saved is None:
            return
        require_same_rule(saved["class"], rule_facts(self._optimizer)["class"])
        self._match_groups(saved["groups"])
        kinds = [*saved["kinds"], *saved.get("other_kinds", ())]
        restored: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for index, group in enumerate(self._optimizer.param_groups):
            for name, parameter in zip(saved["groups"][index]["params"], group["params"], strict=True):
                target = restored[parameter] = {}
                for kind in kinds:
                    if (kind, name) in available.tensors:
                        target[kind] = self._target(parameter, kind, group, *available.tensors[kind, name])
                for key, shared in saved["state"].items():
                    if target and shared[index] is not None:
                        target[key] = _place(torch.as_tensor(shared[index]).clone(), key, group, parameter)
        # What ZeRO has once per group comes with the object, so no tensor of the checkpoint is to be asked for it.
        self._restored, self._shared = restored, frozenset(saved["state"])

    def finish(self, available: Available) -> None:
        saved = available.objects.get(self._name)
        if saved is None or self._restored is None:
            return
        for group, stored in zip(self._optimizer.param_groups, saved["groups"], strict=True):
            for key, value in stored.items():
                if key == "params":
                    continue
                if isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(torch.as_tensor(value))
                else:
                    group[key] = value
        for name, parameter in self._named():
            state = {**self._restored.get(parameter, {}), **saved.get("values", {}).get(name, {})}
            self._optimizer.state.pop(parameter, None)
            if state:
                self._optimizer.state[parameter].update(state)
        for key in self._globals():
            del self._optimizer.state[key]
        self._optimizer.state.update(saved.get("globals", {}))
        self._restored, self._shared = None, frozenset()

    def _globals(self) -> dict[Any, Any]:
        return {key: value for key, value in self._optimizer.state.items() if not isinstance(key, torch.Tensor)}

    def _state(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        if self._restored is not None:
            return self._restored.get(parameter, {})
        state: Mapping[str, Any] = self._optimizer.state.get(parameter, {})
        return state

    def _target(
        self, parameter: torch.Tensor, kind: str, group: Mapping[str, Any], shape: tuple[int, ...], dtype: str
    ) -> torch.Tensor:
        held = self._optimizer.state.get(parameter, {}).get(kind)
        if isinstance(held, torch.Tensor) and tuple(held.shape) == shape and held.dtype == torch_dtype(dtype):
            return held
        if shape == tuple(parameter.shape) and parameter.dim():
            return torch.zeros_like(parameter, dtype=torch_dtype(dtype), requires_grad=False)
        return _place(torch.zeros(shape, dtype=torch_dtype(dtype)), kind, group, parameter)

    def _names(self) -> dict[torch.Tensor, str]:
        return {parameter: name for name, parameter, _ in self._tree}

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters that the optimizer updates, with their names."""
        names = self._names()
        for index, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in names:
                    raise UnsupportedError(
                        f"param group {index} of the optimizer has a parameter of shape {tuple(parameter.shape)} that "
                        "is not in the module, so it has no name; put it into the module that is captured"
                    )
                yield names[parameter], parameter

    def _match_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        names = self._names()
        mine = [[names[parameter] for parameter in group["params"]] for group in self._optimizer.param_groups]
        theirs = [list(group["params"]) for group in saved]
        if mine == theirs:
            return
        if len(mine) != len(theirs):
            raise MismatchError(
                f"the checkpoint has {len(theirs)} optimizer param groups, this optimizer {len(mine)}; build it with "
                "the same groups: nothing was changed"
            )
        index = next(index for index, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
        only_here = sorted(set(mine[index]) - set(theirs[index]))[:3]
        only_there = sorted(set(theirs[index]) - set(mine[index]))[:3]
        raise MismatchError(
            f"optimizer param group {index}: only in this optimizer {only_here or 'nothing'}, only in the checkpoint "
            f"{only_there or 'nothing'}; build it with the same parameters in the same order: nothing was changed"
        )


def _item(name: str, key: str, value: torch.Tensor) -> TensorItem:
    if value.layout is not torch.strided:
        raise UnsupportedError(
            f"optimizer state {key!r} of {name!r} has the layout {value.layout}: only dense tensors can be captured; "
            "where sparse gradients made it, build the embedding with sparse=False"
        )
    part = local_part(value, what=f"optimizer state {key!r} of {name!r}")
    when: Literal["lazy", "eager"] = "lazy" if value.dim() else "eager"
    owner = value if part.through is None else None
    place = part.start, part.placement
    return TensorItem(name, _kind(key, name), part.shape, part.tensor, *place, when, (), part.through, owner)


def _kind(key: str, name: str) -> str:
    if key in OWN_KINDS:
        raise UnsupportedError(
            f"optimizer state {key!r} of {name!r} has the name of a reserved kind; rename it in the optimizer"
        )
    return key


def _place(value: torch.Tensor, key: str, group: Mapping[str, Any], parameter: torch.Tensor) -> torch.Tensor:
    """Move a state tensor to the device where torch's own optimizers keep it: `step` on the CPU, unless the update runs
    wholly on the parameter's device.
    """
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return value.to(parameter.device) if on_device else value
