"""Training loops: when a step begins and ends, and which State Providers hold its state; one folder for each framework.

A loop calls its session through `LoopEvents` and decides nothing about snapshots. Wrappers around modules and
optimizers are taken off in `capture.state.unwrap`; the callback of a Trainer is a door, `capture.huggingface`.
"""

__all__: list[str] = []
