"""The redo log on its way to the disk: what each update consumes is copied, packed in the background, and published.

A session tells the recorder of its updates, and which of them became checkpoints. `capture.redo` reads the log, and
makes the steps again.
"""

__all__: list[str] = []
