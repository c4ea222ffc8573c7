"""Cases for the DeepSpeed provider: every fragment has the stated address, and restored state trains on bit for bit."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed_eager import Eager, assert_same, providers, put_back, take
from deepspeed_helpers import TinyGPT, batches, make_engine, train
from ranks import covers

from capture.loops.deepspeed.loop import DeepSpeedLoop
from capture.loops.deepspeed.optimizer_provider import ZeroState
from catalog.errors import MismatchError


def zero_state(engine: Any) -> ZeroState:
    return next(p for p in DeepSpeedLoop(engine).providers() if isinstance(p, ZeroState))


def check_resume(**settings: Any) -> None:
    """Train, restore and train again: in place, in a fresh engine, and from a state before the first update."""
    engine = make_engine(**settings)
    torch.manual_seed(11 + int(os.environ["RANK"]))
    state = providers(engine)
    at_0 = take(state)
    train(engine, 4)
    at_4 = take(state)
    losses = train(engine, 4)
    at_8 = take(state)

    put_back(state, at_4)
    assert_same(take(state), at_4)
    assert train(engine, 4) == losses
    assert_same(take(state), at_8)

    put_back(state, at_0)
    assert_same(take(state), at_0)
    train(engine, 4)
    assert_same(take(state), at_4)
    engine.destroy()

    fresh = make_engine(seed=99, **settings)
    state = providers(fresh)
    put_back(state, at_4)
    assert_same(take(state), at_4)
    assert train(fresh, 4) == losses
    assert_same(take(state), at_8)
    assert take(state).objects["counters"] == at_8.objects["counters"]
    fresh.destroy()


@covers("ZeRO 0, fp32, gradient accumulation")
def case_stage_0_fp32(folder: Path) -> None:
    check_resume(stage=0, dtype="fp32", accumulation=2)


@covers("ZeRO 0, bf16")
def case_stage_0_bf16(folder: Path) -> None:
    check_resume(stage=0)


@covers("ZeRO 1, bf16, gradient accumulation")
def case_stage_1_bf16(folder: Path) -> None:
    check_resume(stage=1, accumulation=2)


@covers("ZeRO 1, fp32")
def case_stage_1_fp32(folder: Path) -> None:
    check_resume(stage=1, dtype="fp32")


@covers("ZeRO 1, bf16 with fp32 gradient accumulation (`BF16_Optimizer`)")
def case_stage_1_bf16_optimizer(folder: Path) -> None:
    check_resume(stage=1, accumulation=2, data_types={"grad_accum_dtype": "fp32"})


@covers("ZeRO 2, bf16, gradient accumulation")
def case_stage_2_bf16(folder: Path) -> None:
    check_resume(stage=2, accumulation=2)


@covers("ZeRO 2, fp32")
def case_stage_2_fp32(folder: Path) -> None:
    check_resume(stage=2, dtype="fp32")


@covers("ZeRO 3, bf16, gradient accumulation")
def case_stage_3_bf16(folder: Path) -> None:
    check_resume(stage=3, accumulation=2)


@covers("ZeRO 3, fp32")
def case_stage_3_fp32(folder: Path) -> None:
    check_resume(stage=3, dtype="fp32")


@covers("ZeRO 3 in several sub-groups")
def case_stage_3_sub_groups(folder: Path) -> None:
    check_resume(stage=3, zero={"sub_group_size": 500})


@covers("one param group: ZeRO 2")
def case_one_param_group(folder: Path) -> None:
    check_resume(stage=2, groups=False)


@covers("SGD with momentum: ZeRO 2, 3")
def case_momentum_of_sgd(folder: Path) -> None:
    sgd = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}
    for stage in (2, 3):
        check_resume(stage=stage, optimizer=sgd, zero_allow_untested_optimizer=True)


def check_names(engine: Any, eager: Eager) -> None:
    """Assert that DeepSpeed's own API returns the same tensor for each parameter."""
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # With several param groups, DeepSpeed links the parameters after the first group, when the others have no state
        # yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    compared = 0
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            master = eager.tensors.get(("master", name), eager.tensors[("model", name)])
            assert torch.equal(safe_get_full_fp32_param(parameter), master), name
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(safe_get_full_optimizer_state(parameter, key), eager.tensors[(key, name)]), (
                    key,
                    name,
                )
            compared += 1
    assert compared > 20


def case_names_are_deepspeeds_own(folder: Path) -> None:
    variants: list[dict[str, Any]] = [
        {"stage": 1},
        {"stage": 2},
        {"stage": 3},
        {"stage": 3, "zero": {"sub_group_size": 500}},
        {"stage": 1, "data_types": {"grad_accum_dtype": "fp32"}},
    ]
    for settings in variants:
        engine = make_engine(**settings)
        train(engine, 3)
        check_names(engine, take(providers(engine)))
        engine.destroy()


@covers("`round_robin_gradients`: ZeRO 2")
def case_round_robin_gradients(folder: Path) -> None:
    """DeepSpeed's own mapping is wrong here with several ranks; the low-precision weights show the right one."""
    check_resume(stage=2, zero={"round_robin_gradients": True})
    engine = make_engine(stage=2, zero={"round_robin_gradients": True})
    train(engine, 3)
    eager = take(providers(engine))
    for (kind, name), master in eager.tensors.items():
        if kind == "master":
            assert torch.equal(master.bfloat16(), eager.tensors[("model", name)]), name
    engine.destroy()


