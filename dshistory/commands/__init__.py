"""The verbs as text: the command line, the magics of IPython and their completion, each derived from the registry.

Only `doctor` computes something here: it measures the machine and needs no history.
"""

__all__: list[str] = []
