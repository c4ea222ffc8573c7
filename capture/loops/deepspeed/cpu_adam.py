"""DeepSpeed's Adam for the host, made so that an update that a training has made can be made again."""

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder

__all__ = ["RepeatedCPUAdam"]

_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}


class RepeatedCPUAdam(DeepSpeedCPUAdam):  # type: ignore[misc]
    """Has DeepSpeed's update and its compiled code, which is built when the first one is made. DeepSpeed's own
    constructor also asks several programs for the name of the processor, which takes seconds, only for a warning.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, adam_w_mode: bool, fp32_optimizer_states: bool) -> None:
        torch.optim.Optimizer.__init__(self, groups, {**_DEFAULTS, "amsgrad": False})
        self.opt_id = DeepSpeedCPUAdam.optimizer_id
        DeepSpeedCPUAdam.optimizer_id += 1
        self.adam_w_mode = adam_w_mode
        self.fp32_optimizer_states = fp32_optimizer_states
        first = self.param_groups[0]
        rates = (first["lr"], *first["betas"], first["eps"], first["weight_decay"])
        self.ds_opt_adam = CPUAdamBuilder().load()
        self.ds_opt_adam.create_adam(self.opt_id, *rates, adam_w_mode, False)
