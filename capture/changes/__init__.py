"""Finds out what has changed in a training since it was last looked at: its memory, and the list of its tensors.

Nothing here knows the plan of a file: live memory is compared with what was noted of it.
"""

__all__: list[str] = []
