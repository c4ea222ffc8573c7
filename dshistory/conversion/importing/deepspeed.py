"""Reads DeepSpeed checkpoints of any ZeRO stage and world size: weights, master weights and optimizer state by name.

DeepSpeed itself is not needed. The objects that it pickles beside tensors are read as data (`deepspeed_classes`), and
so are the files of `capture.checkpoint_engine`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from capture.state.objects import encode_object
from catalog.errors import FormatError, UnsupportedError
from dshistory.conversion.deepspeed_classes import StandIn
from dshistory.conversion.deepspeed_files import load_deepspeed_file
from dshistory.conversion.importing.foreign_checkpoint import ForeignCheckpoint, ForeignTensor, in_memory
from dshistory.conversion.importing.torchfile import model_tensors, optimizer_tensors
from dshistory.conversion.importing.zero_shards import GroupShards, PartShards, Shards, offsets
from dshistory.conversion.rank_parts import partition_count, require_all_parts

__all__ = ["read", "recognises"]

_MODEL_FILE: Final = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER_FILE: Final = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps")
_SCALER: Final = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_READ: Final = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        "ds_version",
    ]
)


def recognises(path: Path) -> bool:
    """True for a folder with `*_model_states.pt`, and for the folder around a single one, as `save_checkpoint` makes
    it."""
    return _folder(path) is not None


def read(path: Path) -> ForeignCheckpoint:
    """Read parameters as `model`, buffers as `buffer`, fp32 copies as `master` and optimizer state by its own keys;
    counters, schedule and param groups become the objects that a capture has. Under stage 3 the weights are the master
    weights in the model's precision, as DeepSpeed itself computes them on loading.

    Raises UnsupportedError for model parallelism, pipelines and experts; FormatError for missing or damaged files."""
    folder = _folder(path)
    assert folder is not None, "recognises comes first"
    models = _files(folder, _MODEL_FILE)
    shards = _files(folder, _OPTIMIZER_FILE)
    _refuse_split(folder)
    parts = [load_deepspeed_file(file) for file in shards]
    count = partition_count(parts[0]) if parts else None
    require_all_parts(folder, [file.name for file in (*models, *shards)], count)
    states = [load_deepspeed_file(file) for file in models]
    for file, state in zip(models, states, strict=True):
        if not isinstance(state, Mapping) or not isinstance(state.get("module"), Mapping):
            raise FormatError(f"{file} has no state dict under 'module'")
    return _found(folder, states, [_shard(file, part) for file, part in zip(shards, parts, strict=True)])


def _folder(path: Path) -> Path | None:
    if any(path.glob("*mp_rank_*_model_states.pt")):
        return path
    if path.is_dir() and (path / "latest").is_file():
        inside = [child for child in path.iterdir() if any(child.glob("*mp_rank_*_model_states.pt"))]
        return inside[0] if len(inside) == 1 else None
    return None


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the files that match, by rank. Raises UnsupportedError for more than one model parallel rank, FormatError
    when ranks are missing."""
    found = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is not None and int(match[2]) > 0:
            raise UnsupportedError(f"{path}: checkpoints of tensor or pipeline parallel models cannot be imported")
        if match is not None:
            found[int(match[1] or 0)] = path
    require_all_parts(folder, [path.name for path in found.values()], None)
    return [found[rank] for rank in sorted(found)]


def _refuse_split(folder: Path) -> None:
    for pattern, what in (("*expert*", "experts"), ("expp_rank_*", "experts"), ("layer_*", "a pipeline")):
        if any(folder.glob(pattern)):
            raise UnsupportedError(f"{folder}: checkpoints of a model with {what} cannot be imported")


def _shard(file: Path, content: Any) -> Mapping[str, Any]:
    state = content.get("optimizer_state_dict") if isinstance(content, Mapping) else None
    if not isinstance(state, Mapping):
        raise FormatError(f"{file} has no 'optimizer_state_dict'")
    return state


