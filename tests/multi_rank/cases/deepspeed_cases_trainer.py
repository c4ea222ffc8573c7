"""Cases for Hugging Face's Trainer with its DeepSpeed integration: the callback finds the engine and captures it."""

from pathlib import Path

import torch
from capture_helpers import assert_same
from deepspeed.utils import safe_get_full_fp32_param
from frameworks_cases_huggingface import committed, history_callback, trainer
from frameworks_helpers import all_closed
from ranks import covers
from transformers import TrainerCallback

import capture
from catalog.history import History

ZERO = {
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "torch_adam": True}},
    "zero_allow_untested_optimizer": True,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
}


class Masters(TrainerCallback):
    """Callback that keeps the master weights after every step."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, torch.Tensor]] = {}

    def on_step_end(self, args, state, control, *, model, **_) -> None:
        found = ((name, safe_get_full_fp32_param(parameter)) for name, parameter in model.named_parameters())
        self.states[state.global_step] = {name: master.clone() for name, master in found}


@covers("Hugging Face's `Trainer` with its DeepSpeed integration: ZeRO 2")
def case_trainer_with_zero(folder: Path) -> None:
    masters, callback = Masters(), history_callback(folder / "zero")
    trainer(folder, callback, masters, seed=1, deepspeed=ZERO, bf16=True).train()
    all_closed()
    assert committed(folder / "zero", callback.session.run) == [0, 2, 4, 6]
    facts = History.open(folder / "zero").run_facts(callback.session.run).facts
    assert facts["zero_stage"] == 2
    stored = capture.restore(4, history=folder / "zero")["master"]
    assert_same({"master": {n: stored[n] for n in masters.states[4]}}, {"master": masters.states[4]})
