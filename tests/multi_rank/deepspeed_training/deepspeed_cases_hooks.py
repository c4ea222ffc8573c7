"""Cases for the hooks: each event is reported exactly once, before the first byte changes, and closing removes all
hooks.
"""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from deepspeed_eager import assert_same, take
from deepspeed_helpers import WIDTH, TinyGPT, WideGPT, batches, make_engine, train
from deepspeed_recorder import Recorder
from faulty_writer import faults_in_new_writers
from ranks import guards

import capture
import native
from capture.loops.deepspeed.loop import DeepSpeedLoop
from catalog.errors import SetupError


def case_once_and_before_the_first_changed_byte(folder: Path) -> None:
    for settings in (
        {"stage": 0, "dtype": "fp32"},
        {"stage": 0},
        {"stage": 1},
        {"stage": 2},
        {"stage": 3},
        {"stage": 1, "data_types": {"grad_accum_dtype": "fp32"}},
    ):
        engine = make_engine(accumulation=2, **settings)
        loop = DeepSpeedLoop(engine)
        seen = Recorder(loop, copies=True)
        detach = loop.attach(seen)
        train(engine, 3)
        assert seen.said == ["update", "step"] * 3, settings
        for after, before in zip(seen.copies[1::2], seen.copies[2::2], strict=False):
            assert_same(after, before)
        for before, after in zip(seen.copies[0::2], seen.copies[1::2], strict=True):
            with pytest.raises(AssertionError):
                assert_same(before, after)
        detach()
        engine.destroy()


def case_metrics_of_a_step(folder: Path) -> None:
    engine = make_engine(stage=2, accumulation=2)
    loop = DeepSpeedLoop(engine)
    seen = Recorder(loop)
    loop.attach(seen)
    losses = train(engine, 1)
    rate = engine.get_lr()[0]
    losses += train(engine, 1)
    metrics = [m for _, m in seen.steps]
    assert [float(m["loss"]) for m in metrics] == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2])
    assert [applied for applied, _ in seen.steps] == [True, True]
    assert all(m["step_time_s"] > 0 and float(m["grad_norm"]) > 0 for m in metrics)
    assert metrics[1]["lr"] == rate != engine.get_lr()[0], "of the update itself, not of the next one"
    assert "loss_scale" not in metrics[0]
    engine.destroy()


def case_loss_of_those_who_call_backward_themselves(folder: Path) -> None:
    engine = make_engine(stage=2)
    loop = DeepSpeedLoop(engine)
    seen = Recorder(loop)
    loop.attach(seen)
    loss = engine(next(batches(int(os.environ["RANK"]))))
    with torch.no_grad():
        engine(next(batches(5)))
    loss.backward()
    engine.step()
    assert float(seen.steps[0][1]["loss"]) == pytest.approx(loss.item())
    engine.destroy()


def case_a_skipped_update_is_a_step_that_was_not_applied(folder: Path) -> None:
    engine = make_engine(stage=0)
    loop = DeepSpeedLoop(engine)
    seen = Recorder(loop, copies=True)
    loop.attach(seen)
    engine.backward(engine(next(batches(0))) * float("inf"))
    engine.step()
    assert [applied for applied, _ in seen.steps] == [False]
    assert seen.said == ["update", "step"]
    assert loop.step() == 1 == engine.skipped_steps
    assert torch.equal(seen.copies[0].tensors[("master", "gain")], seen.copies[1].tensors[("master", "gain")])
    engine.destroy()


def case_every_other_way_to_the_state(folder: Path) -> None:
    engine = make_engine(stage=2)
    train(engine, 1)
    engine.save_checkpoint(str(folder), tag=f"world-{os.environ['WORLD_SIZE']}")
    loop = DeepSpeedLoop(engine)
    seen = Recorder(loop)
    loop.attach(seen)

    engine.load_checkpoint(str(folder), tag=f"world-{os.environ['WORLD_SIZE']}")
    assert seen.said[0] == "load_checkpoint"
    assert seen.said[-1] == "layout"
    seen.said.clear()
    engine.module.load_state_dict(engine.module.state_dict())
    assert set(seen.said) == {"load_state_dict"}
    seen.said.clear()
    engine.module.blocks[0].load_state_dict(engine.module.blocks[0].state_dict())
    assert set(seen.said) == {"load_state_dict"}
    seen.said.clear()
    engine.load_module_state_dict({"module": engine.module_state_dict()})
    assert seen.said[0] == "load_module_state_dict"
    assert seen.said[-1] == "layout"
    seen.said.clear()
    engine.destroy()
    assert seen.said == ["closing", "destroy"]


def case_reload_of_offloaded_states(folder: Path) -> None:
    engine = make_engine(stage=2)
    loop = DeepSpeedLoop(engine)
    train(engine, 2)
    before = take(loop.providers())
    seen = Recorder(loop)
    loop.attach(seen)
    engine.offload_states(pin_memory=False)
    assert seen.said == ["offload_states", "layout"]
    with pytest.raises(SetupError, match="reload_states"):
        [provider.tensors() for provider in loop.providers()]
    engine.reload_states()
    assert seen.said == ["offload_states", "layout", "reload_states", "layout"]
    assert_same(take(loop.providers()), before)
    train(engine, 1)
    engine.destroy()


