"""Kubernetes manifests, the systemd unit and nginx's configuration agree with the product: flags, paths, ports and
metrics that there are, and times that fit each other."""

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from fastapi.routing import APIRoute

from everserve.cli import serve as command
from everserve.config.gateway import GatewayConfig
from everserve.gateway import life
from everserve.gateway.api import health
from everserve.gateway.http.exchange import MAX_BODY_BYTES
from everserve.procs import children
from tests.unit.cli.test_serve import serve  # noqa: F401 (a fixture)
from tests.unit.project.test_deploy import exposition, read_query

ROOT = Path(__file__).parents[3]
DEPLOY, SERVING_MD = ROOT / "deploy", ROOT / "docs/serving.md"
MANIFESTS = DEPLOY / "kubernetes"
END_S = children.KILL_AFTER_S + life.CLOSE_S  # after --shutdown-timeout


def manifest(kind: str) -> dict[str, Any]:
    """The only one of this kind."""
    listed = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())["resources"]
    found = [one for name in listed for one in yaml.safe_load_all((MANIFESTS / name).read_text())]
    (one,) = (one for one in found if one["kind"] == kind)
    return one


def flags() -> dict[str, Any]:
    """The parameters of `serve` by their spellings."""
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command()(command.serve)
    return {name: one for one in typer.main.get_command(app).params for name in (*one.opts, *one.secondary_opts)}


def pod() -> dict[str, Any]:
    return manifest("Deployment")["spec"]["template"]["spec"]


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    return only


def arguments() -> dict[str, str]:
    model, *given = container()["args"]
    assert not model.startswith("-")
    return dict(argument.split("=", 1) for argument in given)


def probes() -> dict[str, dict[str, Any]]:
    return {name.removesuffix("Probe"): value for name, value in container().items() if name.endswith("Probe")}


def paths() -> dict[str, APIRoute]:
    return {route.path: route for route in health.router.routes if isinstance(route, APIRoute)}


# Kubernetes


def test_the_container_is_told_what_the_command_understands(serve) -> None:  # noqa: F811
    started = serve(*container()["args"][1:], model=container()["args"][0])
    assert started.gateway.shutdown_timeout_s == float(arguments()["--shutdown-timeout"])
    variables = {parameter.envvar for parameter in flags().values()}
    secret = re.findall(r"--from-literal=(\w+)=", (MANIFESTS / "deployment.yaml").read_text())
    assert secret and set(secret) <= variables
    assert arguments()["--host"] == "0.0.0.0" and "everserve" in arguments()["--allowed-hosts"].split(",")
    service = manifest("Service")["metadata"]["name"]
    namespace = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())["namespace"]
    assert f"{service}.{namespace}.svc" in arguments()["--allowed-hosts"].split(",")


def test_the_image_is_what_the_container_expects() -> None:
    lines = (DEPLOY / "image/Dockerfile").read_text()
    assert 'ENTRYPOINT ["everserve", "serve"]' in lines and "command" not in container(), "arguments are its flags"
    assert f"useradd --uid {pod()['securityContext']['runAsUser']} " in lines
    (image,) = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())["images"]
    assert image["name"] == container()["image"]
    assert f"EXPOSE {container()['ports'][0]['containerPort']}" in lines and "/livez" in lines


