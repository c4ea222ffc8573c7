"""The classes that DeepSpeed puts into its checkpoint dictionaries, as data."""

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaleProfile, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from capture.deepspeed_checkpoints.known_classes import COMMON_CLASSES, by_fields, by_value

__all__ = ["DEEPSPEED_CLASSES"]

DEEPSPEED_CLASSES = (
    *COMMON_CLASSES,
    by_value("deepspeed.ZeroStageEnum", ZeroStageEnum),
    by_value("deepspeed.LossScaleProfile", LossScaleProfile),
    by_fields("deepspeed.LossScaler", LossScaler),
    by_fields("deepspeed.DynamicLossScaler", DynamicLossScaler),
    by_fields("deepspeed.fragment_address", fragment_address),
)
"""Everything that a tree may hold beside plain data and tensors."""
