"""Shows what a history takes on the disk, and removes part of it: by a policy, or by name."""

__all__: list[str] = []
