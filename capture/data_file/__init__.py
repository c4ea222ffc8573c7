"""The data file of one rank: the parts that it has, the plan of their places, its ends, and the rows of its manifest.

Nothing here decides that a step is captured, or that bytes need not be written: it is told, and gives each byte its
place. `catalog.run_writer` publishes the file.
"""

__all__: list[str] = []
