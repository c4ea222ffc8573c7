"""What an optimizer was told to do with each parameter: its rule and the hyperparameters of its group.

A checkpoint has them in its objects `optimizer*`. They are read right before the next update, so those of the
checkpoint before an update are the ones that it used.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from dshistory.tensors.checkpoint_tensors import CheckpointTensors

__all__ = ["Rule", "rules_of", "step_counts"]

Family = Literal["adam", "sgd"]

_FAMILIES: Final[dict[str, Family]] = {
    "Adam": "adam",
    "AdamW": "adam",
    "DeepSpeedCPUAdam": "adam",
    "FusedAdam": "adam",
    "SGD": "sgd",
}
"""By the name of the class. Subclasses may do anything, so they are not in it."""

_DECOUPLED: Final = {"Adam": False, "AdamW": True}
"""Whether weight decay acts on the weights and not on the gradient. DeepSpeed's optimizers do not record it."""


@dataclass(frozen=True)
class Rule:
    """The rule for one parameter. `decoupled` is None where the checkpoint does not say it."""

    optimizer: str
    family: Family | None
    """None: an optimizer whose rule is not known here."""
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool | None
    momentum: float
    dampening: float
    nesterov: bool
    amsgrad: bool


def rules_of(checkpoint: CheckpointTensors) -> dict[str, Rule]:
    """Return the rule of every parameter that an optimizer of the checkpoint holds, by logical name."""
    return {
        name: _rule(saved["class"].rpartition(".")[2], group)
        for saved in _optimizers(checkpoint)
        for group in saved["groups"]
        for name in group["params"]
    }


def step_counts(checkpoint: CheckpointTensors) -> dict[str, int]:
    """Return how many updates each parameter has had by the optimizer's own count; a parameter without one is not in
    it."""
    counts = {name: int(checkpoint.whole(tensor)) for name, tensor in checkpoint.of_kind("step").items()}
    for saved in _optimizers(checkpoint):
        shared = saved.get("state", {}).get("step", [])
        for group, count in zip(saved["groups"], shared, strict=False):
            if count is not None:
                counts.update({name: int(count) for name in group["params"] if name not in counts})
        for name, values in saved.get("values", {}).items():
            if "step" in values:
                counts.setdefault(name, int(values["step"]))
    return counts


def _optimizers(checkpoint: CheckpointTensors) -> Iterator[Mapping[str, Any]]:
    for saved in checkpoint.objects.values():
        if isinstance(saved, Mapping) and {"class", "groups", "kinds"} <= saved.keys():
            yield saved


def _rule(optimizer: str, group: Mapping[str, Any]) -> Rule:
    betas = group.get("betas", (0.0, 0.0))
    return Rule(
        optimizer=optimizer,
        family=_FAMILIES.get(optimizer),
        lr=float(group["lr"]),
        betas=(float(betas[0]), float(betas[1])),
        eps=float(group.get("eps", 0.0)),
        weight_decay=float(group.get("weight_decay", 0.0)),
        decoupled=group.get("decoupled_weight_decay", _DECOUPLED.get(optimizer)),
        momentum=float(group.get("momentum", 0.0)),
        dampening=float(group.get("dampening", 0.0)),
        nesterov=bool(group.get("nesterov", False)),
        amsgrad=bool(group.get("amsgrad", False)),
    )
