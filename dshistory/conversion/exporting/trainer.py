"""Writes the checkpoint folder that Hugging Face's Trainer resumes from, plain or with its DeepSpeed integration.

The step must have been captured by `capture.huggingface.HistoryCallback`, or imported from a Trainer's checkpoint:
its object `trainer` says where in the data the training was.
"""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch

from capture.load.objects import read_objects
from catalog.errors import UnsupportedError
from catalog.history import History
from catalog.lineage_metrics import lineage_metrics
from catalog.read.fragments import choose
from catalog.records import CheckpointRef
from dshistory.conversion.exporting.deepspeed import write_deepspeed
from dshistory.conversion.exporting.options import Options
from dshistory.conversion.exporting.safetensors import write_safetensors
from dshistory.tensors.checkpoint_tensors import CheckpointTensors

__all__ = ["write_trainer_folder"]

_OURS: Final = frozenset(("loss", "lr", "step_time_s", "applied", "stall_s"))
"""The metrics that a session records; the Trainer's own mean loss is `trainer_loss`."""


def write_trainer_folder(history: History, checkpoint: CheckpointTensors, target: Path) -> None:
    """Write everything that `trainer.train(resume_from_checkpoint=target)` reads.

    UnsupportedError, which names the reason, for a run without a Trainer, with several optimizers, or of PEFT.
    """
    _require_trainer(checkpoint)
    facts = checkpoint.facts.facts
    if "zero_stage" in facts:
        write_deepspeed(checkpoint, target, Options())
    else:
        target.mkdir()
        write_safetensors(checkpoint, target / "model.safetensors", Options())
        torch.save(_optimizer(checkpoint), target / "optimizer.pt")
    for name, file in (("lr_scheduler", "scheduler.pt"), ("loss_scaler", "scaler.pt")):
        state = checkpoint.objects.get(name)
        if state is not None and not (name == "loss_scaler" and "zero_stage" in facts):
            torch.save(state, target / file)
    _write_random_states(history, checkpoint, target)
    state = {**checkpoint.objects["trainer"]["state"], "log_history": list(_log(history, checkpoint.ref))}
    state["stateful_callbacks"] = {**state["stateful_callbacks"], "DSHistory": {"run": checkpoint.ref.run}}
    text = json.dumps(state, indent=2, sort_keys=True, default=_number)
    (target / "trainer_state.json").write_text(text + "\n")


def _require_trainer(checkpoint: CheckpointTensors) -> None:
    objects, module = checkpoint.objects, str(checkpoint.facts.facts.get("module", ""))
    if "trainer" not in objects:
        raise UnsupportedError(
            f"checkpoint {checkpoint.ref} does not say where a Trainer was in its data: it was not captured by "
            "capture.huggingface.HistoryCallback; put your own loop back with capture.restore"
        )
    several = sorted(name for name in objects if name.startswith("optimizer."))
    if several:
        raise UnsupportedError(f"checkpoint {checkpoint.ref} has {len(several) + 1} optimizers; a Trainer takes one")
    if "optimizer" not in objects:
        raise UnsupportedError(f"checkpoint {checkpoint.ref} has no optimizer state, without which no Trainer goes on")
    if module.startswith("peft."):
        raise UnsupportedError(
            f"checkpoint {checkpoint.ref} is of a {module}: a Trainer loads adapters from PEFT's own files, which are "
            "not written; resume from a checkpoint of the Trainer itself"
        )


def _optimizer(checkpoint: CheckpointTensors) -> dict[str, Any]:
    """Return the state dict of the optimizer, whose parameters are numbered through all groups as torch does."""
    saved, numbers = checkpoint.objects["optimizer"], count()
    kinds = [*saved["kinds"], *saved.get("other_kinds", ())]
    groups, state = [], dict(saved.get("globals", {}))
    for group in saved["groups"]:
        own = []
        for name in group["params"]:
            own.append(next(numbers))
            found = {
                kind: checkpoint.whole(checkpoint.tensors[kind, name])
                for kind in kinds
                if (kind, name) in checkpoint.tensors
            }
            found.update(saved.get("values", {}).get(name, {}))
            if found:
                state[own[-1]] = found
        groups.append({**group, "params": own})
    return {"state": state, "param_groups": groups}


def _write_random_states(history: History, checkpoint: CheckpointTensors, target: Path) -> None:
    extents, ranks = history.extents(checkpoint.ref), checkpoint.facts.world_size
    for rank in range(ranks):
        state = read_objects(history.root, choose(extents, rank=rank))["trainer"]["rng"]
        found = {"python": state["python"], "numpy": state["numpy"], "cpu": state["torch"]}
        if "cuda" in state:
            # The Trainer keeps those of all devices where it is distributed, and that of its device where it is not.
            found["cuda"] = state["cuda"] if ranks > 1 else state["cuda"][0]
        torch.save(found, target / ("rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"))


def _log(history: History, ref: CheckpointRef) -> Iterator[dict[str, float]]:
    """Yield the Trainer's log up to the step, from the journals of the run and its parents: training, then evaluation.

    Every entry of the Trainer has an epoch, so a step without one is not in its log.
    """
    by_step: dict[int, dict[str, float]] = {}
    for name, of_name in lineage_metrics(history.paths, ref.run).items():
        for step in of_name.keys() if name not in _OURS else ():
            by_step.setdefault(step, {})[name] = of_name[step]
    for step, values in sorted(by_step.items()):
        if step > ref.step or "epoch" not in values:
            continue
        common = {"epoch": values.pop("epoch"), "step": step}
        if "trainer_loss" in values:
            values["loss"] = values.pop("trainer_loss")
        for evaluated in (False, True):
            entry = {name: value for name, value in values.items() if name.startswith("eval_") == evaluated}
            if entry:
                yield {**entry, **common}


def _number(value: Any) -> Any:
    """Return what JSON has for a number of numpy or torch. TypeError for anything else."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a {type(value).__qualname__} in the Trainer's state is not JSON")
