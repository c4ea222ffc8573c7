"""DeepSpeed's own `save_checkpoint` and `load_checkpoint`, through the native writer and with data instead of pickles.

These folders belong to DeepSpeed and are not a history: nothing here registers a run or writes a manifest.
"""

__all__: list[str] = []
