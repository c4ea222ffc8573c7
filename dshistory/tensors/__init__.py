"""Whole logical tensors of a checkpoint, streamed in bounded memory whatever world size and ZeRO stage wrote them.

What is done with the elements is decided above: compared, drawn or exported.
"""

__all__: list[str] = []
