"""Lossless encodings of bytes: what is read seldom takes less disk.

Nothing here knows a file or a tensor: buffers in, buffers out.
"""

__all__: list[str] = []
