"""Dashboard, alert rules and scrape configuration, without engines; tests/e2e checks them against live metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from vllm.v1.kv_offload.base import OffloadingCounterMetadata
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from vllm_hisparse.connector.metrics import COUNTERS, GAUGES, HISTOGRAMS

GRAFANA = Path(__file__).parent.parent.parent / "deploy" / "grafana"
CONFIGURATION = GRAFANA.parents[1] / "docs" / "configuration.md"
DASHBOARD = json.loads((GRAFANA / "dashboard.json").read_text())

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool (Debian: prometheus) is not on PATH: PromQL is unchecked",
)


def expressions() -> list[str]:
    """PromQL of every panel, Grafana's variables filled in."""
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    return [expr.replace("$__rate_interval", "5m").replace("$role", ".*").replace("$instance", ".*") for expr in found]


def promtool(*arguments: str | Path) -> None:
    command = ["promtool", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
def test_promtool_accepts_rules_and_scrape_configuration():
    promtool("check", "rules", GRAFANA / "alerts.yaml")
    promtool("check", "config", GRAFANA / "prometheus.yaml")


@needs_promtool
def test_promtool_accepts_every_query(tmp_path: Path):
    rules = [{"record": f"panel:{index}", "expr": expr} for index, expr in enumerate(expressions())]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", path)


@needs_promtool
def test_alerts_fire(tmp_path: Path):
    """Every alert fires on a series made for it, and none on a healthy one."""
    pool = {f"vllm:hisparse_host_blocks_{state}" for state in ("used", "cached", "free")}
    bad = {
        **{name + '{instance="a"}': "95+0x60" if name.endswith("used") else "1+0x60" for name in pool},
        'vllm:hisparse_requests_waiting_for_host_memory{instance="a"}': "3+0x60",
        'vllm:hisparse_transfer_failures_total{instance="a"}': "0+1x60",
        'vllm:hisparse_transfers_refused_total{instance="a"}': "0+1x60",
        'vllm:num_requests_kv_fetch_by_stage{instance="a",stage="in_progress"}': "2+0x60",
        'vllm:hisparse_transfers_total{instance="a"}': "7+0x60",
        'vllm:nixl_num_kv_expired_reqs_total{instance="a",role="prefill"}': "0+1x60",
        'vllm:hisparse_transfers_expired_total{instance="a"}': "0+1x60",
        'vllm:hisparse_tier_damaged_blocks_total{instance="a"}': "0+1x60",
        'vllm:hisparse_tier_load_timeouts_total{instance="a"}': "0+1x60",
        'vllm:hisparse_tier_slow_loads_total{instance="a"}': "0+1x60",
        'vllm:hisparse_tier_skipped_loads_total{instance="a"}': "0+0x60",
        'vllm:kv_offload_tiering_cascade_job_failures_total{instance="a",tier="1:fs"}': "1+1x60",
        'vllm:hisparse_cache_hits_total{instance="a"}': "0+90x1500 135000+50x60",
        'vllm:hisparse_cache_misses_total{instance="a"}': "0+10x1500 15000+50x60",
    }
    (group,) = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"]
    for alert in (rule["alert"] for rule in group["rules"]):
        query = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
        at = "1540m" if alert == "HiSparseHitRateDropped" else "30m"
        tests = [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [{"expr": query, "eval_time": at, "exp_samples": expected}],
            }
            for series, expected in ((bad, [{"value": 1}]), ({"vllm:hisparse_transfers_total": "0+1x1600"}, []))
        ]
        path = tmp_path / f"{alert}.yaml"
        path.write_text(yaml.safe_dump({"rule_files": [str(GRAFANA / "alerts.yaml")], "tests": tests}))
        promtool("test", "rules", path)


def test_dashboard_shows_what_operators_ask_for():
    titles = " ".join(panel["title"].lower() for panel in DASHBOARD["panels"])
    wanted = ("hit rate", "pcie, host to device", "pcie, device to host", "host pool in use", "waiting", "preemptions")
    wanted += ("transfer time", "failures", "inter-token latency", "time to first token", "running requests per role")
    wanted += ("accepted drafts", "tier hits", "tier bytes", "tier speed", "blocks loaded and lost", "tier failures")
    assert [title for title in wanted if title not in titles] == []


def test_panels_have_their_own_id_and_place():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


def alert_expressions() -> list[str]:
    (group,) = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"]
    return [rule["expr"] for rule in group["rules"]]


def test_metrics_of_tiers_are_vllms():
    definitions = TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": []})
    counters = {name for name, metric in definitions.items() if isinstance(metric, OffloadingCounterMetadata)}
    known = {f"{name}_total" if name in counters else name for name in definitions}
    named = set(re.findall(r"vllm:kv_offload_[a-z_]+", " ".join([*expressions(), *alert_expressions()])))
    assert named and named - known == set()
    assert all("tier" in definitions[name.removesuffix("_total")].labelnames for name in named)


def test_every_metric_is_ours_or_vllms():
    names = set(re.findall(r"[a-z_]+:[a-z_]+", " ".join([*expressions(), *alert_expressions()])))
    own = {f"vllm:hisparse_{name}" for name in exported()}
    assert names & own
    assert all(name in own if "hisparse" in name else name.startswith("vllm:") for name in names)


def test_dashboard_shows_and_the_documentation_explains_every_metric_of_ours():
    shown = set(re.findall(r"vllm:hisparse_([a-z_]+)", " ".join(expressions())))
    assert shown == exported()
    rows = re.findall(r"^\| (`vllm:hisparse_.*?) \|", CONFIGURATION.read_text(), re.MULTILINE)
    explained = [names for row in rows for names in documented(row)]
    assert sorted(explained) == sorted([*COUNTERS, *GAUGES, *HISTOGRAMS])


def exported() -> set[str]:
    """The names of our metrics as Prometheus has them."""
    return {f"{name}_total" for name in COUNTERS} | set(GAUGES) | {f"{name}_bucket" for name in HISTOGRAMS}


def documented(cell: str) -> list[str]:
    """Metrics that the first cell of a row names; `_free` stands for the first name with another last word."""
    first, *others = re.findall(r"`([^`]+)`", cell)
    names = [first]
    for name in others:
        names.append(first.rsplit("_", name.count("_"))[0] + name if name.startswith("_") else name)
    return [name.removeprefix("vllm:hisparse_") for name in names]
