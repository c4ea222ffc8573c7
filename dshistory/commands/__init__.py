"""The verbs as text: the command line, the magics of IPython, and their completion; each made from the one registry of verbs.

Nothing is computed here, except by `doctor`, which looks at the machine and not at a history.
"""

__all__: list[str] = []
