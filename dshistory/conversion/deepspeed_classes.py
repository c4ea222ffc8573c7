"""Stand-ins for the classes that DeepSpeed pickles into its checkpoints: read and written without importing deepspeed.

A stand-in has the attributes and nothing else. Pickling a stand-in writes the name of DeepSpeed's class; unpickling
DeepSpeed's class creates the stand-in, and so does a file of `capture.checkpoint_engine`, which names them by tags."""

import pickle
from collections.abc import Callable
from typing import Any, Final

import torch

from capture.deepspeed_checkpoints.tree import COMMON_CLASSES, KnownClass, by_fields

__all__ = ["KNOWN", "KNOWN_BY_TAG", "DeepSpeedPickle", "PickledBytes", "StandIn", "loss_scaler"]


class StandIn:
    """The attributes of an object of one of DeepSpeed's classes."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"values": state})

    def __repr__(self) -> str:
        return f"<stand-in for {dict(KNOWN).get(type(self), '?')}: {self.__dict__}>"


class _LossScaler(StandIn):
    pass


class _DynamicLossScaler(StandIn):
    pass


class _FragmentAddress(StandIn):
    pass


class _Enumeration(StandIn):
    """A member of an enumeration: pickled as the call that finds it by its value."""

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), tuple(self.values)


class _ZeroStage(_Enumeration):
    pass


class _LossScaleProfile(_Enumeration):
    pass


class PickledBytes(StandIn):
    """An object that is known only by its pickle, which nothing here reads. Whoever unpickles the stand-in unpickles
    the object."""

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[Any, ...]]:
        return pickle.loads, self.values


_SCALERS: Final = "deepspeed.runtime.fp16.loss_scaler"

KNOWN: Final[list[tuple[type, str]]] = [
    (_LossScaler, f"{_SCALERS}.LossScaler"),
    (_DynamicLossScaler, f"{_SCALERS}.DynamicLossScaler"),
    (_LossScaleProfile, f"{_SCALERS}.LossScaleProfile"),
    (_FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_ZeroStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]
"""Each stand-in with the name of its class, in the form that torch.serialization.safe_globals takes."""

KNOWN_BY_TAG: Final[tuple[KnownClass, ...]] = (
    *COMMON_CLASSES,
    by_fields("deepspeed.LossScaler", _LossScaler),
    by_fields("deepspeed.DynamicLossScaler", _DynamicLossScaler),
    by_fields("deepspeed.fragment_address", _FragmentAddress),
    KnownClass("deepspeed.ZeroStageEnum", _ZeroStage, lambda member: member.values[0], _ZeroStage),
    KnownClass("deepspeed.LossScaleProfile", _LossScaleProfile, lambda member: member.values[0], _LossScaleProfile),
)
"""The classes in a file of `capture.checkpoint_engine`; the tags are those of
`capture.deepspeed_checkpoints.classes`."""

_NAMES: Final = dict(KNOWN)


def loss_scaler(state: dict[str, Any], *, fp16: dict[str, Any]) -> StandIn:
    """Return a loss scaler with the values of `state`; its other values come from the section `fp16` of DeepSpeed's
    configuration."""
    if not state.get("dynamic"):
        made: StandIn = _LossScaler()
        made.__dict__ = {"cur_scale": 1.0, "dynamic": False, **state.get("scaler", {})}
        return made
    made = _DynamicLossScaler()
    made.__dict__ = {
        "cur_scale": float(2 ** fp16.get("initial_scale_power", 16)),
        "cur_iter": 0,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": fp16.get("loss_scale_window", 1000),
        "min_scale": fp16.get("min_loss_scale", 1),
        "delayed_shift": fp16.get("hysteresis", 2),
        "cur_hysteresis": fp16.get("hysteresis", 2),
        "consecutive_hysteresis": fp16.get("consecutive_hysteresis", False),
        "raise_error_at_min_scale": True,
        "dynamic": True,
        "dtype": torch.half,
        **state["scaler"],
    }
    return made


class _Pickler(pickle._Pickler):
    """A pickler that writes the name of DeepSpeed's class for a stand-in.

    The C pickler cannot do this: it looks the class up by the name that it writes."""

    write: Callable[[bytes], Any]
    memoize: Callable[[Any], None]

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj not in _NAMES:
            super().save_global(obj, name)  # type: ignore[misc]
            return
        module, _, qualified = _NAMES[obj].rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{qualified}\n".encode())
        self.memoize(obj)


class DeepSpeedPickle:
    """The pickle_module for torch.save when the state holds stand-ins."""

    Pickler = _Pickler
