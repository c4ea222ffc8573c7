"""Cases in which ranks hold different parameters, captured for real: pipeline stages with a tied layer, and experts."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed_cases_hooks import Recorder
from deepspeed_cases_original import state_of
from deepspeed_eager import assert_same
from deepspeed_helpers import VOCABULARY, WIDTH, Block, TinyGPT, batches, config, make_engine, train, two_groups
from ranks import covers
from torch import nn

import capture
from capture.loops.deepspeed.loop import DeepSpeedLoop
from catalog.errors import UnsupportedError
from catalog.history import History

# Experts are first: a pipeline leaves its grid behind in DeepSpeed's globals, and experts would be placed on it.


class WithExperts(TinyGPT):
    def __init__(self, *, ep_size: int) -> None:
        super().__init__()
        expert = nn.Linear(WIDTH, WIDTH)
        self.experts = MoE(WIDTH, expert, num_experts=4, ep_size=ep_size, k=1, use_rts=False)
        for index, one in enumerate(self.experts.deepspeed_moe.experts.deepspeed_experts):
            nn.init.normal_(one.weight, mean=float(index), std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(tokens)
        mixed, balance, _ = self.experts(self.embed(tokens))
        return loss + mixed.float().square().mean() + 0.01 * balance


def make_experts(*, ep_size: int, **settings: Any) -> Any:
    return make_engine(model=lambda: WithExperts(ep_size=ep_size), groups=False, **settings)


@covers("MoE with expert parallelism, `ep_size` 1 and 2: ZeRO 0, 1, 2")
def case_experts_resume_bit_for_bit(folder: Path) -> None:
    for ep_size in (2, 1):
        for stage in (0, 1, 2):
            history = folder / f"experts-{ep_size}-{stage}"
            engine = make_experts(ep_size=ep_size, stage=stage)
            torch.manual_seed(3 + int(os.environ["RANK"]))
            with capture.enable(engine, every=4, history=history):
                train(engine, 4)
                middle = state_of(engine)
                losses = train(engine, 4)
                last = state_of(engine)
            experts = [
                name
                for kind, name in middle.tensors
                if kind == "master" and name.endswith("weight") and "_experts." in name
            ]
            assert len(experts) == 4, experts
            assert len({float(middle.tensors[("master", name)].sum()) for name in experts}) == 4
            engine.destroy()
            torch.distributed.barrier()

            again = make_experts(ep_size=ep_size, stage=stage, seed=9)
            capture.restore(4, history=history, engine=again)
            assert_same(state_of(again), middle)
            assert train(again, 4) == losses
            assert_same(state_of(again), last)
            again.destroy()


@covers("MoE into another `ep_size` and ZeRO stage")
def case_experts_move_between_ranks(folder: Path) -> None:
    stored = capture.restore(4, history=folder / "experts-2-2")
    assert isinstance(stored, dict)
    engine = make_experts(ep_size=1, stage=1, seed=9)
    capture.restore(4, history=folder / "experts-2-2", engine=engine)
    mine = state_of(engine)
    for kind in ("master", "exp_avg"):
        for name, tensor in stored[kind].items():
            if name != "head.weight":
                assert torch.equal(mine.tensors[(kind, name)], tensor), (kind, name)
    train(engine, 1)
    engine.destroy()


def head(layer: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight.t()


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].float().reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def make_pipeline(*, stages: int, seed: int = 7, **settings: Any) -> Any:
    torch.manual_seed(seed)
    layers = [
        TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH),
        LayerSpec(Block),
        LayerSpec(Block),
        TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=head),
    ]
    model = PipelineModule(layers=layers, num_stages=stages, loss_fn=next_token_loss, partition_method="uniform")
    made = config(accumulation=2, world=int(os.environ["WORLD_SIZE"]) // stages, **settings)
    return deepspeed.initialize(model=model, model_parameters=two_groups(model), config=made)[0]


def pairs(start: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for tokens in batches(0, start=start):
        yield tokens, tokens


def train_pipeline(engine: Any, steps: int) -> list[float]:
    stream = pairs(2 * engine.global_steps)
    return [float(engine.train_batch(stream)) for _ in range(steps)]


@covers("`PipelineModule` of 2 stages with a tied layer: ZeRO 0, 1, bf16 and fp32")
def case_pipeline_resumes_bit_for_bit(folder: Path) -> None:
    variants: list[dict[str, Any]] = [{"stage": 0}, {"stage": 1}, {"stage": 1, "dtype": "fp32"}]
    for number, settings in enumerate(variants):
        history = folder / f"pipeline-{number}"
        engine = make_pipeline(stages=2, **settings)
        with capture.enable(engine, every=4, history=history):
            first = train_pipeline(engine, 4)
            middle = state_of(engine)
            losses = train_pipeline(engine, 4)
            last = state_of(engine)
        torch.distributed.barrier()
        stored = capture.restore(4, history=history)
        assert isinstance(stored, dict)
        for (kind, name), tensor in middle.without_buffers().tensors.items():
            assert torch.equal(stored[kind][name], tensor), (kind, name)
        rows = History.open(history).query("SELECT value FROM metrics WHERE name = 'loss' ORDER BY step").to_pylist()
        assert [row["value"] for row in rows] == pytest.approx([*first, *losses])
        engine.destroy()

        again = make_pipeline(stages=2, seed=9, **settings)
        capture.restore(4, history=history, engine=again)
        assert_same(state_of(again), middle)
        assert train_pipeline(again, 4) == losses
        assert_same(state_of(again), last)
        again.destroy()


@covers("a pipeline of 2 stages into one of 1 stage")
def case_pipeline_of_two_stages_becomes_one(folder: Path) -> None:
    stored = capture.restore(4, history=folder / "pipeline-1")
    assert isinstance(stored, dict)
    engine = make_pipeline(stages=1, seed=9, stage=1)
    capture.restore(4, history=folder / "pipeline-1", engine=engine)
    mine = state_of(engine)
    for kind in ("model", "master", "exp_avg", "exp_avg_sq"):
        assert {name for k, name in mine.tensors if k == kind} == stored[kind].keys()
        for name, tensor in stored[kind].items():
            assert torch.equal(mine.tensors[(kind, name)], tensor), (kind, name)
    train_pipeline(engine, 1)
    engine.destroy()


@covers("a pipeline of 1 stage into one of 2 stages")
def case_pipeline_of_one_stage_becomes_two(folder: Path) -> None:
    history = folder / "pipeline-of-one"
    engine = make_pipeline(stages=1, stage=1)
    with capture.enable(engine, every=2, history=history):
        train_pipeline(engine, 2)
    engine.destroy()
    torch.distributed.barrier()
    stored = capture.restore(2, history=history)
    assert isinstance(stored, dict)
    engine = make_pipeline(stages=2, seed=9, stage=1)
    capture.restore(2, history=history, engine=engine)
    mine = state_of(engine)
    for kind in ("model", "master", "exp_avg", "exp_avg_sq"):
        assert {name for k, name in mine.tensors if k == kind} == stored[kind].keys()
        for name, tensor in stored[kind].items():
            assert torch.equal(mine.tensors[(kind, name)], tensor), (kind, name)
    assert all(map(math.isfinite, train_pipeline(engine, 1)))
    engine.destroy()


def case_pipeline_hooks(folder: Path) -> None:
    engine = make_pipeline(stages=2, stage=1)
    loop = DeepSpeedLoop(engine)
    seen = Recorder(loop, copies=True)
    detach = loop.attach(seen)
    train_pipeline(engine, 3)
    assert seen.said == ["update", "step"] * 3
    for after, before in zip(seen.copies[1::2], seen.copies[2::2], strict=False):
        assert_same(after, before)
    detach()
    assert "train_batch" not in vars(engine)
    engine.destroy()


def case_pipeline_without_master_weights_is_refused(folder: Path) -> None:
    engine = make_pipeline(stages=2, stage=0, dtype="fp32")
    with pytest.raises(UnsupportedError, match="pipeline stages"):
        DeepSpeedLoop(engine)
    engine.destroy()
