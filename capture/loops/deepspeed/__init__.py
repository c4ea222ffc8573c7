"""A DeepSpeed engine as a training loop, and State Providers for its flat partitions, param groups and counters.

Only `loop` imports deepspeed; everything else reads the attributes of a live engine.
"""

__all__: list[str] = []
