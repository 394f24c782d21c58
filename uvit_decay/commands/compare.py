"""`evaluate.py compare`; what it computes with is imported after --help."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from uvit_decay.compare.layers import ChosenProbes
from uvit_decay.files.writing import check_writable, claim_paths
from uvit_decay.terminal.errors import UserError

if TYPE_CHECKING:
    from uvit_decay.compare.runs import FinishedRun

TRAINING = ("step", "epoch", "images")  # values of --x that are no options
LAYER = "layer"  # another one
FIGURES = (".png", ".pdf", ".svg")


def compare(
    runs: Sequence[Path],
    by: str | None = None,
    baseline: str | None = None,
    x: str = "epoch",
    rank: Literal["entropy", "effective"] = "entropy",
    out: Path = Path("compare.png"),
    *,
    chosen: ChosenProbes,
) -> None:
    """Draw learning curves of runs, and print a table with a row for each value of an option, averaged over seeds.

    Curves show the probes, or the metrics of samples for runs without probes. Writes the figure, and the table as a
    .csv beside it. Remarks name further differences between the runs.

    Args:
        runs: run folders, such as runs/digits/version_0, or folders of experiments, whose newest runs are taken.
        by: the option with a curve for each value, such as net.schedule; or arm, for a curve for each experiment
            without the seed at the end of its name: runs/plain_s0 and runs/plain_s1 are the arm plain; default: arm if
            the baseline is one, otherwise alpha_min.
        baseline: an arm, or a value of --by, with which the others are compared: the differences of runs of the same
            seed are printed, too, with the standard error of their mean.
        x: the x axis: step, epoch or images of training; layer, for the scores of the last probes over depth; or a
            second option, such as net.depth, against which the values of the last evaluation are drawn.
        rank: the rank that is drawn and correlated: entropy, the paper's entropy of the spectrum, of features centred
            within each sample; or effective, the effective rank of Roy and Vetterli, the exponential of the entropy, of
            features centred over the samples.
        out: the figure, a .png, .pdf or .svg.
    """
    if x != LAYER and chosen != ChosenProbes():
        raise UserError(f"--probes, --layers and --times are for --x layer, not for --x {x}")
    if out.suffix not in FIGURES:
        raise UserError(f"--out {out}: the figure is a {', '.join(FIGURES)}")
    spreadsheet = out.with_suffix(".csv")
    for path in (out, spreadsheet):
        check_writable(path)

    from uvit_decay.compare import figures, report
    from uvit_decay.compare.baseline import ARM, compare_with_baseline, describe_arms
    from uvit_decay.compare.differences import remarks

    loaded = _read_runs(runs, chosen if x == LAYER else None)
    names, options, groups = _group(loaded, by, x, baseline)
    ranked = report.RANKS[rank]
    table = report.rows(groups, ranked)
    differences = compare_with_baseline(groups, baseline) if baseline is not None else []
    with claim_paths(out, spreadsheet):
        report.save_csv(spreadsheet, names, table, differences)
        if x in TRAINING:
            figures.save_curves(out, names[0], groups, x, ranked)
        elif x == LAYER:
            figures.save_layers(out, names[0], groups, ranked)
        else:
            figures.save_final_values(out, names, groups, options[1], ranked)
    print(f"{report.markdown(names, table)}\n")
    for line in _explain(loaded, ranked, spreadsheet.name):
        print(line)
    if differences:
        print(f"\n{report.markdown(names, differences, 'pairs')}\n")
        print(f"Differences from {baseline}, of runs of one seed: mean +- standard error over pairs.")
    if names == [ARM]:
        for line in describe_arms(groups):
            print(line)
    for remark in remarks(loaded, *options):
        print(f"remark: {remark}", file=sys.stderr)
    print(f"wrote {out} and {spreadsheet.name}")


def _explain(loaded: Sequence[FinishedRun], rank: str, spreadsheet: str) -> Iterator[str]:
    """Yield the lines below the table, which say how its values were measured."""
    from uvit_decay.compare import report

    yield f"Last evaluation at step {report.last_steps(loaded)}; mean +- standard deviation over runs."
    probed = loaded[0].layers
    if probed is not None:
        yield f"Means over the layers {', '.join(map(str, probed.by_layer))}; {probed.describe_levels()}."
    elif any(run.probed for run in loaded):
        yield f"r: Pearson's correlation of the {report.title_of(rank, loaded)} and the accuracy of the best probe."
    protocol = report.describe_metrics(loaded)
    if protocol:
        yield f"Metrics of samples: {protocol}."
    left_out = report.list_left_out(loaded)
    if left_out:
        yield f"In {spreadsheet} alone: {', '.join(left_out)}."


def _group(
    loaded: Sequence[FinishedRun], by: str | None, x: str, baseline: str | None
) -> tuple[list[str], list[str], dict[tuple[str, ...], list[FinishedRun]]]:
    """Return the headings of the table, the options that runs are grouped by, and the groups.

    Without --by the groups are arms if the baseline is the name of one, otherwise values of alpha_min.
    """
    from uvit_decay.compare.baseline import ARM, group_by_arms, options_of_arms
    from uvit_decay.compare.runs import group_by_options

    arms = group_by_arms(loaded)
    of_option = x not in (*TRAINING, LAYER)
    if of_option and (by == ARM or baseline is not None):
        raise UserError(f"--x {x}: arms and a baseline are compared over {', '.join([*TRAINING, LAYER])}")
    given = by
    if by is None:
        by = ARM if (baseline,) in arms else "alpha_min"
    if by == ARM:
        names, options, groups = [ARM], options_of_arms(arms), arms
    else:
        names, options = _find_options(loaded, by, x if of_option else None)
        groups = group_by_options(loaded, options)
    if baseline is not None and (baseline,) not in groups:
        known = groups if given else [*arms, *groups]
        hint = "; it is an arm: set --by arm" if (baseline,) in arms else ""
        raise UserError(f"--baseline {baseline} is none of {', '.join(label for (label,) in known)}{hint}")
    return names, options, groups


def _find_options(loaded: Sequence[FinishedRun], by: str, x: str | None) -> tuple[list[str], list[str]]:
    """Return the names and the full names of the options of --by and --x."""
    from uvit_decay.compare.runs import find_option

    if x is None:
        return [by], [find_option(loaded, by, "by")]
    options = [find_option(loaded, by, "by"), find_option(loaded, x, "x")]
    if options[0] == options[1]:
        raise UserError(f"--x {x} is the option of --by: name another, or step, epoch, images or layer")
    return [by, x], options


def _read_runs(folders: Sequence[Path], chosen: ChosenProbes | None) -> list[FinishedRun]:
    """Return the runs in these folders."""
    from uvit_decay.compare.runs import FinishedRun

    runs = [FinishedRun.read(folder, chosen) for folder in folders]
    for run in runs if chosen is not None else ():  # read layer by layer
        if run.layers.times != runs[0].layers.times:
            levels = f"{list(runs[0].layers.times)} and {list(run.layers.times)}"
            raise UserError(f"{runs[0].folder} and {run.folder} were probed at the noise levels {levels}: set --times")
    return runs
