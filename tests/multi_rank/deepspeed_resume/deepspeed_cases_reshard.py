"""Cases that write the state of every world size and ZeRO stage for others to read, and restore one state in all of
them.
"""

import os
from pathlib import Path
from typing import Any

import torch
from deepspeed_eager import Eager, put_back, take
from deepspeed_helpers import TinyGPT, make_engine, train
from ranks import covers, guards

import capture
from capture.loops.deepspeed.loop import DeepSpeedLoop
from capture.loops.deepspeed.optimizer_provider import ZeroState

STAGES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "data_types": {"grad_accum_dtype": "fp32"}},
    {"stage": 2, "zero": {"round_robin_gradients": True}},
    {"stage": 3, "zero": {"sub_group_size": 500}},
]
FP32: list[dict[str, Any]] = [{"stage": stage, "dtype": "fp32"} for stage in (1, 0, 3, 2)]


def case_write(folder: Path) -> None:
    for number, settings in enumerate([*STAGES, *FP32]):
        engine = make_engine(**settings)
        train(engine, 3)
        eager = take(DeepSpeedLoop(engine).providers())
        if os.environ["RANK"] == "0":
            torch.save([settings, eager.tensors, eager.objects], folder / f"{os.environ['WORLD_SIZE']}-{number}.pt")
        engine.destroy()


@guards("Resume is exact")
@covers("fp32 master weights into bf16 engines: ZeRO 0, 1, 2, 3")
def case_another_precision_takes_the_master_weights(folder: Path) -> None:
    """When fp32 weights are restored into a bf16 engine, the low-precision weights are derived as after an update."""
    written, tensors, objects = torch.load(folder / f"{os.environ['WORLD_SIZE']}-4.pt", weights_only=False)
    assert written == {"stage": 1, "dtype": "fp32"}
    for settings in STAGES:
        engine = make_engine(seed=50, model=without_frozen, **settings)
        state = [provider for provider in DeepSpeedLoop(engine).providers() if isinstance(provider, ZeroState)]
        put_back(state, Eager(tensors, objects))
        mine = take(state)
        masters = {name: master for (kind, name), master in mine.tensors.items() if kind == "master"}
        assert len(masters) > 20
        for name, master in masters.items():
            assert torch.equal(master, tensors[("master", name)]), name
            assert torch.equal(mine.tensors[("model", name)], master.bfloat16()), name
        engine.destroy()


def without_frozen() -> torch.nn.Module:
    """Leave out the frozen parameter: it has no master weights from which another precision could be derived."""
    model = TinyGPT()
    del model.place
    return model


@guards("Resume is exact")
@covers("statistics and sketches are the same from world sizes 1, 2, 4 and ZeRO 0, 1, 2, 3, bf16")
def case_one_state_captured_by_every_world_and_stage(folder: Path) -> None:
    """Capture the same state in every engine; `test_deepspeed_reshard` compares the histories."""
    _, tensors, objects = torch.load(folder / "4-0.pt", weights_only=False)
    for number, settings in enumerate(STAGES):
        history = folder / f"same-{os.environ['WORLD_SIZE']}-{number}"
        engine = make_engine(seed=50, **settings)
        put_back(DeepSpeedLoop(engine).providers(), Eager(tensors, objects))
        with capture.enable(engine, every=1000, history=history) as session:
            session.snapshot()
        assert session.stats.failed == 0
        engine.destroy()
