"""`python -m tests.campaign` writes a result and keeps the rows of what it does not run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .configuration import CONFIGURATIONS
from .lives import run_lives

ROOT = Path(__file__).resolve().parents[2]


def run_campaign(output: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.campaign", "--part", "lives", "--jobs", "2", *options]
    # Findings are an exit code, not a matter of this test.
    subprocess.run([*command, "--output", str(output)], cwd=ROOT, check=False, timeout=600)
    return json.loads(output.read_text())


@pytest.mark.slow
def test_result_file(tmp_path: Path) -> None:
    """Processes of its own, with vLLM's CPU platform on any machine, live the lives of this process."""
    output = tmp_path / "campaign.json"
    fault = {"fault": "host pool full", "times": 1, "lost_blocks": 0, "wrong_tokens": 0}
    names = [configuration.name for configuration in CONFIGURATIONS]
    complete = [{"configuration": name, "lives": 20, "violations": 0} for name in names[:-2] if name != "P/D"]
    cut = {"configuration": "P/D", "lives": 19, "violations": 0}
    output.write_text(json.dumps({"rows": [fault, *complete, cut]}))
    result = run_campaign(output, "--lives", "20", "--seed", "1", "--resume")
    assert result["command"].startswith("python -m tests.campaign --part lives --part faults --jobs 2 --lives 20 ")
    assert {"date", "hardware", "versions"} < set(result)
    assert result["rows"][: 1 + len(complete)] == [fault, *complete]
    rows = {row["configuration"]: row for row in result["rows"][1:]}
    assert set(rows) == set(names)
    for configuration in CONFIGURATIONS[-2:]:
        assert rows[configuration.name] == run_lives(configuration, 20, seed=1).row()
    assert rows["P/D"]["lives"] > 19
    assert {"lives", "steps", "preemptions", "aborts", "failures", "violations"} <= set(rows["P/D"])


@pytest.mark.slow
def test_what_was_lived_in_the_time_is_written(tmp_path: Path) -> None:
    result = run_campaign(tmp_path / "campaign.json", "--lives", "5000", "--lives-minutes", "0.01")
    assert "--jobs 2 --lives 5000 --lives-minutes 0.01" in result["command"]
    assert result["rows"] and all(0 < row["lives"] < 5000 for row in result["rows"])
