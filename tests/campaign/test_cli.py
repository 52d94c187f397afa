"""`python -m tests.campaign` writes a result and keeps the rows of what it does not run."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_result_file(tmp_path: Path) -> None:
    output = tmp_path / "campaign.json"
    fault = {"fault": "host pool full", "times": 1, "lost_blocks": 0, "wrong_tokens": 0}
    output.write_text(json.dumps({"rows": [fault, {"configuration": "one instance", "lives": 1, "violations": 0}]}))
    command = [sys.executable, "-m", "tests.campaign", "--part", "lives", "--lives", "20", "--seed", "1", "--resume"]
    # Findings are an exit code, not a matter of this test.
    subprocess.run([*command, "--output", str(output)], cwd=ROOT, check=False, timeout=300)
    result = json.loads(output.read_text())
    assert result["command"].startswith("python -m tests.campaign --part lives --part faults --lives 20 ")
    assert {"date", "hardware", "versions"} < set(result)
    assert result["rows"][:2] == [fault, {"configuration": "one instance", "lives": 1, "violations": 0}]
    for row in result["rows"][2:]:
        assert {"configuration", "lives", "steps", "preemptions", "aborts", "failures", "violations"} <= set(row)
    assert len(result["rows"]) > 10
