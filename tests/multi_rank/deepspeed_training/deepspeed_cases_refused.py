"""Cases for configurations that `enable` refuses: the error names the configuration, nothing is written, the engine can
train.

REFUSED is a literal, because docs/coverage.md is made from it. Most of these engines can't be started without a GPU or
NVMe, so the cases use a real engine and replace what DeepSpeed reads of its configuration.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed_helpers import make_engine, train

import capture
from capture.loops.deepspeed.loop import DeepSpeedLoop
from catalog.errors import UnsupportedError

REFUSED: list[tuple[str, str, str]] = [
    # Each entry has the configuration, the beginning of the message, and the engine attributes that are replaced.
    ("`zero_optimization.zenflow`", "ZenFlow (it updates in another process)", "zenflow"),
    ("`offload_optimizer.super_offload`", "SuperOffload (it updates during backward)", "super_offload"),
    ("`offload_optimizer.device: nvme`", "optimizer state swapped to NVMe", "zero_offload_optimizer"),
    ("`offload_param.device: nvme`", "parameters swapped to NVMe", "zero_offload_param"),
    (
        "`offload_optimizer.ratio` below 1",
        "partial optimizer offload (offload_optimizer.ratio below 1)",
        "zero_offload_optimizer",
    ),
    (
        "`zero_hpz_partition_size` above 1",
        "ZeRO++ secondary partitions (zero_hpz_partition_size above 1)",
        "zero_hpz_partition_size",
    ),
    ("`zero_quantized_weights`", "ZeRO++ quantized weights", "zero_quantized_weights"),
    ("`zero_quantized_nontrainable_weights`", "ZeRO++ quantized weights", "zero_quantized_nontrainable_weights"),
    ("`zero_quantized_gradients`", "ZeRO++ quantized gradients", "zero_quantized_gradients"),
    ("`compile.deepcompile`", "DeepCompile", "is_deepcompile_enabled"),
    ("`tensor_parallel.autotp_size` above 1", "tensor parallelism", "autotp_size"),
    ("`expert_parallel`", "experts that DeepSpeed put into the model (expert_parallel)", "_has_autoep_layers"),
    ("`data_efficiency.data_routing.random_ltd`", "random layer token drop (random_ltd)", "random_ltd_enabled"),
    (
        "`data_efficiency.data_sampling.curriculum_learning`",
        "curriculum learning (its sampler keeps state)",
        "curriculum_learning_enabled",
    ),
    ("no optimizer", "an engine without an optimizer", "basic_optimizer"),
]
ANSWERS: dict[str, Any] = {
    "zenflow": True,
    "basic_optimizer": None,
    "zero_hpz_partition_size": lambda: 2,
    "autotp_size": lambda: 2,
    "zero_offload_param": lambda: SimpleNamespace(device="nvme"),
    "optimizer state swapped to NVMe": lambda: SimpleNamespace(device="nvme", ratio=1.0),
    "partial optimizer offload (offload_optimizer.ratio below 1)": lambda: SimpleNamespace(device="cpu", ratio=0.5),
}


def case_refused_by_name(folder: Path) -> None:
    engine = make_engine(stage=2)
    engine.training_dataloader = ()
    for _, message, attribute in REFUSED:
        answer = ANSWERS.get(message, ANSWERS.get(attribute, lambda: True))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, attribute, answer)
            with pytest.raises(UnsupportedError) as refusal:
                capture.enable(engine, history=folder / "refused")
        assert str(refusal.value).startswith(f"{message} can't be captured safely; turn it off"), attribute
        assert not (folder / "refused").exists(), "nothing was made"
    DeepSpeedLoop(engine)
    train(engine, 1)
    engine.destroy()


def case_an_unknown_optimizer_wrapper(folder: Path) -> None:
    """An optimizer wrapper of another DeepSpeed version, such as the one of MiCS, is refused until it is supported."""
    engine = make_engine(stage=2)
    known = type(engine.optimizer)
    engine.optimizer.__class__ = type("MiCS_Optimizer", (known,), {})
    with pytest.raises(UnsupportedError, match=r"MiCS_Optimizer is not known"):
        capture.enable(engine, history=folder / "wrapper")
    engine.optimizer.__class__ = known
    engine.destroy()
