"""Writes a DeepSpeed checkpoint folder of any ZeRO stage and world size.

`engine.load_checkpoint` and `zero_to_fp32` read it; only what those read is written. DeepSpeed need not be installed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from capture.load.assignments import assign
from capture.state.dtypes import torch_dtype
from catalog.errors import SetupError, UnsupportedError
from catalog.read.fragments import StoredTensor
from dshistory.conversion.deepspeed_classes import StandIn, loss_scaler
from dshistory.conversion.deepspeed_files import save_deepspeed_file
from dshistory.conversion.exporting.options import Options
from dshistory.conversion.exporting.partitions import Flat, groups_cut, parameters_cut, sub_groups
from dshistory.conversion.exporting.training_state import Training, training_of
from dshistory.tensors.checkpoint_tensors import CheckpointTensors

__all__ = ["loss_scaler_of", "model_states", "module_state", "write_deepspeed"]

_STAGES: Final = (0, 1, 2, 3)
_SUB_GROUP_ELEMENTS: Final = 1_000_000_000  # DeepSpeed's default


def write_deepspeed(checkpoint: CheckpointTensors, target: Path, options: Options) -> None:
    """Write `target/global_step<N>/` and `target/latest` for `zero_stage` and `world_size` (default: the run's).

    Holds one rank's file in memory. SetupError for a stage or world size that does not exist; UnsupportedError, which
    names the reason, for runs that DeepSpeed's files can't hold.
    """
    options.require_only("deepspeed", "zero_stage", "world_size")
    stage, world_size = _layout(checkpoint, options)
    training = training_of(checkpoint)
    _refuse_reordered(training, stage)
    folder = target / f"global_step{training.counters['global_steps']}"
    folder.mkdir(parents=True)
    if stage == 0:
        save_deepspeed_file(_stage0(checkpoint, training, world_size), folder / "mp_rank_00_model_states.pt")
    else:
        _write_zero(checkpoint, training, folder, stage, world_size)
    (target / "latest").write_text(folder.name)


def _layout(checkpoint: CheckpointTensors, options: Options) -> tuple[int, int]:
    stage = checkpoint.facts.facts.get("zero_stage", 0) if options.zero_stage is None else options.zero_stage
    world_size = checkpoint.facts.world_size if options.world_size is None else options.world_size
    if stage not in _STAGES:
        raise SetupError(f"zero_stage={stage}: must be one of {', '.join(map(str, _STAGES))}")
    if world_size < 1:
        raise SetupError(f"world_size={world_size}: must be 1 or more")
    return stage, world_size


def _refuse_reordered(training: Training, stage: int) -> None:
    zero = training.config.get("zero_optimization", {})
    for name in ("round_robin_gradients", "parameter_alignment"):
        if zero.get(name) and stage in (1, 2):
            raise UnsupportedError(
                f"the run had zero_optimization.{name}, with which DeepSpeed orders its flat tensors in another way: "
                "an engine configured so would load this export wrongly; export it as universal, or with zero_stage=3"
            )


def _write_zero(checkpoint: CheckpointTensors, training: Training, folder: Path, stage: int, world_size: int) -> None:
    prefix = "bf16_zero" if training.low_precision == "bf16" else "zero"
    for rank in range(world_size):
        flats = _flats(training, stage, rank, world_size)
        optimizer = (
            _stage3(checkpoint, training, flats, world_size)
            if stage == 3
            else _stage12(checkpoint, training, flats, stage, world_size)
        )
        content = {
            "optimizer_state_dict": optimizer,
            "ds_config": _config(training, stage),
            "ds_version": training.version,
        }
        save_deepspeed_file(content, folder / f"{prefix}_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if stage == 3:
            save_deepspeed_file(
                _partitioned(checkpoint, training, rank, world_size),
                folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
            )
    if stage != 3:
        state = {**model_states(training, stage, world_size), "module": module_state(checkpoint, training)}
        save_deepspeed_file(
            {**state, **_frozen(checkpoint, training), **_names(checkpoint, training, training.groups)},
            folder / "mp_rank_00_model_states.pt",
        )


def _flats(training: Training, stage: int, rank: int, world_size: int) -> list[Flat]:
    if stage != 3:
        return groups_cut(training.groups, rank=rank, world_size=world_size)
    limit = _sub_group_elements(training)
    return parameters_cut(training.groups, rank=rank, world_size=world_size, sub_group_elements=limit)


def _sub_group_elements(training: Training) -> int:
    return int(training.config.get("zero_optimization", {}).get("sub_group_size", _SUB_GROUP_ELEMENTS))


def model_states(training: Training, stage: int, world_size: int) -> dict[str, Any]:
    """Return the entries that every file of model states has beside the tensors."""
    counters = training.counters
    return {
        "optimizer": None,
        "lr_scheduler": training.scheduler,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": counters["skipped_steps"],
        "global_steps": counters["global_steps"],
        "global_samples": counters["global_samples"],
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "ds_config": _config(training, stage),
        "ds_version": training.version,
    }


def module_state(checkpoint: CheckpointTensors, training: Training) -> dict[str, torch.Tensor]:
    """Return the module's state dict; tied names share one tensor."""
    state = {name: checkpoint.whole(tensor) for name, tensor in {**training.weights, **checkpoint.buffers}.items()}
    state.update({alias: state[name] for alias, name in checkpoint.aliases().items()})
    return state


def _names(
    checkpoint: CheckpointTensors, training: Training, groups: Sequence[Sequence[tuple[str, int]]]
) -> dict[str, Any]:
    """Return the names and shapes by which zero_to_fp32 takes the flat tensors apart."""
    shapes = [{name: torch.Size(training.weights[name].shape) for name, _ in group} for group in groups]
    ties = {alias: name for name, tensor in training.weights.items() for alias in tensor.aliases}
    return {"buffer_names": list(checkpoint.buffers), "param_shapes": shapes, "shared_params": ties}


def _frozen(checkpoint: CheckpointTensors, training: Training) -> dict[str, Any]:
    names = training.frozen
    return {
        "frozen_param_shapes": {name: torch.Size(training.weights[name].shape) for name in names},
        "frozen_param_fragments": {name: checkpoint.whole(training.weights[name]) for name in names},
    }


def _partitioned(checkpoint: CheckpointTensors, training: Training, rank: int, world_size: int) -> dict[str, Any]:
    """Return a rank's model states under stage 3: parameters are empty, frozen ones are in parts, buffers are whole."""
    state = {name: torch.empty(0, dtype=torch_dtype(tensor.dtype)) for name, tensor in training.weights.items()}
    state.update({name: checkpoint.whole(tensor) for name, tensor in checkpoint.buffers.items()})
    state.update({alias: state[name] for alias, name in checkpoint.aliases().items()})
    fragments = {}
    for name in training.frozen:
        tensor = training.weights[name]
        part = parameters_cut(
            [[(name, tensor.numel)]], rank=rank, world_size=world_size, sub_group_elements=tensor.numel
        )
        fragments[name] = _flat_tensor(checkpoint, part[0], {name: tensor})
    limit = _sub_group_elements(training)
    groups = [part for _, part in sub_groups(training.groups, world_size=world_size, sub_group_elements=limit)]
    shapes = {name: torch.Size(training.weights[name].shape) for name in fragments}
    whole = {**model_states(training, 3, world_size), "module": state, **_names(checkpoint, training, groups)}
    return {**whole, "frozen_param_shapes": shapes, "frozen_param_fragments": fragments}


def _stage12(
    checkpoint: CheckpointTensors, training: Training, flats: Sequence[Flat], stage: int, world_size: int
) -> dict[str, Any]:
    masters = [_flat_tensor(checkpoint, flat, training.masters) for flat in flats]
    return {
        "loss_scaler": loss_scaler_of(training),
        "dynamic_loss_scale": bool(training.scaler.get("dynamic")),
        "overflow": False,
        "base_optimizer_state": _optimizer(checkpoint, training, flats),
        "single_partition_of_fp32_groups": [
            # Cloned, or torch.save would write the padding too.
            master[: flat.numel - flat.padding].clone()
            for flat, master in zip(flats, masters, strict=True)
        ],
        "zero_stage": stage,
        "group_paddings": [flat.padding for flat in flats],
        "param_alignment_paddings": [[0] * len(group) for group in training.groups],
        "partition_count": [world_size] * len(training.groups),
        "ds_version": training.version,
    }


def _stage3(
    checkpoint: CheckpointTensors, training: Training, flats: Sequence[Flat], world_size: int
) -> dict[str, Any]:
    return {
        "zero_stage": 3,
        "loss_scaler": loss_scaler_of(training),
        "dynamic_loss_scale": bool(training.scaler.get("dynamic")),
        "overflow": False,
        "partition_count": world_size,
        "optimizer_state_dict": _optimizer(checkpoint, training, flats),
        "fp32_flat_groups": [_flat_tensor(checkpoint, flat, training.masters) for flat in flats],
    }


def _optimizer(checkpoint: CheckpointTensors, training: Training, flats: Sequence[Flat]) -> dict[str, Any]:
    """Return the inner optimizer's state dict; its parameters are the flat tensors, numbered in order."""
    state = {}
    for number, flat in enumerate(flats):
        values = {key: _copied(value) for key, value in training.shared[flat.group].items()}
        values.update({kind: _flat_tensor(checkpoint, flat, checkpoint.of_kind(kind)) for kind in training.kinds})
        if values:
            state[number] = values
    numbers = [
        [number for number, flat in enumerate(flats) if flat.group == index] for index in range(len(training.groups))
    ]
    groups = [{**hyper, "params": own} for hyper, own in zip(training.hyper, numbers, strict=True)]
    return {"state": state, "param_groups": groups}


def _stage0(checkpoint: CheckpointTensors, training: Training, world_size: int) -> dict[str, Any]:
    """Return the one file without ZeRO: the optimizer holds every parameter by itself, and under bf16 or fp16 a master
    copy.
    """
    wrapper = str(checkpoint.facts.facts.get("optimizer_wrapper", ""))
    if wrapper.endswith((".FP16_Optimizer", ".BF16_Optimizer")):
        raise UnsupportedError(
            f"the run's optimizer was in a {wrapper.rpartition('.')[2]}, whose files without ZeRO are not "
            "written; pass zero_stage=1"
        )
    flats = [Flat(index, piece, numel) for index, piece, numel in _one_by_one(training)]
    optimizer = _optimizer(checkpoint, training, flats)
    if training.low_precision is not None:
        scaler = loss_scaler_of(training).__dict__
        scale = {"cur_iter": 0, "last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000, **scaler}
        optimizer = {
            **{
                key: scale[key]
                for key in ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
            },
            "dynamic_loss_scale": bool(training.scaler.get("dynamic")),
            "optimizer_state_dict": _shaped(optimizer, training),
            "fp32_groups": [
                [checkpoint.whole(training.masters[name]) for name, _ in group] for group in training.groups
            ],
        }
    else:
        optimizer = _shaped(optimizer, training)
    state = {
        **model_states(training, 0, world_size),
        "module": module_state(checkpoint, training),
        "optimizer": optimizer,
    }
    empty = dict.fromkeys(("param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments"))
    return {**state, **empty, "buffer_names": list(checkpoint.buffers)}


def _one_by_one(training: Training) -> Iterator[tuple[int, Any, int]]:
    for index, group in enumerate(training.groups):
        for flat in groups_cut([[one] for one in group], rank=0, world_size=1):
            yield index, flat.pieces, flat.numel - flat.padding


def _shaped(optimizer: dict[str, Any], training: Training) -> dict[str, Any]:
    """Give state the shape of its parameter again, which flat tensors of one parameter each have lost."""
    shapes = [training.weights[name].shape for group in training.groups for name, _ in group]
    for number, values in optimizer["state"].items():
        values.update({kind: values[kind].view(shapes[number]) for kind in training.kinds})
    return optimizer


def loss_scaler_of(training: Training) -> StandIn:
    """Return what DeepSpeed stores as its loss scaler; it stores a static one too."""
    return loss_scaler(dict(training.scaler), fp16=dict(training.config.get("fp16", {})))


def _flat_tensor(checkpoint: CheckpointTensors, flat: Flat, tensors: Mapping[str, StoredTensor]) -> torch.Tensor:
    """Return one rank's flat tensor: its pieces come from `tensors`, its padding is zero. Reads only what overlaps.

    UnsupportedError when its tensors have several dtypes.
    """
    dtypes = {tensors[piece.name].dtype for piece in flat.pieces} or {"F32"}
    if len(dtypes) > 1:
        raise UnsupportedError(
            f"checkpoint {checkpoint.ref}: {flat.pieces[0].name!r} and its neighbours in one flat tensor are of the "
            f"dtypes {', '.join(sorted(dtypes))}; DeepSpeed keeps them in one"
        )
    made = torch.zeros(flat.numel, dtype=torch_dtype(dtypes.pop()))
    checkpoint.fill(
        [
            assignment
            for piece in flat.pieces
            for assignment in assign(
                tensors[piece.name].fragments, made, start=piece.start, numel=piece.numel, at=piece.at
            )
        ]
    )
    return made


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _config(training: Training, stage: int) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(training.config))
    config.setdefault("zero_optimization", {})["stage"] = stage
    return config
