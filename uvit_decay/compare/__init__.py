"""Compare runs: learning curves and a table, from the histories in the run folders."""

from uvit_decay.terminal.program import lazy

MODULES = {
    "FinishedRun": "runs",
    "find_option": "runs",
    "group_by_options": "runs",
    "Row": "report",
    "Spread": "report",
    "rows": "report",
    "markdown": "report",
    "remarks": "differences",
    "save_csv": "report",
    "save_curves": "figures",
    "save_final_values": "figures",
    "save_layers": "figures",
}
__all__ = list(MODULES)
__getattr__, __dir__ = lazy(__name__, MODULES)