def case_writes_by_parameter_are_announced(folder: Path) -> None:
    for stage in (1, 2, 3):
        engine = make_engine(stage=stage)
        train(engine, 1)
        loop = DeepSpeedLoop(engine)
        seen = Recorder(loop)
        detach = loop.attach(seen)
        weight = engine.module.blocks[0].mlp[0].weight
        ones = torch.ones(3 * WIDTH, WIDTH)
        announced = ["set_full_hp_param", "edited"]

        safe_set_full_fp32_param(weight, ones)
        safe_set_full_optimizer_state(weight, ones, "exp_avg")
        assert seen.said == announced * 2, stage
        assert torch.equal(safe_get_full_fp32_param(weight), ones)
        seen.said.clear()
        if stage == 3:
            mine = torch.ones(weight.ds_tensor.numel())
            safe_set_local_fp32_param(weight, mine)
            safe_set_local_optimizer_state(weight, mine, "exp_avg")
            assert seen.said == ["set_local_hp_param", "edited"] * 2
        if stage == 2:
            engine.offload_states(pin_memory=False)
            engine.reload_states()
            seen.said.clear()
            safe_set_full_fp32_param(weight, ones)
            assert seen.said == announced, "DeepSpeed has linked the parameters anew"
        seen.said.clear()
        detach()
        safe_set_full_fp32_param(weight, ones)
        assert seen.said == []
        engine.destroy()


def case_writes_by_parameter_wait_for_the_snapshot(folder: Path) -> None:
    """Weights are set to zero and back while the snapshot of their step is being written."""
    for stage in (1, 3):
        engine = make_engine(stage=stage, model=WideGPT)
        history = folder / f"{stage}-{os.environ['WORLD_SIZE']}"
        with faults_in_new_writers(native.Faults(delay_us=30_000)):
            session = capture.enable(
                engine, every=1, history=history, budget_bytes=8 << 20, backend="posix", stats_every=0
            )
        with session:
            train(engine, 1)
            for parameter in engine.module.wide.parameters():
                weights = safe_get_full_fp32_param(parameter)
                safe_set_full_fp32_param(parameter, torch.zeros_like(weights))
                if weights.dim() > 1:
                    # DeepSpeed links no state to the parameters of the second group.
                    safe_set_full_optimizer_state(parameter, torch.zeros_like(weights), "exp_avg")
                safe_set_full_fp32_param(parameter, weights)
            expected = take(DeepSpeedLoop(engine).providers())
        assert session.stats.failed == 0
        engine.destroy()
        again = make_engine(stage=stage, model=WideGPT, seed=9)
        capture.restore(f"{session.run}:1", history=history, engine=again)
        assert_same(take(DeepSpeedLoop(again).providers()), expected)
        again.destroy()


@guards("Resume is exact")
def case_writes_by_parameter_belong_to_the_step_before(folder: Path) -> None:
    """Weights are written between all steps; a training that is restored from a step goes on with the same bits."""

    def steps(engine: Any, first: int) -> list[float]:
        losses = []
        for step in range(first, 5):
            losses += train(engine, 1, start=step)
            for parameter in engine.module.blocks.parameters():
                safe_set_full_fp32_param(parameter, safe_get_full_fp32_param(parameter) * 0.9)
        return losses

    for stage in (1, 3):
        engine = make_engine(stage=stage)
        history = folder / f"edited-{stage}-{os.environ['WORLD_SIZE']}"
        with capture.enable(engine, every=2, history=history, stats_every=0) as session:
            losses = steps(engine, 0)
        assert session.failures == []
        expected = take(DeepSpeedLoop(engine).providers())
        engine.destroy()
        for step in (2, 4):
            again = make_engine(stage=stage, seed=9)
            capture.restore(f"{session.run}:{step}", history=history, engine=again)
            assert steps(again, step) == losses[step:]
            assert_same(take(DeepSpeedLoop(again).providers()), expected)
            again.destroy()


def case_detaching_leaves_nothing(folder: Path) -> None:
    for settings in ({"stage": 0, "dtype": "fp32"}, {"stage": 2}, {"stage": 3}):
        engine = make_engine(**settings)
        loop = DeepSpeedLoop(engine)
        owners = (engine, engine.optimizer, engine.module, *engine.module.parameters())
        before = [dict(vars(owner)) for owner in owners]
        hooks = [
            (len(m._forward_hooks), len(m._load_state_dict_pre_hooks), type(m))
            for m in (engine, *engine.module.modules())
        ]
        seen = Recorder(loop)
        detach = loop.attach(seen)
        assert any(vars(owner).keys() != names.keys() for owner, names in zip(owners, before, strict=True))
        detach()
        detach()
        for owner, names in zip(owners, before, strict=True):
            assert vars(owner).keys() == names.keys()
        assert hooks == [
            (len(m._forward_hooks), len(m._load_state_dict_pre_hooks), type(m))
            for m in (engine, *engine.module.modules())
        ]
        train(engine, 1)
        engine.destroy()
        assert seen.said == []


def case_two_sessions_nest_in_any_order(folder: Path) -> None:
    engine = make_engine(stage=2)
    loop = DeepSpeedLoop(engine)
    first, second = Recorder(loop), Recorder(loop)
    detach_first, detach_second = loop.attach(first), loop.attach(second)
    train(engine, 1)
    detach_first()
    train(engine, 1)
    detach_second()
    train(engine, 1)
    assert first.said == ["update", "step"]
    assert second.said == ["update", "step"] * 2
    engine.destroy()


def case_a_deepcopied_model_is_its_own(folder: Path) -> None:
    engine = make_engine(stage=1)
    loop = DeepSpeedLoop(engine)
    loop.attach(Recorder(loop))
    fresh = TinyGPT()
    twin = copy.deepcopy(engine.module)
    before = engine.module.gain.detach().clone()
    twin.load_state_dict(fresh.state_dict())
    twin.gain.data.fill_(3.0)
    assert torch.equal(engine.module.gain.detach(), before)
    engine.destroy()
