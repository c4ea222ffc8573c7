"""The causes of what a training did: its optimizer checked against its own rule, and the causes that follow."""

__all__: list[str] = []
