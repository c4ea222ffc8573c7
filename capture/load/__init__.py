"""From stored extents to live tensors: fragments are matched with what is to be filled, read and verified.

Nothing here knows an engine or an optimizer: what is to be filled is listed as items by State Providers. The explorer
reads through here too, so nothing here imports the session, the hooks or the snapshot.
"""

__all__: list[str] = []