def test_ports_and_labels_lead_to_the_container() -> None:
    (port,) = container()["ports"]
    assert port == {"name": "http", "containerPort": int(arguments()["--port"])}
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    selectors = [
        manifest("Deployment")["spec"]["selector"]["matchLabels"],
        manifest("Service")["spec"]["selector"],
        manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        manifest("PodMonitor")["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    assert [one["targetPort"] for one in manifest("Service")["spec"]["ports"]] == ["http"]
    (scraped,) = manifest("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert (scraped["port"], scraped["path"]) == ("http", "/metrics") and "/metrics" in paths()
    target = manifest("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", manifest("Deployment")["metadata"]["name"])
    assert {volume["name"] for volume in pod()["volumes"]} == {mount["name"] for mount in container()["volumeMounts"]}


def test_probes_ask_what_they_should() -> None:
    asked = {name: probe["httpGet"]["path"] for name, probe in probes().items()}
    assert asked == {"startup": "/readyz", "liveness": "/livez", "readiness": "/readyz"}
    for name, probe in probes().items():
        assert probe["httpGet"]["port"] == "http"
        route = paths()[asked[name]]
        assert "GET" in route.methods and not any(d is health.NEEDS_KEY for d in route.dependencies), "without a key"
    assert health.NEEDS_HEALTH in paths()["/readyz"].dependencies
    assert not paths()["/livez"].dependencies, "nothing that heals makes an instance look dead"
    patience_s = {name: probe["periodSeconds"] * probe["failureThreshold"] for name, probe in probes().items()}
    assert patience_s["liveness"] >= 30 and patience_s["readiness"] >= 5, "longer than most deaths take to heal"
    assert patience_s["startup"] >= 600, "large models take minutes"


def test_streams_have_the_time_that_they_were_promised() -> None:
    before_s = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    timeout_s, grace_s = float(arguments()["--shutdown-timeout"]), pod()["terminationGracePeriodSeconds"]
    assert before_s + timeout_s + END_S <= grace_s <= before_s + timeout_s + END_S + 60
    (down,) = manifest("HorizontalPodAutoscaler")["spec"]["behavior"]["scaleDown"]["policies"]
    assert down["value"] == 1 and down["periodSeconds"] > grace_s
    assert manifest("PodDisruptionBudget")["spec"] == {
        "maxUnavailable": 1,
        "selector": {"matchLabels": {"app.kubernetes.io/name": "everserve"}},
    }


def test_it_scales_by_metrics_that_there_are() -> None:
    rules = yaml.safe_load((MANIFESTS / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    made = {}
    for rule in rules:
        ((name, labels),) = read_query(rule["seriesQuery"]).items()
        assert name in exposition() and labels == set(rule["resources"]["overrides"])
        query = rule["metricsQuery"].replace("<<.Series>>", name)
        assert set(read_query(re.sub("<<.*?>>", "pod", query))) == {name}
        made[rule["name"]["as"]] = name
    wanted = [one["pods"]["metric"]["name"] for one in manifest("HorizontalPodAutoscaler")["spec"]["metrics"]]
    assert sorted(wanted) == sorted(made)
    assert set(made.values()) == {"everserve_requests_queued", "vllm:num_requests_waiting"}
    assert all(re.fullmatch(r"[a-z_]+", name) for name in made), "Kubernetes does not take other names"


# systemd


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(DEPLOY / "systemd/everserve.service")
    return parser


def settings() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "systemd/serve.yaml").read_text())


def test_the_unit_ends_an_instance_as_it_wants_to_be_ended() -> None:
    service = unit()["Service"]
    assert (service["Type"], service["KillMode"], service["OOMPolicy"]) == ("notify", "mixed", "continue")
    assert "KillSignal" not in service, "SIGTERM"
    timeout_s = settings()["shutdown-timeout"]
    assert timeout_s == GatewayConfig(model="", served_model_names=[]).shutdown_timeout_s
    assert timeout_s + END_S < float(service["TimeoutStopSec"]) < timeout_s + END_S + 60
    assert service["RestartPreventExitStatus"] == "2" and int(service["LimitNOFILE"]) >= 1 << 16
    assert -1000 < int(service["OOMScoreAdjust"]) < 0


def test_the_unit_starts_what_there_is(serve, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump({**settings(), "event-log": str(tmp_path)}))
    environment = dict(one.split("=") for one in unit()["Service"]["Environment"].split())
    started = serve("--config", str(tmp_path / "serve.yaml"), model=environment["MODEL"])
    assert started.orchestrator.cluster.spares == settings()["spares"]
    program, verb, *rest = unit()["Service"]["ExecStart"].split()
    assert program.endswith("/bin/everserve") and verb == "serve"
    assert rest == ["--config", "/etc/everserve/serve.yaml", "${MODEL}"]
    assert settings()["event-log"] == "/var/log/" + unit()["Service"]["LogsDirectory"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """With a program that is here."""
    text = (DEPLOY / "systemd/everserve.service").read_text()
    (tmp_path / "everserve.service").write_text(text.replace("/opt/everserve/bin/everserve", sys.executable))
    verify = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "everserve.service")]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=60, check=False)
    assert "everserve.service" not in done.stderr, done.stderr


# nginx


def test_the_proxy_has_the_limits_of_the_gateway() -> None:
    """tests/serving/test_nginx.py runs it."""
    text = (DEPLOY / "nginx/everserve.conf").read_text()
    assert f"client_max_body_size {MAX_BODY_BYTES >> 20}m;" in text
    (idle_s,) = re.findall(r"keepalive_timeout (\d+)s;", text)
    assert int(idle_s) < life.KEEP_ALIVE_S, "or it would send a request into a connection that closes"
    (port,) = re.findall(r"server 127\.0\.0\.1:(\d+);", text)
    assert int(port) == GatewayConfig(model="", served_model_names=[]).port
    assert "proxy_buffering off;" in text
