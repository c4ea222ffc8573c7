"""Cases for one rank that goes on from steps of the redo logs of two ranks in `deepspeed_cases_redo`."""

from pathlib import Path

import torch
from deepspeed_eager import state_of
from deepspeed_helpers import make_engine, train
from ranks import covers, guards

import capture


@guards("Resume is exact")
@covers("going on from a step of a redo log in another world size: ZeRO 2 and 3 of two ranks, ZeRO 1, 2 and 3 of one")
def case_a_training_goes_on_in_another_world(folder: Path) -> None:
    for name, stage in (("2", 2), ("3", 3), ("3", 1)):
        engine = make_engine(stage=stage, seed=99)
        capture.restore(3, history=folder / name, engine=engine)
        assert engine.global_steps == 3
        here = state_of(engine).tensors
        for key, tensor in torch.load(folder / f"{name}.pt").items():
            if key[0] != "buffer":
                assert torch.equal(here[key], tensor), f"step 3 of {name} under ZeRO {stage}: {key}"
        train(engine, 1)
        engine.destroy()
