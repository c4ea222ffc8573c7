"""State in the memory of a device: marks in its work, digests, copies to the host, and the feed of the writer.

It lists no state and knows no snapshot: it is given tensors, and the order of the training's own work.
"""

__all__: list[str] = []
