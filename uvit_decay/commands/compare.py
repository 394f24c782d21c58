"""`evaluate.py compare`; what it computes with is imported after --help."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import check_writable, claim_paths
from uvit_decay.runtime.progress import track

if TYPE_CHECKING:
    from uvit_decay.compare.runs import Run

TRAINING = ("step", "epoch", "images")  # values of --x that are no options
FIGURES = (".png", ".pdf", ".svg")
PATIENCE = 3.0  # seconds after which a bar appears


def compare(
    runs: Sequence[Path],
    by: str = "alpha_min",
    x: str = "epoch",
    rank: Literal["entropy", "effective"] = "entropy",
    out: Path = Path("compare.png"),
) -> None:
    """Draw learning curves of runs, and print a table with a row for each value of an option, averaged over seeds.

    Curves show the probes, or the metrics of samples for runs without probes. Writes the figure, and the table as a
    .csv beside it. Remarks name further differences between the runs.

    Args:
        runs: run folders, such as runs/digits/version_0.
        by: the option with a curve for each value, such as net.schedule.
        x: the x axis: step, epoch or images of training, or a second option, such as net.depth, against which the
            values of the last evaluation are drawn.
        rank: the rank that is drawn and correlated: entropy, the paper's entropy of the spectrum, of features centred
            within each sample; or effective, the effective rank of Roy and Vetterli, the exponential of the entropy, of
            features centred over the samples.
        out: the figure, a .png, .pdf or .svg.
    """
    if out.suffix not in FIGURES:
        raise UserError(f"--out {out}: the figure is a {', '.join(FIGURES)}")
    spreadsheet = out.with_suffix(".csv")
    for path in (out, spreadsheet):
        check_writable(path)

    from uvit_decay.compare import report
    from uvit_decay.compare.differences import remarks
    from uvit_decay.compare.runs import find_option, group_by_options

    loaded = _read_runs(runs)
    names = [by]
    options = [find_option(loaded, by, "--by")]
    if x not in TRAINING:
        names.append(x)
        options.append(find_option(loaded, x, "--x"))
        if options[0] == options[1]:
            raise UserError(f"--x {x} is the option of --by: name another, or step, epoch or images")
    groups = group_by_options(loaded, options)
    ranked = report.RANKS[rank]
    table = report.rows(groups, ranked)
    with claim_paths(out, spreadsheet):
        report.save_csv(spreadsheet, names, table)
        if x in TRAINING:
            report.save_curves(out, by, groups, x, ranked)
        else:
            report.save_final_values(out, names, groups, options[1], ranked)
    print(f"{report.markdown(names, table)}\n")
    print(f"Last evaluation at step {report.last_steps(loaded)}; mean +- standard deviation over runs.")
    if any(run.probed for run in loaded):
        print(f"r: Pearson's correlation of the {report.title_of(ranked, loaded)} and the accuracy of the best probe.")
    protocol = report.describe_metrics(loaded)
    if protocol:
        print(f"Metrics of samples: {protocol}.")
    for remark in remarks(loaded, *options):
        print(f"remark: {remark}", file=sys.stderr)
    print(f"wrote {out} and {spreadsheet.name}")


def _read_runs(folders: Sequence[Path]) -> list[Run]:
    """Return the runs in these folders; show how many are read if it takes long."""
    from uvit_decay.compare.runs import Run

    runs = []
    with track("reading runs", len(folders), "run", delay=PATIENCE) as work:
        for folder in folders:
            runs.append(Run.read(folder))
            work.update()
    return runs
