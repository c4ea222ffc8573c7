"""Peers that need a process group even on one rank: DCP with a background process, and DeepSpeed's own checkpoint."""

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.peers import Blocking, DistributedAsyncSave, UnavailableError
from benchmarks.training_state import Training

TAG = "saved"


class DistributedProcessSave(DistributedAsyncSave):
    """DCP's async_save, with another process that receives the staged copy as shared memory and writes it."""

    name = "DCP async_save, process"
    checkpointer = AsyncCheckpointerType.PROCESS

    def ready(self, training: Training) -> None:
        group_of_one()


class DeepSpeedSave(Blocking):
    """DeepSpeed's `save_checkpoint`, of a ZeRO-0 engine around the same model and optimizer."""

    name = "DeepSpeed save_checkpoint"

    def __init__(self) -> None:
        try:
            import deepspeed
        except ImportError as error:
            raise UnavailableError(f"not installed: {error}") from error
        self.library = deepspeed
        self.engine: Any = None

    def ready(self, training: Training) -> None:
        group_of_one()
        if self.engine is None:
            settings = {"train_batch_size": 1, "zero_optimization": {"stage": 0}, "zero_allow_untested_optimizer": True}
            self.engine = self.library.initialize(
                model=training.model, optimizer=training.optimizer, config=settings, dist_init_required=False
            )[0]

    def begin(self, training: Training, folder: Path) -> None:
        self.folder = folder
        self.engine.save_checkpoint(str(folder), tag=TAG)

    def load(self, training: Training) -> None:
        self.engine.load_checkpoint(str(self.folder), tag=TAG)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.destroy()


def group_of_one() -> None:
    """Create a process group of this process alone, unless one exists."""
    if not dist.is_initialized():
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
