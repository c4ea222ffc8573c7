"""A DeepSpeed engine as a training loop, and State Providers for its flat partitions, param groups and counters.

Only `loop` and `cpu_adam` import deepspeed; everything else reads the attributes of a live engine.
"""

__all__: list[str] = []
