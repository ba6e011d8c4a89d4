"""The metrics of a running training, as Prometheus scrapes them, and the Grafana dashboard that shows them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import promql_parser
from prometheus_client.parser import text_string_to_metric_families

from tests.support.clusters import RayHead
from tests.support.processes import ROOT, FlowProcess, free_port, wait_for

DASHBOARD = json.loads((ROOT / "docs/grafana_dashboard.json").read_text())
SOURCES = {"ray_elastic_train_", "elastic_train_"}
RUN = "measured"


def _scrape(address: str) -> dict[str, list[Any]]:
    """The samples of this run at an endpoint, by name."""
    found: dict[str, list[Any]] = {}
    try:
        text = httpx.get(f"http://{address}/metrics", timeout=10).text
    except httpx.TransportError:
        return found
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("run") == RUN:
                found.setdefault(sample.name, []).append(sample)
    return found


def _selectors(expression: Any) -> Iterator[Any]:
    """The vector selectors in a parsed query."""
    found: list[Any] = []
    promql_parser.walk(expression, found.append)
    return (node for node in found if isinstance(node, promql_parser.VectorSelector))


def _queries(source: str) -> list[str]:
    """The queries of the dashboard with its variables replaced."""
    targets = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [target["expr"].replace("${source}", source).replace("$run", RUN) for target in targets]


def test_each_query_of_the_dashboard_finds_a_running_training(
    start: Callable[..., FlowProcess], head: RayHead, ledger: str
) -> None:
    [variable] = [each for each in DASHBOARD["templating"]["list"] if each["name"] == "source"]
    assert {option["value"] for option in variable["options"]} == SOURCES
    port = free_port()
    flow = start(
        loop="tests.support.session_loops:array_loop",
        run_name=RUN,
        cluster=head.block,
        config={"ledger": ledger, "steps": 10**6, "save_every": 20, "sleep": 0.05, "weights": ""},
        environment={"PREFECT_CLIENT_METRICS_ENABLED": "true", "PREFECT_CLIENT_METRICS_PORT": port},
    )
    discovery = Path(head.folder, "prom_metrics_service_discovery.json")  # which Prometheus is given for Ray
    for source in sorted(SOURCES):
        wanted = {}
        for query in _queries(source):
            expression = promql_parser.parse(query)
            for selector in _selectors(expression):
                wanted[selector.name] = selector

        def scraped(source: str = source) -> dict[str, list[Any]]:
            is_ray = source.startswith("ray")
            addresses = json.loads(discovery.read_text())[0]["targets"] if is_ray else [f"127.0.0.1:{port}"]
            return {name: samples for address in addresses for name, samples in _scrape(address).items()}

        flow.wait_for(lambda: wanted.keys() <= scraped().keys(), 90, f"all metrics of {source}")
        values = {name.removeprefix(source): samples for name, samples in scraped().items()}
        assert {name.removeprefix(source) for name in wanted} == values.keys(), "each metric is shown"
        assert values["workers"][0].value == 1
        assert 0 < values["goodput_ratio"][0].value <= 1
        assert 0 < values["progress_ratio"][0].value < 1
        activities = {sample.labels["activity"]: sample.value for sample in values["wall_time_seconds"]}
        assert activities["startup"] > 0
        assert {sample.labels["cause"] for sample in values["restarts"]} >= {"worker_failure", "preemption", "resize"}
        wait_for(lambda: scraped()[f"{source}steps_per_second"][0].value > 0, 60)
