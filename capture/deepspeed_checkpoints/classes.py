"""The classes that DeepSpeed puts into its checkpoint dictionaries, and how each is stored as data.

Apart from `tree`, because this is the room's only import of DeepSpeed's classes and the tree is used without DeepSpeed.
"""

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaleProfile, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from capture.deepspeed_checkpoints.tree import COMMON_CLASSES, by_fields, by_value

__all__ = ["DEEPSPEED_CLASSES"]

DEEPSPEED_CLASSES = (
    *COMMON_CLASSES,
    by_value("deepspeed.ZeroStageEnum", ZeroStageEnum),
    by_value("deepspeed.LossScaleProfile", LossScaleProfile),
    by_fields("deepspeed.LossScaler", LossScaler),
    by_fields("deepspeed.DynamicLossScaler", DynamicLossScaler),
    by_fields("deepspeed.fragment_address", fragment_address),
)
"""Every class that a checkpoint tree may contain beside plain data and tensors."""
