"""Findings of the doctor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How bad a finding is."""

    ok = "ok"
    note = "note"  # not looked at, or of no consequence
    warning = "warning"  # works, but slowly or with a limit
    error = "error"  # a server would not start, or fail


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        status: how bad it is.
        found: what was found.
        advice: what to do about it; empty if nothing.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


@dataclass
class Report:
    """Everything that the doctor has found.

    Attributes:
        findings: in the order in which they were made.
        gpu: name, memory and capability of the GPU, if there is one; `vllm-hisparse plan` reads it.
        rates: measured rates by name, in GB/s or seconds as the name says; `vllm-hisparse plan` reads them.
    """

    findings: list[Finding] = field(default_factory=list)
    gpu: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, status: Status, found: str, advice: str = "") -> None:
        """Add a finding."""
        self.findings.append(Finding(name, status, found, advice))

    @property
    def exit_status(self) -> int:
        """1 if a server would fail here, else 0."""
        return int(any(finding.status == Status.error for finding in self.findings))

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain types."""
        rates = {name: round(rate, 3) for name, rate in self.rates.items()}
        return {"findings": [asdict(finding) for finding in self.findings], "gpu": self.gpu, "rates": rates}
