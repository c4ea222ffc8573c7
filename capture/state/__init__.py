"""The state there is to save: the State Provider interface, the providers of PyTorch's own objects, and Python objects as data.

A provider says what there is, where it lies and how it is put back. Nothing here moves the bytes of a tensor to or from a disk.
"""

__all__: list[str] = []
