"""The State Providers that every kind of loop can use."""

from capture.state.providers.buffers import Buffers
from capture.state.providers.counters import Counters
from capture.state.providers.extra_state import ExtraState
from capture.state.providers.optimizer import TorchOptimizer
from capture.state.providers.parameters import ModuleParameters
from capture.state.providers.rng import RandomState
from capture.state.providers.stateful import DataloaderPosition, Stateful

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
