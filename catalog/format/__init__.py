"""The file formats of a history, one module for each kind of file: its encoding and its strict parser.

docs/format.md describes the formats in words. A module here handles one file at a time; `catalog.read` combines several
files.
"""

__all__: list[str] = []
