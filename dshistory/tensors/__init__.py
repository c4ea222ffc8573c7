"""Reads whole logical tensors of a checkpoint in bounded memory, whatever world size and ZeRO stage wrote them.

The rooms above decide what is done with the elements: they are compared, drawn or exported.
"""

__all__: list[str] = []
