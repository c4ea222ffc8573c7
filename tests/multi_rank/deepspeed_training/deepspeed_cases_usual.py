"""Cases for common trainings: own optimizers, adapters, norms with buffers, recomputation, compiled modules.

Each one is captured, restored into a fresh engine and again into the live one, and trains on to the same bits.
"""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed_eager import assert_same, state_of
from deepspeed_helpers import LENGTH, WIDTH, TinyGPT, allow_fp16, make_engine, train, two_groups, with_client
from ranks import covers
from torch import nn
from torch.utils.checkpoint import checkpoint

import capture
import dshistory
from capture.maintenance import compaction
from catalog.data_files.data_files import only_packed
from catalog.errors import MismatchError
from catalog.history import History
from catalog.paths import data_file
from catalog.verify import verify

WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
CAPTURED, LAST = 3, 6
BASE_BYTES = 1 << 20
"""About the size of the frozen base in bf16."""


def check_capture(history: Path, make: Callable[[int], Any]) -> None:
    """Capture and restore a training; `make` builds an engine from a seed."""
    engine = make(7)
    torch.manual_seed(11 + RANK)
    with capture.enable(engine, every=CAPTURED, history=history) as session:
        train(engine, CAPTURED)
        middle = state_of(engine)
        losses = train(engine, LAST - CAPTURED)
        last = state_of(engine)
    assert session.stats.failed == 0
    engine.destroy()
    torch.distributed.barrier()
    again = make(99)
    for _ in range(2):
        capture.restore(CAPTURED, history=history, engine=again)
        assert_same(state_of(again), middle)
        assert train(again, LAST - CAPTURED) == losses, history.name
        assert_same(state_of(again), last)
    again.destroy()


class Own(torch.optim.Optimizer):
    """A user's optimizer that applies the sign of a momentum and keeps a count."""

    def __init__(self, params: Iterable[Any], *, lr: float = 1e-3, memory: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "memory": memory})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(updates=0, trend=torch.zeros_like(parameter))
                state["updates"] += 1
                state["trend"].lerp_(parameter.grad.to(parameter.dtype), 1 - group["memory"])
                parameter.sub_(state["trend"].sign(), alpha=group["lr"] / state["updates"] ** 0.5)


@covers("a user's own optimizer: ZeRO 0, 1, 2, 3")
def case_a_users_own_optimizer(folder: Path) -> None:
    for stage in (0, 1, 2, 3):
        check_capture(folder / f"own-{stage}", lambda seed, stage=stage: with_client(Own, seed, stage=stage))


@covers("torch Adam and AdamW that the user has made: ZeRO 2, 3")
def case_torch_optimizers_of_the_user(folder: Path) -> None:
    for stage, rule in ((2, torch.optim.Adam), (3, torch.optim.AdamW)):
        check_capture(folder / f"adam-{stage}", lambda seed, s=stage, r=rule: with_client(r, seed, stage=s))


@covers("SGD with momentum: ZeRO 0, 1")
def case_sgd_with_momentum(folder: Path) -> None:
    sgd = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}
    for stage in (0, 1):
        settings = {"stage": stage, "optimizer": sgd, "zero_allow_untested_optimizer": True}
        check_capture(folder / f"sgd-{stage}", lambda seed, s=settings: make_engine(seed=seed, **s))


class WithAdapters(TinyGPT):
    """A model whose parameters are frozen, except for a low-rank path beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(tokens)
        x = self.embed(tokens)
        return loss + (self.up(self.down(x)) - x).float().square().mean()


@covers("LoRA-like, most parameters frozen: ZeRO 0, 1, 2, 3")
def case_most_parameters_frozen(folder: Path) -> None:
    for stage in (0, 1, 2, 3):
        settings: dict[str, Any] = {"model": WithAdapters, "groups": False, "stage": stage}
        check_capture(folder / f"lora-{stage}", lambda seed, s=settings: make_engine(seed=seed, **s))


class WithLargeBase(WithAdapters):
    """A model with frozen weights that are large enough to be deduplicated."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, BASE_BYTES // WIDTH // 2, bias=False).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(tokens)
        return loss + self.base(self.embed(tokens) + self.up(self.down(self.embed(tokens)))).float().square().mean()