@covers("tied weights under one name, frozen parameters without optimizer state")
def case_kinds_and_aliases(folder: Path) -> None:
    engine = make_engine(stage=2)
    train(engine, 1)
    items = zero_state(engine).tensors()
    assert {item.kind for item in items} == {"model", "master", "exp_avg", "exp_avg_sq"}
    assert [i.aliases for i in items if i.kind == "model" and i.name == "embed.weight"] == [("head.weight",)]
    assert not any(item.name == "head.weight" for item in items)
    assert {i.kind for i in items if i.name == "place"} == {"model"}, (
        "a frozen parameter has neither master nor moments"
    )
    engine.destroy()


def case_a_partition_is_one_memory_run(folder: Path) -> None:
    """Neighbouring fragments are adjacent in memory, so that a plan can combine a flat partition into one run."""
    for stage in (1, 3):
        engine = make_engine(stage=stage, groups=False, model=lambda: TinyGPT(tied=False))
        train(engine, 1)
        items = [i for i in zero_state(engine).tensors() if i.kind == "exp_avg"]
        if stage == 1 or int(os.environ["WORLD_SIZE"]) == 1:
            ends = [i.tensor.data_ptr() + i.tensor.nbytes for i in items]
            assert [i.tensor.data_ptr() for i in items[1:]] == ends[:-1]
        assert len({i.tensor.untyped_storage().data_ptr() for i in items}) == 1
        engine.destroy()


def case_padding_is_not_state(folder: Path) -> None:
    """Poisoned tails of the flat partitions change nothing and are never captured."""
    for stage in (1, 2, 3):
        engine = make_engine(stage=stage)
        state = providers(engine)
        train(engine, 2)
        at_2 = take(state)
        losses = train(engine, 3)
        put_back(state, at_2)
        poisoned = poison_padding(engine, zero_state(engine))
        assert (
            poisoned
            or int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"]) - 1
            or int(os.environ["WORLD_SIZE"]) == 1
        )
        assert_same(take(state), at_2)
        assert train(engine, 3) == losses
        engine.destroy()


def poison_padding(engine: Any, provider: Any) -> int:
    """Write NaN to every element of the optimizer's flat tensors that no fragment names; return their number."""
    poisoned = 0
    for flat in provider._flats():
        for value in (flat.tensor, *engine.optimizer.optimizer.state[flat.tensor].values()):
            if value.shape == flat.tensor.shape:
                named = torch.zeros(value.numel(), dtype=torch.bool)
                for fragment in flat.fragments:
                    named[fragment.offset : fragment.offset + fragment.numel] = True
                value.detach()[~named] = float("nan")
                poisoned += int((~named).sum())
    return poisoned


@covers("a restore in the middle of an accumulation: ZeRO 0, 1, 2, 3")
def case_partial_gradients_are_discarded(folder: Path) -> None:
    for settings in (
        {"stage": 0},
        {"stage": 1},
        {"stage": 2},
        {"stage": 3},
        {"stage": 1, "data_types": {"grad_accum_dtype": "fp32"}},
    ):
        engine = make_engine(accumulation=2, **settings)
        state = providers(engine)
        train(engine, 2)
        at_2 = take(state)
        losses = train(engine, 2)
        put_back(state, at_2)
        stream = batches(int(os.environ["RANK"]), start=500)
        for stop_before_step in (False, True):
            engine.backward(engine(next(stream)))
            if not stop_before_step:
                engine.step()
        put_back(state, at_2)
        assert train(engine, 2) == losses, settings
        engine.destroy()


def case_a_refused_restore_leaves_the_engine_able_to_train(folder: Path) -> None:
    engine = make_engine(stage=2)
    state = providers(engine)
    train(engine, 2)
    eager = take(state)
    losses = train(engine, 2)
    engine.destroy()

    other = make_engine(stage=2, groups=False)
    with pytest.raises(MismatchError, match="2 optimizer param groups, this engine has 1"):
        zero_state(other).prepare(eager.available())
    other.destroy()

    fresh = make_engine(stage=2)
    untouched = take(providers(fresh))
    state = providers(fresh)
    zero_state(fresh).prepare(eager.available())
    assert_same(take(providers(fresh)), untouched)
    put_back(state, eager)
    assert train(fresh, 2) == losses
    fresh.destroy()


def case_other_optimizer_state_is_refused(folder: Path) -> None:
    engine = make_engine(stage=2)
    train(engine, 1)
    available = take(providers(engine)).available()
    engine.destroy()
    sgd = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}
    other = make_engine(stage=2, optimizer=sgd, zero_allow_untested_optimizer=True)
    train(other, 1)
    with pytest.raises(MismatchError, match=r"Adam.*SGD.*nothing was changed"):
        zero_state(other).prepare(available)
    # Now the class is the same, but the state tensors differ.
    available.objects["optimizer"]["class"] = "torch.optim.sgd.SGD"
    with pytest.raises(MismatchError, match=r"exp_avg.*momentum_buffer"):
        zero_state(other).prepare(available)
    other.destroy()