def _found(folder: Path, states: Sequence[Mapping[str, Any]], shards: Sequence[Mapping[str, Any]]) -> ForeignCheckpoint:
    first = states[0]
    left_out = [str(key) for key, value in first.items() if key not in _READ and value is not None]
    objects: dict[str, Any] = {"counters": {key: int(first[key]) for key in _COUNTERS if key in first}}
    try:
        if first.get("lr_scheduler") is not None:
            encode_object("lr_scheduler", first["lr_scheduler"])
            objects["lr_scheduler"] = first["lr_scheduler"]
    except UnsupportedError as error:
        left_out.append(f"lr_scheduler ({error})")
    stage = 0
    if shards:
        stage = 3 if "fp32_flat_groups" in shards[0] else _number(shards[0].get("zero_stage", 1))
        tensors = _zero(folder, states, shards, stage)
        objects["optimizer"], objects["loss_scaler"] = _groups(first, shards[0], stage), _loss_scaler(shards[0])
    else:
        tensors = _weights(first)
        trained = [tensor for tensor in tensors if tensor.kind == "model"]
        optimizer = first.get("optimizer")
        found = optimizer_tensors(optimizer, trained) if isinstance(optimizer, Mapping) else []
        tensors += found or []
        left_out += ["optimizer (its parameters have no names)"] if found is None else []
        if first.get("param_shapes") and not isinstance(optimizer, Mapping):
            left_out.append("optimizer (there is no file *_optim_states.pt, into which each rank has written its part)")
    config = first.get("ds_config") if isinstance(first.get("ds_config"), Mapping) else {}
    facts = {"zero_stage": stage, "config": config, "deepspeed": str(first.get("ds_version"))}
    return ForeignCheckpoint(tensors, objects, first.get("global_steps"), left_out, facts)


def _weights(state: Mapping[str, Any]) -> list[ForeignTensor]:
    buffers = set(state.get("buffer_names") or ())
    return [
        in_memory("buffer" if tensor.name in buffers else "model", tensor.name, tensor.read(), tensor.aliases)
        for tensor in model_tensors(state["module"])
    ]


def _zero(
    folder: Path, states: Sequence[Mapping[str, Any]], shards: Sequence[Mapping[str, Any]], stage: int
) -> list[ForeignTensor]:
    first = states[0]
    groups = first.get("param_shapes")
    if not groups:
        raise FormatError(
            f"{folder}: the model states have no 'param_shapes', so the content of the flat tensors is unknown"
        )
    groups = [groups] if isinstance(groups, Mapping) else groups
    shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
    aliases: dict[str, list[str]] = {}
    for alias, name in (first.get("shared_params") or {}).items():
        aliases.setdefault(name, []).append(alias)
    sharded = list(_stage3(groups, shards) if stage == 3 else _stage12(groups, shards))
    masters = {name: shard for kind, name, shard in sharded if kind == "master"}
    model = _partitioned(states, shapes, masters, aliases) if stage == 3 else _weights(first)
    return [*model, *(_sharded(kind, name, shapes[name], shard) for kind, name, shard in sharded)]


def _stage12(
    groups: Sequence[Mapping[str, Any]], shards: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str, Shards]]:
    for index, group in enumerate(groups):
        paddings = shards[0].get("param_alignment_paddings") or [[0] * len(one) for one in groups]
        begins = offsets({name: tuple(shape) for name, shape in group.items()}, paddings=paddings[index], world_size=1)
        flats = {"master": [shard["single_partition_of_fp32_groups"][index] for shard in shards]}
        for key in _flat_keys(_base_state(shards[0], index)):
            flats[key] = [_base_state(shard, index)[key] for shard in shards]
        for name, offset in begins.items():
            for kind, ranks in flats.items():
                yield kind, name, GroupShards(ranks, offset)


