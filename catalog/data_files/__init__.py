"""Reads the bytes of data files, whole or from their packed images, and compares them with their checksums.

It is told which ranges: what they mean is known above, in `catalog.read`. Only `stored_bytes` calls the native reader.
"""

__all__: list[str] = []
