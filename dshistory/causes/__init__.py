"""What made a training do what it did: its optimizer checked against its own rule, and the causes that follow."""

__all__: list[str] = []
