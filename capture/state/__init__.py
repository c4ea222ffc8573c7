"""The state to save: State Providers (PyTorch's own, and `Stateful` for any other object), and objects as data.

A provider lists the state, says where it lies in memory, and puts it back. Nothing here moves the bytes of a tensor to
or from a disk.
"""

__all__: list[str] = []
