"""Writes a DeepSpeed universal checkpoint: a folder for each parameter, which any ZeRO stage and world size loads.

It is written one tensor at a time, and DeepSpeed need not be installed. An engine loads it with the configuration
`{"checkpoint": {"load_universal": true}}`.
"""

from pathlib import Path
from typing import Any

import torch

from catalog.errors import UnsupportedError
from dshistory.conversion.deepspeed_files import save_deepspeed_file
from dshistory.conversion.exporting.deepspeed import loss_scaler_of, model_states, module_state
from dshistory.conversion.exporting.options import Options
from dshistory.conversion.exporting.training_state import Training, training_of
from dshistory.tensors.checkpoint_tensors import CheckpointTensors

__all__ = ["write_universal"]


def write_universal(checkpoint: CheckpointTensors, target: Path, options: Options) -> None:
    """Write `target/global_step<N>/zero/<parameter>/{fp32,exp_avg,...}.pt`, the model states, and
    `target/latest_universal`.

    UnsupportedError, which names the reason, for runs that DeepSpeed's files can't hold.
    """
    options.require_only("universal")
    training = training_of(checkpoint)
    folder = target / f"global_step{training.counters['global_steps']}"
    (folder / "zero").mkdir(parents=True)
    for index, group in enumerate(training.groups):
        for name, _ in group:
            _write_parameter(checkpoint, training, folder / "zero", name, training.shared[index])
    for name in training.frozen:
        tensor = checkpoint.whole(training.weights[name])
        _write(tensor.float(), _folder(folder / "zero", name) / "fp32.pt")
    save_deepspeed_file(_optimizer(training), folder / "zero" / "optimizer_state.pt")
    states = model_states(training, 0, 1)
    save_deepspeed_file({**states, "module": module_state(checkpoint, training)}, folder / "mp_rank_00_model_states.pt")
    # Under stage 3 an engine looks for the states by this name; parameters come from their folders alone.
    save_deepspeed_file({**states, "module": {}}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    (target / "latest_universal").write_text(folder.name)


def _write_parameter(checkpoint: CheckpointTensors, training: Training, zero: Path, name: str, shared: Any) -> None:
    folder = _folder(zero, name)
    _write(checkpoint.whole(training.masters[name]), folder / "fp32.pt")
    for kind in training.kinds:
        _write(checkpoint.whole(checkpoint.tensors[kind, name]), folder / f"{kind}.pt")
    if "step" in shared:
        torch.save(shared["step"], folder / "step.pt")


def _folder(zero: Path, name: str) -> Path:
    if Path(name).name != name or name.startswith("."):
        raise UnsupportedError(
            f"the parameter {name!r} can't be the name of a folder, as a universal checkpoint needs it"
        )
    (zero / name).mkdir()
    return zero / name


def _write(tensor: torch.Tensor, path: Path) -> None:
    torch.save({"param": tensor}, path)


def _optimizer(training: Training) -> dict[str, Any]:
    """Return the state that belongs to no parameter, where stages 1 and 2 look for it and where stage 3 does."""
    groups = [{**hyper, "params": [index]} for index, hyper in enumerate(training.hyper)]
    state = {index: dict(shared) for index, shared in enumerate(training.shared)}
    return {
        "loss_scaler": loss_scaler_of(training),
        "dynamic_loss_scale": bool(training.scaler.get("dynamic")),
        "overflow": False,
        "param_groups": groups,
        "optimizer_state_dict": {"state": state, "param_groups": groups},
        "ds_version": training.version,
    }