@covers("LoRA-like: frozen weights are not written again: ZeRO 0, 1, 2, 3")
def case_frozen_weights_are_written_once(folder: Path) -> None:
    for stage in (0, 1, 2, 3):
        engine, history = make_engine(model=WithLargeBase, groups=False, stage=stage), folder / f"base-{stage}"
        copies = {}
        with capture.enable(engine, every=1000, history=history) as session:
            for step in range(1, 5):
                train(engine, 1)
                assert session.snapshot() == step
                copies[step] = state_of(engine)
                session.wait()
                torch.distributed.barrier()
        assert session.stats.unchanged_bytes >= 2 * BASE_BYTES // WORLD * 0.9, stage
        for step in (2, 4):
            capture.restore(step, history=history, engine=engine)
            assert_same(state_of(engine), copies[step])
        engine.destroy()


@covers("low-precision weights that are their masters, rounded: ZeRO 0, 1, 2, 3, of bf16 and fp16 engines")
def case_weights_beside_their_masters(folder: Path) -> None:
    allow_fp16()
    for stage, dtype in ((0, "fp16"), (1, "bf16"), (2, "fp16"), (3, "bf16")):
        engine, history = make_engine(stage=stage, dtype=dtype), folder / f"derived-{stage}-{dtype}"
        with capture.enable(engine, every=1, history=history, strict=True) as session:
            train(engine, 2)
            expected = state_of(engine)
        torch.distributed.barrier()
        opened = History.open(history)
        rows = opened.query("SELECT * FROM fragments WHERE kind = 'model' AND step = 2").to_pylist()
        assert {row["name"] for row in rows if row["codec"] == "raw"} == {"place"}, "the frozen one has no master"
        derived = [row for row in rows if row["codec"] == "rounded"]
        trained = {n: getattr(p, "ds_numel", p.numel()) for n, p in engine.module.named_parameters() if n != "place"}
        assert {row["name"] for row in derived} == trained.keys(), (stage, dtype)
        assert sum(row["numel"] for row in derived) == sum(trained.values()), (stage, dtype)
        ranks = {row["rank"] for row in derived}
        # What is replicated is one long row of bytes: in so small a model one rank may write all masters.
        assert ranks == set(range(WORLD)) or stage == 0, (stage, dtype)
        assert (session.stats.derived_bytes > 0) == (RANK in ranks), (stage, dtype)
        assert verify(opened) == []
        train(engine, 1)
        capture.restore("latest", history=history, engine=engine)
        assert_same(state_of(engine), expected)
        engine.destroy()


@covers("compaction beside the training: ZeRO 2")
def case_compaction_beside_the_training(folder: Path) -> None:
    lowest = "beside.take_lowest_priority()\n"
    assert lowest in compaction._START
    # At the lowest priority a busy machine would never come to it.
    compaction._START = compaction._START.replace(lowest, "")
    engine, history = make_engine(stage=2, dtype="bf16"), folder / "compacted"
    expected = {}
    with capture.enable(engine, every=1, history=history, compact=True, strict=True) as session:
        for step in range(1, 6):
            train(engine, 1)
            expected[step] = state_of(engine)
        session.wait()
        torch.distributed.barrier()
        deadline = time.monotonic() + 200
        while RANK == 0 and session.stats.compacted < 4:
            assert time.monotonic() < deadline, session.stats
            time.sleep(0.05)
        torch.distributed.barrier()
        assert (session.stats.compacted, session.stats.saved_bytes > 0) == ((4, True) if RANK == 0 else (0, False))
    opened = History.open(history)
    for step in range(6):
        files = [data_file(session.run, step, rank) for rank in range(WORLD)]
        assert only_packed(history, files) == frozenset(files if step < 4 else ()), step
    assert verify(opened) == []
    for step in (1, 3, 5):
        capture.restore(step, history=history, engine=engine)
        assert_same(state_of(engine), expected[step])
    engine.destroy()


