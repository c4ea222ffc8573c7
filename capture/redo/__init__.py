"""Steps that were not captured, made again from the checkpoint before them by the updates of the redo log."""

__all__: list[str] = []
