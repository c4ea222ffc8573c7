"""The orders of an optimizer for each parameter: its rule and the hyperparameters of its group.

A checkpoint has them in its objects `optimizer*`. A scheduler moves them after an update and some scripts right before
it, so what an update used stands in the checkpoint before it or in the one after it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from dshistory.tensors.checkpoint_tensors import CheckpointTensors

__all__ = ["Rule", "rules_of", "step_counts"]

Family = Literal["adam", "sgd"]

_FAMILIES: Final[dict[str, Family]] = {
    "torch.optim.adam.Adam": "adam",
    "torch.optim.adamw.AdamW": "adam",
    "torch.optim.sgd.SGD": "sgd",
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": "adam",
    "deepspeed.ops.adam.fused_adam.FusedAdam": "adam",
}
"""By the whole name of the class. Subclasses may do anything, so they are not in it."""


@dataclass(frozen=True)
class Rule:
    """The rule for one parameter; without a family its optimizer's rule is not known here, and all figures are 0."""

    optimizer: str
    family: Family | None = None
    lr: float = 0.0
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    weight_decay: float = 0.0
    decoupled: bool = False
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    amsgrad: bool = False
    bias_correction: bool = True
    in_float32: bool = False
    """The betas are those of float32, and their powers may be running products: so do DeepSpeed's kernels
    (csrc/includes/cpu_adam.h, csrc/adam/multi_tensor_adam.cu)."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the tensors that it keeps for a parameter, the one that gradients are added to first."""
        if self.family == "adam":
            return "exp_avg", "exp_avg_sq"
        return ("momentum_buffer",) if self.family == "sgd" and self.momentum else ()

    @property
    def coupled_decay(self) -> float:
        """The share of the weight that is added to its gradient, by weight decay that does not act on the weight
        itself."""
        return 0.0 if self.decoupled else self.weight_decay

    @property
    def decay(self) -> float:
        """The share of itself that a tensor loses in an update, by weight decay that acts on it and not on its
        gradient."""
        return self.lr * self.weight_decay if self.decoupled else 0.0


def rules_of(checkpoint: CheckpointTensors) -> dict[str, Rule]:
    """Return the rule of every parameter that an optimizer of the checkpoint holds, by logical name."""
    return {
        name: _rule(saved, group)
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
    objects = checkpoint.objects
    for saved in (objects[name] for name in objects if name.startswith("optimizer")):
        if isinstance(saved, Mapping) and {"class", "groups", "kinds"} <= saved.keys():
            yield saved


def _rule(saved: Mapping[str, Any], group: Mapping[str, Any]) -> Rule:
    name = saved["class"].rpartition(".")[2]
    family = _FAMILIES.get(saved["class"])
    if family is None:
        return Rule(name)
    betas = [float(beta) for beta in group.get("betas", (0.0, 0.0))]
    is_deepspeed = saved["class"].startswith("deepspeed.")
    if is_deepspeed:
        betas = torch.tensor(betas, dtype=torch.float32).tolist()
    decoupled = saved.get("adam_w_mode", True) if is_deepspeed else name == "AdamW"
    return Rule(
        optimizer=name,
        family=family,
        lr=float(group["lr"]),
        betas=(betas[0], betas[1]),
        eps=float(group.get("eps", 0.0)),
        weight_decay=float(group.get("weight_decay", 0.0)),
        decoupled=bool(group.get("decoupled_weight_decay", decoupled)),
        momentum=float(group.get("momentum", 0.0)),
        dampening=float(group.get("dampening", 0.0)),
        nesterov=bool(group.get("nesterov", False)),
        amsgrad=bool(group.get("amsgrad", False)),
        bias_correction=bool(group.get("bias_correction", True)),
        in_float32=is_deepspeed,
    )
