"""The state to save: the State Provider interface, the providers of PyTorch's own objects, and objects as data.

A provider lists the state, says where it lies in memory, and puts it back. Nothing here moves the bytes of a tensor to
or from a disk.
"""

__all__: list[str] = []
