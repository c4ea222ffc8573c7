"""What made a training do what it did: the optimizer checked against its own rule, and the causes of what is unusual."""

__all__: list[str] = []
