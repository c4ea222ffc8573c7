"""What a history takes on the disk, and what of it is removed: by a policy, or by name."""

__all__: list[str] = []