def _base_state(shard: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Return the optimizer's state of one group, from either of DeepSpeed's two forms."""
    base = shard["base_optimizer_state"]
    state: Mapping[str, Any] = base[index] if isinstance(base, (list, tuple)) else base["state"].get(index, {})
    return state


def _stage3(
    groups: Sequence[Mapping[str, Any]], shards: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str, Shards]]:
    shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
    begins = offsets(shapes, paddings=[0] * len(shapes), world_size=len(shards))
    flats = {"master": [shard["fp32_flat_groups"] for shard in shards]}
    states = [shard["optimizer_state_dict"]["state"] for shard in shards]
    for key in _flat_keys(states[0].get(0, {})):
        flats[key] = [[state[number][key] for number in sorted(state)] for state in states]
    for name, offset in begins.items():
        for kind, ranks in flats.items():
            yield kind, name, PartShards(ranks, offset)


def _partitioned(
    states: Sequence[Mapping[str, Any]],
    shapes: Mapping[str, tuple[int, ...]],
    masters: Mapping[str, Shards],
    aliases: Mapping[str, Sequence[str]],
) -> list[ForeignTensor]:
    """Return the weights and buffers of stage 3: its model states hold the buffers, the rank's parts of frozen
    parameters, and only the dtype of the other parameters."""
    first = states[0]
    module = first["module"]
    found = [in_memory("buffer", name, module[name]) for name in first.get("buffer_names") or () if name in module]
    for name, shape in shapes.items():
        dtype = module[name].dtype if name in module else masters[name].dtype
        read = partial(_read, masters[name], shape, dtype)
        found.append(_named("model", name, shape, dtype, read, tuple(aliases.get(name, ()))))
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        parts = [[state["frozen_param_fragments"][name].view(-1)] for state in states]
        shard = PartShards(parts, 0)
        read = partial(_read, shard, tuple(shape), shard.dtype)
        found.append(_named("model", name, tuple(shape), shard.dtype, read, tuple(aliases.get(name, ()))))
    return found


def _sharded(kind: str, name: str, shape: tuple[int, ...], shards: Shards) -> ForeignTensor:
    return _named(kind, name, shape, shards.dtype, partial(_read, shards, shape, shards.dtype), ())


def _named(
    kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, read: Any, aliases: tuple[str, ...]
) -> ForeignTensor:
    stored = in_memory(kind, name, torch.empty(shape, dtype=dtype, device="meta")).dtype
    return ForeignTensor(kind, name, stored, shape, read, aliases)


def _read(shards: Shards, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return shards.read(shape).to(dtype)


def _flat_keys(state: Mapping[str, Any]) -> list[str]:
    return [key for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim() > 0]


def _groups(first: Mapping[str, Any], shard: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """Return the object `optimizer` that a capture of the engine has."""
    base = shard["optimizer_state_dict"] if stage == 3 else shard["base_optimizer_state"]
    saved = base.get("param_groups", []) if isinstance(base, Mapping) else []
    shapes = first["param_shapes"]
    shapes = [shapes] if isinstance(shapes, Mapping) else list(shapes)
    numbers = [list(group.get("params", ())) for group in saved] or [[i] for i in range(len(shapes))]
    # Under stage 3 each of the optimizer's parameters, and each entry of the shapes, is a sub-group.
    names = [[name for number in own for name in shapes[number]] for own in numbers]
    states = [
        (base["state"].get(own[0], {}) if own else {}) if isinstance(base, Mapping) else base[i]
        for i, own in enumerate(numbers)
    ]
    keys = sorted({key for state in states for key in state} - {key for state in states for key in _flat_keys(state)})
    hyper = [{key: value for key, value in group.items() if key != "params"} for group in saved] or [{} for _ in names]
    kind = str((first.get("ds_config") or {}).get("optimizer", {}).get("type", "unknown"))
    return {
        "class": f"deepspeed.{kind}",
        "groups": [{**one, "params": own} for one, own in zip(hyper, names, strict=True)],
        "kinds": sorted({key for state in states for key in _flat_keys(state)}),
        "state": {key: [state.get(key) for state in states] for key in keys},
    }


def _loss_scaler(shard: Mapping[str, Any]) -> dict[str, Any]:
    scaler = shard.get("loss_scaler")
    values = scaler.__dict__ if isinstance(scaler, StandIn) else {}
    kept = {key: values[key] for key in _SCALER if key in values}
    return {"dynamic": bool(values.get("dynamic")), "scaler": kept, "grad_scaler": None}


def _number(value: Any) -> int:
    return int(value.values[0] if isinstance(value, StandIn) else value)
