"""Findings, one line each, and the report that they make."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "error"]
WIDTH = len("warning") + 2


@dataclass(frozen=True)
class Finding:
    """Result of a check, in one line.

    Args:
        level: `error` if the run would fail, hang or lose something; `warning` if it probably is not what is meant.
        subject: one or two words.
        text: what it is, with figures.
        flag: the flag or variable that mends it; empty if there is nothing to mend.
    """

    level: Level
    subject: str
    text: str
    flag: str = ""

    def __str__(self) -> str:
        return " ".join(f"{self.level:{WIDTH}}{self.subject}: {self.text}".splitlines()) + (
            f"; {self.flag}" if self.flag else ""
        )


class Report:
    """Findings in the order in which they were made; they are printed at once, or all at the end as JSON.

    Args:
        show: print them; only one process of a run does.
        as_json: print one JSON list when the report is closed.
    """

    def __init__(self, show: bool = True, as_json: bool = False) -> None:
        self.show, self.as_json = show, as_json
        self.findings: list[Finding] = []

    def add(self, findings: Iterable[Finding]) -> None:
        """Add findings one by one, as they are made."""
        for finding in findings:
            self.findings.append(finding)
            if self.show and not self.as_json:
                print(finding, flush=True)

    @property
    def errors(self) -> list[Finding]:
        """The findings that would stop the run."""
        return [finding for finding in self.findings if finding.level == "error"]

    def close(self) -> int:
        """Print the last line, or the JSON list; return the exit code: 2 if there is an error, else 0."""
        counts = {level: sum(finding.level == level for finding in self.findings) for level in ("error", "warning")}
        if self.show and self.as_json:
            print(json.dumps([asdict(finding) for finding in self.findings], indent=2))
        elif not self.show:
            for error in self.errors[:1]:  # in the log of this rank
                print(f"error: {error.text}" + (f"; {error.flag}" if error.flag else ""), file=sys.stderr)
        else:
            print(", ".join(f"{count} {level}{'s' * (count != 1)}" for level, count in counts.items()))
        return 2 if counts["error"] else 0
