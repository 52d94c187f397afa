"""Findings of the doctor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """Severity of a finding."""

    ok = "ok"
    note = "note"  # not checked, or without consequences
    warning = "warning"  # works, but slowly or with a limit
    error = "error"  # a server would not start, or would fail


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: name of the check.
        status: severity.
        found: result of the check.
        advice: instructions to the user; empty if there is nothing to do.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


@dataclass
class Report:
    """All findings of the doctor.

    Attributes:
        findings: findings in the order of the checks.
        gpu: name, memory and capability of the GPU, if there is one; `vllm-hisparse plan` reads it.
        rates: measured rates and times by name; the name has the unit, GB/s or seconds. `vllm-hisparse plan` reads
            them.
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
