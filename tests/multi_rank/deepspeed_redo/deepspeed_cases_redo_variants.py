"""Cases for redo logs of the less common DeepSpeed engines."""

from pathlib import Path
from typing import Any

from deepspeed_cases_redo import check
from deepspeed_helpers import CPU_ADAM, FP16, OFFLOAD, allow_fp16
from ranks import covers, guards

ADAM = {"lr": 5e-3, "weight_decay": 0.1, "torch_adam": True}
SGD = {"type": "SGD", "params": {"lr": 5e-3, "momentum": 0.9, "weight_decay": 0.1}}


def check_all(folder: Path, variants: dict[str, dict[str, Any]]) -> None:
    for name, settings in variants.items():
        check(folder / name, **settings)


@guards("A redo step has the bits of the training")
@covers("the redo log: ZeRO 0 and 1 in bf16; ZeRO 0, 1, 2 and 3 in fp32")
def case_other_precisions(folder: Path) -> None:
    allow_fp16()
    check_all(
        folder,
        {
            "0 bf16": {"stage": 0},
            "1 bf16": {"stage": 1},
            "0 fp32": {"stage": 0, "dtype": "fp32"},
            "1 fp32": {"stage": 1, "dtype": "fp32"},
            "2 fp32": {"stage": 2, "dtype": "fp32", "accumulation": 2},
            "3 fp32": {"stage": 3, "dtype": "fp32"},
        },
    )


@guards("A redo step has the bits of the training")
@covers("the redo log: fp16 with skipped updates, ZeRO 0, 1, 2 and 3")
def case_skipped_updates(folder: Path) -> None:
    allow_fp16()
    check_all(folder, {f"fp16 {stage}": {"stage": stage, "dtype": "fp16", "fp16": FP16} for stage in (0, 1, 2, 3)})


@guards("A redo step has the bits of the training")
@covers("the redo log: DeepSpeed CPU Adam, ZeRO-Offload 1, 2 and 3, decoupled decay and L2")
def case_cpu_adam(folder: Path) -> None:
    check_all(
        folder,
        {
            "offload 1": {"stage": 1, "zero": OFFLOAD, "optimizer": CPU_ADAM},
            "offload 2": {"stage": 2, "zero": OFFLOAD, "optimizer": CPU_ADAM, "accumulation": 2},
            "offload 3": {"stage": 3, "zero": OFFLOAD, "optimizer": CPU_ADAM},
            "offload params": {
                "stage": 3,
                "zero": {**OFFLOAD, "offload_param": {"device": "cpu"}},
                "optimizer": CPU_ADAM,
            },
            "L2": {
                "stage": 2,
                "zero": OFFLOAD,
                "optimizer": {"type": "Adam", "params": {**CPU_ADAM["params"], "adam_w_mode": False}},
            },
            "betas": {"stage": 2, "zero": OFFLOAD, "optimizer": {**CPU_ADAM, "params": {"betas": [0.8, 0.99]}}},
        },
    )


@guards("A redo step has the bits of the training")
@covers("the redo log: DeepSpeed CPU Adam whose betas move")
def case_cpu_adam_whose_betas_move(folder: Path) -> None:
    """Its compiled code takes the power of other betas, and has running products from then on."""

    def move(step: int, engine: Any) -> None:
        if step in (2, 3):
            for group in engine.optimizer.optimizer.param_groups:
                group["betas"] = (0.9 - 0.02 * step, 0.999)

    check(folder / "moved", between=move, stage=2, zero=OFFLOAD, optimizer=CPU_ADAM)


@guards("A redo step has the bits of the training")
@covers(
    "the redo log: torch's Adam, AdamW and SGD under ZeRO, fused and foreach, sub-groups, round robin, BF16_Optimizer"
)
def case_other_optimizers(folder: Path) -> None:
    check_all(
        folder,
        {
            "fused": {"stage": 2, "optimizer": {"type": "AdamW", "params": {**ADAM, "fused": True}}},
            "foreach": {"stage": 2, "optimizer": {"type": "AdamW", "params": {**ADAM, "foreach": True}}},
            "adam": {"stage": 1, "optimizer": {"type": "Adam", "params": {**ADAM, "adam_w_mode": False}}},
            "sgd": {"stage": 2, "optimizer": SGD, "zero_allow_untested_optimizer": True},
            "sub-groups": {"stage": 3, "zero": {"sub_group_size": 700}},
            "round robin": {"stage": 1, "zero": {"round_robin_gradients": True}},
            "bf16 optimizer": {"stage": 1, "data_types": {"grad_accum_dtype": "fp32"}},
            "one group": {"stage": 3, "groups": False},
        },
    )
