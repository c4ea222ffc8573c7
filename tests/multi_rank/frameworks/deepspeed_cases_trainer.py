"""Cases for Hugging Face's Trainer with its DeepSpeed integration: the callback finds the engine and captures it."""

from pathlib import Path

import torch
import torch.distributed as dist
from capture_helpers import assert_same
from deepspeed.utils import safe_get_full_fp32_param
from frameworks_cases_huggingface import committed, history_callback, trainer
from frameworks_helpers import all_closed
from ranks import covers
from transformers import TrainerCallback

import capture
import dshistory
from catalog.history import History
from dshistory import Explorer

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


@covers("Hugging Face's `Trainer` with DeepSpeed, resumed from a folder of `dshistory.resume_folder`: ZeRO 2")
def case_it_goes_on_from_a_history(folder: Path) -> None:
    first, callback = Masters(), history_callback(folder / "resumed")
    trainer(folder, callback, first, seed=1, deepspeed=ZERO, bf16=True).train()
    all_closed()
    path = folder / "checkpoint-4"
    if dist.get_rank() == 0:
        Explorer.open(folder / "resumed").resume_folder(4, path)
    dist.barrier()
    second, child = Masters(), history_callback(folder / "resumed")
    goes_on = trainer(folder, child, second, seed=2, deepspeed=ZERO, bf16=True)
    goes_on.train(resume_from_checkpoint=str(path))
    all_closed()
    assert set(second.states) == {5, 6}
    for step in (5, 6):
        assert_same({"master": second.states[step]}, {"master": first.states[step]})
    facts = History.open(folder / "resumed").run_facts(child.session.run)
    assert (facts.parent_run, facts.parent_step) == (callback.session.run, 4)


def case_its_folder_is_imported_whole(folder: Path) -> None:
    """The folder of the case before has DeepSpeed's checkpoint of the same step inside."""
    if dist.get_rank() == 0:
        table = dshistory.import_checkpoint(folder / "checkpoint-4", history=folder / "imported")
        assert [(row["format"], row["left_out"]) for row in table] == [("trainer", "rng_state_1.pth")]
        stored, was = capture.restore(4, history=folder / "imported"), capture.restore(4, history=folder / "resumed")
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            assert_same({kind: stored[kind]}, {kind: {name: was[kind][name] for name in stored[kind]}})
            assert stored[kind]
    dist.barrier()