def rounded_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Return what each parameter is in bf16, gathered from all ranks by DeepSpeed."""
    found = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().to(torch.bfloat16, copy=True)
    return found


@covers("weights only, rounded to bf16: ZeRO 1, 2, 3, of fp32, bf16 and fp16 engines")
def case_weights_only(folder: Path) -> None:
    allow_fp16()
    for stage, dtype in ((1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "fp16")):
        engine, history = make_engine(stage=stage, dtype=dtype), folder / f"weights-{stage}-{dtype}"
        with capture.enable(engine, every=1, history=history, what="weights", dtype="bf16", strict=True) as session:
            train(engine, 2)
            expected = rounded_weights(engine)
        torch.distributed.barrier()
        found = capture.restore("latest", history=history)
        assert found.keys() == {"model", "buffer"}, found.keys()
        for name, tensor in found["model"].items():
            # The weights of an fp16 engine have 16 bits already: they stay as they are.
            assert tensor.dtype == (torch.float16 if dtype == "fp16" else torch.bfloat16)
            assert torch.equal(tensor.to(torch.bfloat16), expected[name]), name
        with pytest.raises(MismatchError, match="weights only"):
            capture.restore("latest", history=history, engine=engine)
        assert session.stats.failed == 0
        engine.destroy()


class WithBatchNorm(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(LENGTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(tokens)
        return loss + 0.1 * (self.batch_norm(self.embed(tokens)) - 1).float().square().mean()


@covers("BatchNorm and other buffers that forward changes, fp32: ZeRO 0, 2, 3")
def case_batch_norm(folder: Path) -> None:
    for stage in (0, 2, 3):
        settings: dict[str, Any] = {"model": WithBatchNorm, "stage": stage, "dtype": "fp32", "accumulation": 2}
        check_capture(folder / f"norm-{stage}", lambda seed, s=settings: make_engine(seed=seed, **s))


class Recomputed(TinyGPT):
    """A model that recomputes the activations of its blocks in the backward pass, including dropout."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


@covers("activation checkpointing: ZeRO 1, 2, 3")
def case_activation_checkpointing(folder: Path) -> None:
    for stage in (1, 2, 3):
        settings: dict[str, Any] = {"model": Recomputed, "stage": stage}
        check_capture(folder / f"recomputed-{stage}", lambda seed, s=settings: make_engine(seed=seed, **s))


@covers("`engine.compile`, and a module compiled before: ZeRO 1, 2")
def case_compiled_modules(folder: Path) -> None:
    def compiled_by_engine(seed: int) -> Any:
        engine = make_engine(seed=seed, stage=2)
        engine.compile(backend="eager")
        return engine

    def compiled_before(seed: int) -> Any:
        return make_engine(seed=seed, stage=1, model=lambda: torch.compile(TinyGPT(), backend="eager"))

    check_capture(folder / "compiled-by-engine", compiled_by_engine)
    check_capture(folder / "compiled-before", compiled_before)
    stored = capture.restore(CAPTURED, history=folder / "compiled-before", kinds="model")
    assert isinstance(stored, dict)
    assert "embed.weight" in stored["model"]


@covers("`offload_states` and `reload_states` between steps: ZeRO 1, 2")
def case_states_away_between_steps(folder: Path) -> None:
    # Under ZeRO 3, DeepSpeed offloads only the states of its FusedAdam, which needs a GPU.
    for stage in (1, 2):
        engine = make_engine(stage=stage)
        torch.manual_seed(11 + RANK)
        history = folder / f"away-{stage}"
        losses, copies = [], {}
        with capture.enable(engine, every=1, history=history) as session:
            for step in range(1, LAST + 1):
                losses += train(engine, 1)
                copies[step] = state_of(engine)
                if step % 2:
                    engine.offload_states(pin_memory=False)
                    engine.reload_states()
        assert session.stats.failed == 0
        torch.distributed.barrier()
        for step in range(2, LAST + 1):
            assert len(dshistory.open(history).audit(step - 1, step, quiet=True).unbalanced) == 0
        for step in (1, CAPTURED):
            capture.restore(step, history=history, engine=engine)
            assert_same(state_of(engine), copies[step])
            assert train(engine, LAST - step) == losses[step:]
        engine.destroy()


@covers("into a plain PyTorch model and optimizer: from ZeRO 0, 1, 2, 3")
def case_into_plain_pytorch(folder: Path) -> None:
    for stage in (0, 1, 2, 3):
        engine = make_engine(stage=stage, dtype="fp32")
        there = folder / f"to-plain-{stage}"
        with capture.enable(engine, every=CAPTURED, history=there):
            train(engine, CAPTURED)
            stored = state_of(engine)
        torch.distributed.barrier()
        model = TinyGPT()
        optimizer = torch.optim.AdamW(two_groups(model), lr=1.0)
        capture.restore(CAPTURED, history=there, model=model, optimizer=optimizer)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.detach(), stored.tensors["model", name]), name
            for kind in ("exp_avg", "exp_avg_sq") if parameter.requires_grad else ():
                assert torch.equal(optimizer.state[parameter][kind], stored.tensors[kind, name]), (kind, name)
        assert {float(state["step"]) for state in optimizer.state.values()} == {float(CAPTURED)}
        engine.destroy()
        check_goes_on(model, optimizer)


def check_goes_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    before = model.gain.detach().clone()
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    model(tokens).backward()
    optimizer.step()
    assert not torch.equal(model.gain.detach(), before)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
