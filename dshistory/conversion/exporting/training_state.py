"""The state of an optimizer and an engine in one form, whether plain torch or any ZeRO stage wrote the checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from catalog.errors import NotFoundError, UnsupportedError
from catalog.read.fragments import StoredTensor
from dshistory.tensors.checkpoint_tensors import CheckpointTensors

__all__ = ["Training", "training_of"]

_DEEPSPEED = "0.19.8"  # the release whose files are written for runs that had none


@dataclass(frozen=True, slots=True)
class Training:
    """A training's state beyond its weights, as DeepSpeed's files need it.

    `groups`: for each optimizer group its trained parameters and their numbers of elements, in order. `hyper`: the
    hyperparameters of each group. `kinds`: state that has one element for each element of the parameter. `shared`: the
    other state, one value for each group.
    """

    groups: Sequence[Sequence[tuple[str, int]]]
    hyper: Sequence[Mapping[str, Any]]
    kinds: tuple[str, ...]
    shared: Sequence[Mapping[str, Any]]
    weights: Mapping[str, StoredTensor]
    masters: Mapping[str, StoredTensor]
    counters: Mapping[str, int]
    scaler: Mapping[str, Any]
    scheduler: Any
    config: Mapping[str, Any]
    version: str

    @property
    def frozen(self) -> list[str]:
        """The parameters that are in no group."""
        trained = {name for group in self.groups for name, _ in group}
        return [name for name in self.weights if name not in trained]

    @property
    def low_precision(self) -> str | None:
        """bf16 or fp16, as DeepSpeed's configuration names it; None for fp32."""
        dtypes = {self.weights[name].dtype for group in self.groups for name, _ in group}
        return "bf16" if "BF16" in dtypes else "fp16" if "F16" in dtypes else None


def training_of(checkpoint: CheckpointTensors) -> Training:
    """Return the training state of a checkpoint.

    NotFoundError when it has no optimizer state; UnsupportedError, which names the reason, for runs whose ranks held
    different parameters and for optimizers that DeepSpeed's checkpoints can't hold.
    """
    saved = checkpoint.objects.get("optimizer")
    if saved is None:
        raise NotFoundError(
            f"checkpoint {checkpoint.ref} has no optimizer state, which a DeepSpeed checkpoint needs; export it as "
            "safetensors, huggingface, dcp or torch"
        )
    facts = checkpoint.facts.facts
    _refuse_split(checkpoint, saved, facts)
    weights, masters = checkpoint.parameters("model"), checkpoint.parameters("master")
    names = [[name for name in group["params"] if weights[name].numel] for group in saved["groups"]]
    frozen = _untrained(checkpoint, saved, names)
    groups = [[(name, weights[name].numel) for name in group if name not in frozen] for group in names]
    own = {
        "global_steps": checkpoint.ref.step,
        "global_samples": 0,
        "skipped_steps": 0,
        "micro_steps": checkpoint.ref.step,
    }
    return Training(
        groups=groups,
        hyper=[{key: value for key, value in group.items() if key != "params"} for group in saved["groups"]],
        kinds=tuple(saved["kinds"]),
        shared=[_shared(checkpoint, saved, index, group) for index, group in enumerate(groups)],
        weights=weights,
        masters=masters,
        counters={**own, **checkpoint.objects.get("counters", {})},
        scaler=checkpoint.objects.get("loss_scaler", {}),
        scheduler=checkpoint.objects.get("lr_scheduler"),
        config=facts.get("config", {}),
        version=str(facts.get("deepspeed", _DEEPSPEED)),
    )


def _refuse_split(checkpoint: CheckpointTensors, saved: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    what = {
        "a pipeline": "PipelineEngine" in str(facts.get("engine", "")),
        "experts": any(group.get("moe") for group in saved["groups"]),
        "several optimizers": any(name.startswith("optimizer") and name != "optimizer" for name in checkpoint.objects),
        "optimizer state that belongs to no parameter": bool(saved.get("globals") or saved.get("values")),
    }
    for name, found in what.items():
        if found:
            raise UnsupportedError(
                f"checkpoint {checkpoint.ref} is of a run with {name}, which can't be written as a DeepSpeed "
                "checkpoint; export its weights as safetensors, huggingface, dcp or torch"
            )


def _untrained(checkpoint: CheckpointTensors, saved: Mapping[str, Any], names: Sequence[Sequence[str]]) -> set[str]:
    """Return the parameters that a plain optimizer has no state for while it has for others: they had no gradient."""
    kinds = saved["kinds"]
    if not kinds or "step" in saved.get("state", {}):
        return set()
    return {name for group in names for name in group if (kinds[0], name) not in checkpoint.tensors}


def _shared(
    checkpoint: CheckpointTensors, saved: Mapping[str, Any], index: int, group: Sequence[tuple[str, int]]
) -> dict[str, Any]:
    values = {key: each[index] for key, each in saved["state"].items() if each[index] is not None}
    for kind in saved.get("other_kinds", ()):
        found = [
            checkpoint.whole(checkpoint.tensors[kind, name]) for name, _ in group if (kind, name) in checkpoint.tensors
        ]
        if any(not torch.equal(one, found[0]) for one in found):
            raise UnsupportedError(
                f"checkpoint {checkpoint.ref}: {kind!r} differs between the parameters of optimizer group {index}; "
                "DeepSpeed keeps one for all of them"
            )
        if found:
            values[kind] = found[0]
    return values
