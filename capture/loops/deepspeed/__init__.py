"""A DeepSpeed engine as a training loop, and the State Providers of what DeepSpeed holds: flat partitions, param groups, counters.

Only `loop` imports deepspeed; everything else reads the attributes of a live engine.
"""

__all__: list[str] = []
