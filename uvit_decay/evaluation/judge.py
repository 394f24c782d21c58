"""From a comparison to its files: metrics, report.json, report.html, and the samples on request."""

from __future__ import annotations

import sys
from pathlib import Path

from uvit_decay.evaluation.generation import Comparison
from uvit_decay.evaluation.report import compared, save_json, write_html
from uvit_decay.image_io import save_npz
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.files import check_writable, claimed


def judge(comparison: Comparison, out: Path, save_samples: Path | None, processes: Processes) -> None:
    """Extract all features on these processes; rank 0 computes the metrics, prints them and writes the reports.

    Args:
        comparison: what is compared, checked.
        out: report.json; report.html is written beside it, features of the samples meanwhile.
        save_samples: an .npz for the samples; None keeps none.
        processes: the processes of this program.
    """
    check_writable(out)
    if save_samples is not None:
        check_writable(save_samples)
    with claimed(out, processes.is_main):
        store, reference = comparison.extract(out.with_suffix(".features"), processes, save_samples is not None)
        if not processes.is_main:
            return
        report = compared(comparison, store, reference)
        save_json(out, report)
        write_html(out.with_suffix(".html"), report)
        if save_samples is not None:
            save_npz(save_samples, store.iterate("images"), len(store), comparison.samples.labels)
        store.remove()
    for name, value in report.metrics.items():
        print(f"{name} {value:.6g}")
    for remark in report.remarks:
        print(f"remark: {remark}", file=sys.stderr)
    print(f"wrote {out} and {out.with_suffix('.html').name}")
