"""Cases for exports: DeepSpeed itself loads a history as its own checkpoint, and trains on to the same bits."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed_eager import Eager, assert_same, state_of
from deepspeed_helpers import make_engine, train

import capture
from dshistory.conversion.deepspeed_classes import KNOWN, DeepSpeedPickle, loss_scaler
from dshistory.conversion.importing.safe_unpickle import load_torch_file
from dshistory.explorer import Explorer

SETTINGS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "0-fp32": {"stage": 0, "dtype": "fp32"},
    "1": {"stage": 1},
    "1-bf16": {"stage": 1, "data_types": {"grad_accum_dtype": "fp32"}},
    "2": {"stage": 2},
    # Stage 3 is last: once a process has had a ZeRO-3 engine, DeepSpeed computes `linear` differently for all engines.
    "3": {"stage": 3, "zero": {"sub_group_size": 500}},
    "3-fp32": {"stage": 3, "dtype": "fp32"},
}
# The sub-groups of an export are those of the run's own configuration, so this target is a run without any.
SETTINGS_OF_ANOTHER = {**SETTINGS, "3": {"stage": 3}}
STEP, MORE = 3, 2
WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


def history_of(folder: Path, name: str) -> Path:
    return folder / f"export-history-{name}-{WORLD}"


def captured(folder: Path, name: str) -> tuple[Eager, list[float], Eager]:
    """Capture a training at STEP; return its state there, its losses afterwards and its final state."""
    engine = make_engine(**SETTINGS[name])
    with capture.enable(engine, every=STEP, history=history_of(folder, name)):
        train(engine, STEP)
        middle = state_of(engine)
        torch.manual_seed(31 + RANK)
        losses = train(engine, MORE)
    last = state_of(engine)
    engine.destroy()
    return middle, losses, last


def export(folder: Path, name: str, out: Path, **options: Any) -> Path:
    """Export on rank 0, what all ranks have written; return once the files exist for all ranks."""
    dist.barrier()
    if RANK == 0:
        Explorer.open(history_of(folder, name)).export(STEP, out, **{"format": "deepspeed", **options})
    dist.barrier()
    return out


def same_training(found: Eager, expected: Eager) -> None:
    """Assert that tensors, optimizer groups, schedule and counters are equal. DeepSpeed's checkpoints have no
    generators.
    """
    assert_same(found.without_buffers(), expected.without_buffers())
    assert found.objects["lr_scheduler"] == expected.objects["lr_scheduler"]
    assert found.objects["loss_scaler"] == expected.objects["loss_scaler"]
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        assert found.objects["counters"][counter] == expected.objects["counters"][counter]
    assert str(found.objects["optimizer"]["groups"]) == str(expected.objects["optimizer"]["groups"])


def case_an_engine_loads_it_and_trains_on_to_the_same_bits(folder: Path) -> None:
    for name, settings in SETTINGS.items():
        middle, losses, last = captured(folder, name)
        out = export(folder, name, folder / f"export-{name}-{WORLD}")
        engine = make_engine(seed=99, **settings)
        path, _ = engine.load_checkpoint(str(out))
        assert path is not None, name
        same_training(state_of(engine), middle)
        torch.manual_seed(31 + RANK)
        assert train(engine, MORE, start=STEP) == losses, name
        same_training(state_of(engine), last)
        engine.destroy()


def case_zero_to_fp32_finds_the_master_weights(folder: Path) -> None:
    for name, settings in SETTINGS.items():
        if settings["stage"] == 0 or RANK != 0:
            continue
        stored: Any = capture.restore(STEP, history=history_of(folder, name))
        found = get_fp32_state_dict_from_zero_checkpoint(str(folder / f"export-{name}-{WORLD}"))
        expected = {**stored["model"], **stored.get("master", {}), **stored["buffer"]}
        expected["head.weight"] = expected["embed.weight"]
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), (name, key)
    dist.barrier()


def case_into_every_other_stage(folder: Path) -> None:
    """Export what one stage wrote for another stage with the same precision."""
    for source, targets in {
        "2": ("0", "1", "3"),
        "3": ("1", "1-bf16", "2"),
        "0": ("2", "3"),
        "0-fp32": ("3-fp32",),
    }.items():
        stored: Any = capture.restore(STEP, history=history_of(folder, source))
        flat = {(kind, key): tensor for kind, named in stored.items() for key, tensor in named.items()}
        for target in targets:
            stage = SETTINGS_OF_ANOTHER[target]["stage"]
            out = export(
                folder, source, folder / f"export-{source}-to-{target}-{WORLD}", zero_stage=stage, world_size=WORLD
            )
            engine = make_engine(seed=50, **SETTINGS_OF_ANOTHER[target])
            path, _ = engine.load_checkpoint(str(out))
            assert path is not None
            mine = state_of(engine)
            assert mine.objects["counters"]["global_steps"] == STEP
            for key, tensor in mine.without_buffers().tensors.items():
                there = flat.get(key)
                if there is None and key[0] == "master":
                    there = flat["model", key[1]]
                if key[0] != "step":
                    assert there is not None, (source, target, key)
                    assert torch.equal(tensor, there), (source, target, key)
            train(engine, 1, start=STEP)
            engine.destroy()


def case_for_another_world_size(folder: Path) -> None:
    """Export what one rank wrote for two ranks, for every stage."""
    if WORLD == 1:
        return
    for name in ("2", "3"):
        history = folder / f"export-history-{name}-1"
        stored: Any = capture.restore(STEP, history=history)
        out = folder / f"export-{name}-1-for-2"
        if RANK == 0:
            Explorer.open(history).export(STEP, out, format="deepspeed", world_size=2)
        dist.barrier()
        engine = make_engine(seed=50, **SETTINGS[name])
        path, _ = engine.load_checkpoint(str(out))
        assert path is not None
        for (kind, key), tensor in state_of(engine).without_buffers().tensors.items():
            assert torch.equal(tensor, stored[kind][key]), (name, kind, key)
        train(engine, 1, start=STEP)
        engine.destroy()


def case_deepspeed_finds_its_own_loss_scalers(folder: Path) -> None:
    """The export pickles stand-ins for DeepSpeed's classes, and DeepSpeed unpickles its own objects with all
    attributes.
    """
    state = {
        "dynamic": True,
        "scaler": {"cur_scale": 512.0, "cur_iter": 7, "last_overflow_iter": 3, "cur_hysteresis": 1},
    }
    section = {"loss_scale_window": 50, "hysteresis": 4, "min_loss_scale": 2, "consecutive_hysteresis": True}
    path = folder / f"scaler-{WORLD}-{RANK}.pt"
    torch.save([loss_scaler(state, fp16=section), loss_scaler({}, fp16={})], path, pickle_module=DeepSpeedPickle)
    found, static = torch.load(path, weights_only=False)
    own = DynamicLossScaler(2**16, 50, 2, 4, True)
    assert type(found) is DynamicLossScaler
    assert vars(found) == {**vars(own), **state["scaler"]}
    assert type(static) is LossScaler
    assert vars(static) == vars(LossScaler(1.0))
    again = load_torch_file(path, known=KNOWN)
    assert vars(again[0]) == vars(found)


def case_a_universal_checkpoint_goes_into_every_stage(folder: Path) -> None:
    for source, targets in {"2": ("1", "1-bf16", "3"), "3": ("2",)}.items():
        out = export(folder, source, folder / f"universal-{source}-{WORLD}", format="universal")
        stored: Any = capture.restore(STEP, history=history_of(folder, source))
        for target in targets:
            engine = make_engine(seed=50, checkpoint={"load_universal": True}, **SETTINGS[target])
            path, _ = engine.load_checkpoint(str(out))
            assert path is not None
            mine = state_of(engine)
            assert mine.objects["counters"]["global_steps"] == STEP
            for (kind, name), tensor in mine.tensors.items():
                # DeepSpeed itself does not load buffers or frozen parameters from a universal checkpoint.
                if kind != "buffer" and name != "place":
                    there = stored.get(kind, {}).get(name)
                    there = stored["model"][name] if there is None else there
                    assert torch.equal(tensor, there), (source, target, kind, name)
            train(engine, 1, start=STEP)
            engine.destroy()
