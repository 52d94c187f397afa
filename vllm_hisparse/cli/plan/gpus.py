"""GPUs that `plan` knows, with their rates: measured on one, and from datasheets for the others."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_hisparse.attention.backends import Capability

# Measured on an H200: GB/s of a large copy, and of scattered rows (benchmarks/results/h200/host_reads.json).
H200_LINK, H200_ROWS = 55.4, 36.0
SCATTERED_SHARE = H200_ROWS / H200_LINK


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _ReportedGpu(_Part):
    name: str = ""
    memory_gib: Annotated[float, Field(gt=0)] | None = None


class _ReportedRates(_Part):
    copy_to_device_gb_s: Annotated[float, Field(ge=0)] | None = None
    pinned_rows_gb_s: Annotated[float, Field(ge=0)] | None = None


class _Report(_Part):
    """The part of a doctor's report that a plan reads; 0 and null are rates that were not measured."""

    gpu: _ReportedGpu | None = None
    rates: _ReportedRates | None = None


@dataclass(frozen=True)
class Gpu:
    """Rates of one GPU and its link to host memory.

    Attributes:
        name: the product's name.
        memory_gib: memory of one GPU that a process can use.
        memory_tb_s: bandwidth of this memory in TB/s, by the datasheet.
        bf16_tflops: dense bf16 rate in TFLOP/s, by the datasheet.
        link_gb_s: rate of a large copy from pinned host memory, in GB/s.
        capability: compute capability, its major and its minor number.
        rows_gb_s: rate of scattered rows from a large host pool in pinned memory, in GB/s. None: not measured.
        source: source of the numbers, in words.
    """

    name: str
    memory_gib: float
    memory_tb_s: float
    bf16_tflops: float
    link_gb_s: float
    capability: Capability
    rows_gb_s: float | None = None
    source: str = "datasheet"

    @property
    def is_measured(self) -> bool:
        return self.rows_gb_s is not None

    @property
    def scattered_gb_s(self) -> float:
        """Rate of scattered rows in GB/s: measured, or the share of the link's rate that an H200 reaches."""
        if self.rows_gb_s is not None:
            return self.rows_gb_s
        return self.link_gb_s * SCATTERED_SHARE

    @classmethod
    def find(cls, name: str) -> Gpu:
        """Return a GPU by its name, or by a JSON file that `vllm-hisparse doctor` has written.

        Raises:
            ValueError: there is no such name or file; the message has the known names.
        """
        if name.upper() in GPUS:
            return GPUS[name.upper()]
        path = Path(name)
        if path.suffix == ".json" and path.is_file():
            try:
                return cls.from_doctor(json.loads(path.read_text()))
            except ValueError as error:
                raise ValueError(f"got {name}, expected a JSON file of `vllm-hisparse doctor`: {error}") from None
        raise ValueError(f"got {name!r}, expected one of {', '.join(GPUS)}, or a JSON file of `vllm-hisparse doctor`")

    @classmethod
    def from_doctor(cls, report: Any) -> Gpu:
        """Make a GPU from the rates of a doctor's report, and from the datasheet of the most similar known GPU.

        Raises:
            ValueError: the report has no GPU, an unknown one, or a value of a wrong type.
        """
        if not isinstance(report, dict):
            raise ValueError(f"got {report!r:.40}, expected an object")
        try:
            parsed = _Report.model_validate(report)
        except ValidationError as error:
            detail = error.errors()[0]
            place = ".".join(map(str, detail["loc"])) or "the file"
            expected = detail["msg"].removeprefix("Input should be ")
            raise ValueError(f"{place}: got {detail['input']!r}, expected {expected}") from None
        gpu, rates = parsed.gpu or _ReportedGpu(), parsed.rates or _ReportedRates()
        if not gpu.name:
            raise ValueError(
                "the report has no GPU: run `vllm-hisparse doctor` on the machine with the GPU, or give one of "
                f"{', '.join(GPUS)}"
            )
        known = next((each for name, each in GPUS.items() if name in gpu.name.upper().replace("-", " ").split()), None)
        if known is None:
            raise ValueError(f"got a report of the GPU {gpu.name!r}, expected one of {', '.join(GPUS)}")
        return replace(
            known,
            name=gpu.name,
            memory_gib=gpu.memory_gib or known.memory_gib,
            link_gb_s=rates.copy_to_device_gb_s or known.link_gb_s,
            rows_gb_s=rates.pinned_rows_gb_s or known.rows_gb_s,
            source="doctor, and the datasheet for the GPU's own rates",
        )


# The H200's link rates are measured. Its other numbers, and all numbers of other GPUs, are from the vendor's
# datasheets.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H200", 139.8, 4.8, 989, H200_LINK, (9, 0), H200_ROWS, "measured link, datasheet for the rest"),
        Gpu("H100", 79.6, 3.35, 989, 55.4, (9, 0)),
        Gpu("H20", 95.6, 4.0, 148, 55.4, (9, 0)),
        Gpu("GH200", 94.5, 4.0, 989, 420.0, (9, 0)),
        Gpu("B200", 178.0, 7.7, 2250, 55.4, (10, 0)),
        Gpu("B300", 268.0, 7.7, 2250, 110.0, (10, 3)),
        Gpu("GB200", 184.0, 8.0, 2500, 420.0, (10, 0)),
        Gpu("A100", 79.3, 2.04, 312, 25.0, (8, 0)),
        Gpu("L40S", 44.5, 0.86, 362, 25.0, (8, 9)),
    )
}
