"""DeepSpeed's Adam for the host, made so that an update that a training has made can be made again."""

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder

from catalog.errors import UnsupportedError

__all__ = ["RepeatedCPUAdam", "compiled_code"]

_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}


class RepeatedCPUAdam(DeepSpeedCPUAdam):  # type: ignore[misc]
    """Has DeepSpeed's update and its compiled code. DeepSpeed's own constructor also asks several programs for the name
    of the processor, which takes seconds, only for a warning.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, code: Any, adam_w_mode: bool, fp32_optimizer_states: bool
    ) -> None:
        torch.optim.Optimizer.__init__(self, groups, {**_DEFAULTS, "amsgrad": False})
        self.opt_id = DeepSpeedCPUAdam.optimizer_id
        DeepSpeedCPUAdam.optimizer_id += 1
        self.adam_w_mode = adam_w_mode
        self.fp32_optimizer_states = fp32_optimizer_states
        first = self.param_groups[0]
        rates = (first["lr"], *first["betas"], first["eps"], first["weight_decay"])
        self.ds_opt_adam = code
        self.ds_opt_adam.create_adam(self.opt_id, *rates, adam_w_mode, False)


def compiled_code() -> Any:
    """Return the compiled code of the updates, which is built here where it was not yet. UnsupportedError, with the
    reason, where it can't be."""
    try:
        return CPUAdamBuilder().load()
    except Exception as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise UnsupportedError(
            "an update of DeepSpeedCPUAdam is made again by DeepSpeed's compiled code, which can't be built here "
            f"({type(error).__name__}: {reason}): install a C++ compiler and ninja, or restore the checkpoint before it"
        ) from error
