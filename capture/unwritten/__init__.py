"""Finds the bytes that need not be written: those that an earlier checkpoint has, and weights that are rounded masters.

Each is predicted when the file is planned, and proved while the training goes on. What was predicted wrongly is written
behind the planned bytes.
"""

__all__: list[str] = []
