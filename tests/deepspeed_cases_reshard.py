"""Cases for restores under another world size and another ZeRO stage: equal logical tensors, and a training that goes on."""

import math
import os
from pathlib import Path
from typing import Any

import torch
from deepspeed_eager import Eager, assert_same, put_back, take
from deepspeed_helpers import TinyGPT, make_engine, train
from deepspeed_ranks import covers

import capture
from capture.deepspeed import DeepSpeedLoop
from capture.zero import ZeroState

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


@covers("resharding: world sizes 1, 2, 4 and ZeRO 0, 1, 2, 3, every pair, bf16 and fp32")
def case_read_every_world_and_stage(folder: Path) -> None:
    """All that was written by now, one after the other into one engine of each stage: the first into a fresh one."""
    written = [torch.load(path, weights_only=False) for path in sorted(folder.glob("*-*.pt"))]
    assert written
    for number, settings in enumerate([*STAGES, *FP32]):
        alike = [one for one in written if one[0].get("dtype") == settings.get("dtype")]
        engine = make_engine(seed=50, **settings)
        for _, tensors, objects in alike[number:] + alike[:number]:
            eager = Eager(tensors, objects)
            state = DeepSpeedLoop(engine).providers()
            put_back(state, eager)
            check_equal(take(state), eager)
            losses = train(engine, 1)
            assert all(map(math.isfinite, losses))
            assert engine.global_steps == 4
        engine.destroy()


def check_equal(mine: Eager, stored: Eager) -> None:
    shared = mine.tensors.keys() & stored.tensors.keys()
    assert_same(Eager({k: mine.tensors[k] for k in shared}, {}), Eager({k: stored.tensors[k] for k in shared}, {}))
    only = mine.tensors.keys() ^ stored.tensors.keys()
    assert {kind for kind, _ in only} <= {"master", "step"}, only
    for kind, name in only & mine.tensors.keys():
        if kind == "master":
            assert torch.equal(mine.tensors[(kind, name)], stored.tensors[("model", name)])
    assert mine.objects["counters"] == stored.objects["counters"]
    for one, other in zip(mine.objects["optimizer"]["groups"], stored.objects["optimizer"]["groups"], strict=True):
        assert sorted(one.pop("params")) == sorted(other["params"])
        assert one == {key: value for key, value in other.items() if key != "params"}
    assert steps(mine) == steps(stored)


def steps(eager: Eager) -> set[float]:
    """The number of updates: plain torch has it for each parameter, ZeRO for each group."""
    shared = eager.objects["optimizer"]["state"].get("step", [])
    return {float(t) for (kind, _), t in eager.tensors.items() if kind == "step"} | {float(step) for step in shared}


@covers("fp32 master weights into bf16 engines: ZeRO 0, 1, 2, 3")
def case_another_precision_takes_the_master_weights(folder: Path) -> None:
    """fp32 weights into a bf16 engine: the low-precision weights are derived, as after an update."""
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
    """A frozen parameter has no master weights that another precision could be derived from."""
    model = TinyGPT()
    del model.place
    return model


@covers("statistics and sketches are the same from world sizes 1, 2, 4 and ZeRO 0, 1, 2, 3, bf16")
def case_one_state_captured_by_every_world_and_stage(folder: Path) -> None:
    """The same state in every engine; that the histories agree is for a reader of all of them to tell."""
    _, tensors, objects = torch.load(folder / "4-0.pt", weights_only=False)
    for number, settings in enumerate(STAGES):
        history = folder / f"same-{os.environ['WORLD_SIZE']}-{number}"
        if history.exists():
            continue
        torch.distributed.barrier()
        engine = make_engine(seed=50, **settings)
        put_back(DeepSpeedLoop(engine).providers(), Eager(tensors, objects))
        with capture.enable(engine, every=1000, history=history) as session:
            session.snapshot()
        assert session.stats.failed == 0
        engine.destroy()
