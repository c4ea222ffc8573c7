"""The State Providers that every kind of loop can use."""

from capture.providers.buffers import Buffers
from capture.providers.counters import Counters
from capture.providers.extra_state import ExtraState
from capture.providers.optimizer import TorchOptimizer
from capture.providers.parameters import ModuleParameters
from capture.providers.rng import RandomState
from capture.providers.stateful import DataloaderPosition, Stateful

__all__ = [
    "Buffers",
    "Counters",
    "DataloaderPosition",
    "ExtraState",
    "ModuleParameters",
    "RandomState",
    "Stateful",
    "TorchOptimizer",
]
