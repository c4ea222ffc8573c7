"""The explorer: one object for one history, with a method for every verb; the rooms below do the work.

Each file here holds the methods that open one of those rooms, with their signatures and help texts.
"""

from dshistory.explorer.explorer import Explorer

__all__ = ["Explorer"]
