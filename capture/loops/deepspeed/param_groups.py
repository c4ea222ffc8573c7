"""The param groups of a DeepSpeed optimizer as data, the object `optimizer` of a checkpoint.

The object has these fields:
  - `class`: the qualified name of the optimizer's class, and with DeepSpeed's Adam `adam_w_mode`;
  - `groups`: for each param group its hyperparameters, and in `params` the logical names of its parameters;
  - `kinds`: the keys of the optimizer state that is stored as tensors;
  - `state`: for each key whose value a whole group shares, such as `step`, one value per group; None where a group has
    no value yet.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from capture.loops.deepspeed.flat_tensors import Flat
from capture.state.optimizer_match import rule_facts
from catalog.errors import MismatchError

__all__ = [
    "class_name",
    "is_flat",
    "match_groups",
    "read_groups",
    "set_shared",
    "shared_values",
    "write_groups",
]

_SHOWN = 3
# These say which parameters a group has and over which ranks it is divided. They are this engine's, never the
# checkpoint's.
_STRUCTURE = ("params", "moe", "name")


def class_name(optimizer: Any) -> str:
    """Return the qualified name of an optimizer's class."""
    name: str = rule_facts(optimizer)["class"]
    return name


def read_groups(inner: Any, group_names: Sequence[Sequence[str]], flats: Sequence[Flat]) -> dict[str, Any]:
    """Return the object `optimizer` of `inner`, the optimizer that DeepSpeed wraps. Equal on every rank."""
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": list(names)}
        for group, names in zip(inner.param_groups, group_names, strict=True)
    ]
    # The first flat speaks for its group: the update treats all flats of a group alike, so their shared values are
    # equal.
    shared = [shared_values(inner, next((f for f in flats if f.group == index), None)) for index in range(len(groups))]
    keys = sorted({key for values in shared for key in values})
    kinds = {key for flat in flats for key, value in inner.state.get(flat.tensor, {}).items() if is_flat(value, flat)}
    return {
        **rule_facts(inner),
        "groups": groups,
        "kinds": sorted(kinds),
        "state": {key: [values.get(key) for values in shared] for key in keys},
    }


def is_flat(value: Any, flat: Flat) -> bool:
    """Return whether a state value has one element for each element of its flat."""
    return isinstance(value, torch.Tensor) and value.shape == flat.tensor.shape


def shared_values(inner: Any, flat: Flat | None) -> dict[str, Any]:
    """Return the state values that all elements of a flat share: 0-dim tensors and plain numbers."""
    if flat is None:
        return {}
    state = inner.state.get(flat.tensor, {})
    return {
        key: value.detach() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
        if value is not None and not is_flat(value, flat) and (not isinstance(value, torch.Tensor) or value.dim() == 0)
    }


def match_groups(group_names: Sequence[Sequence[str]], saved: Mapping[str, Any], *, frozen: frozenset[str]) -> None:
    """Raise MismatchError unless the checkpoint has the same param groups of the same parameters.

    Parameters that are `frozen` here may be in a group of the checkpoint: this engine's optimizer does not hold them.
    """
    groups = saved["groups"]
    if len(groups) != len(group_names):
        raise MismatchError(
            f"the checkpoint has {len(groups)} optimizer param groups, this engine has {len(group_names)}; build the "
            "optimizer with the same groups"
        )
    for index, (names, group) in enumerate(zip(group_names, groups, strict=True)):
        lacking = sorted(set(names) - set(group["params"]))
        surplus = sorted(set(group["params"]) - set(names) - frozen)
        if lacking or surplus:
            raise MismatchError(
                f"optimizer param group {index}: only in this engine {_shown(lacking)}, only in the checkpoint "
                f"{_shown(surplus)}; build the optimizer with the same groups"
            )


def write_groups(inner: Any, saved: Mapping[str, Any]) -> None:
    """Restore the hyperparameters; from another optimizer class, only those that `inner` also has."""
    same = saved["class"] == class_name(inner)
    for group, stored in zip(inner.param_groups, saved["groups"], strict=True):
        for key, value in stored.items():
            if key in _STRUCTURE or not (same or key in group):
                continue
            # A tensor (`lr` of a capturable optimizer) keeps its memory: graphs that were captured before read from
            # there.
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = value


def set_shared(inner: Any, flat: Flat, key: str, value: Any) -> None:
    """Set one shared value of a flat's state, in the form that `inner` itself uses."""
    state = inner.state[flat.tensor]
    if isinstance(state.get(key), torch.Tensor):
        state[key].copy_(torch.as_tensor(value))
    elif type(inner).__module__.startswith("torch."):
        # torch keeps `step` as a tensor, on the device only where the update runs wholly there; DeepSpeed's own
        # optimizers keep Python numbers.
        group = inner.param_groups[flat.group]
        device = flat.tensor.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
        dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float32
        state[key] = torch.as_tensor(value).detach().clone().to(device=device, dtype=dtype)
    else:
        number = value.item() if isinstance(value, torch.Tensor) else value
        state[key] = int(number) if key == "step" else number


def _shown(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) for name in names[:_SHOWN]) + more
