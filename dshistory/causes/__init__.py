"""What the optimizer did between two checkpoints, checked against its own rule."""

__all__: list[str] = []
