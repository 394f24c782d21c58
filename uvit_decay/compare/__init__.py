"""Runs side by side: learning curves and a table, from the histories in their folders."""

from uvit_decay.runtime.program import lazy

MODULES = {
    "Run": "runs",
    "find_option": "runs",
    "grouped_by": "runs",
    "Row": "report",
    "Spread": "report",
    "rows": "report",
    "markdown": "report",
    "remarks": "report",
    "save_csv": "report",
    "save_curves": "report",
    "save_final_values": "report",
}
__all__ = list(MODULES)
__getattr__, __dir__ = lazy(__name__, MODULES)
