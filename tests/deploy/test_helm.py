"""The chart: values against its schema, committed renderings against Kubernetes' schemas and against helm itself."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from benchmarks.models import ATTENTION
from vllm_hisparse.cli.tiny_model import VARIANTS
from vllm_hisparse.config import DENSE_KV_CACHE_DTYPES, DSA_KV_CACHE_DTYPES, KV_CACHE_DTYPES, HiSparseConfig
from vllm_hisparse.tier_config import FsTier, ObjTier, P2PTier, Tier

HELM = Path(__file__).parent.parent.parent / "deploy" / "helm"
CHART = HELM / "vllm-hisparse"
VALUES = ("default", "cpu", "production", "tiers")
KUBERNETES_VERSIONS = ("1.29", "1.31")
# Kinds of operators, which Kubernetes' own schemas do not know.
CRDS = {
    schema["properties"]["kind"]["const"]: schema
    for schema in (json.loads(path.read_text()) for path in (Path(__file__).parent / "crds").glob("*.json"))
}

needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not on PATH: the chart is not rendered")


@cache
def parsed(path: Path) -> bytes:
    """All documents of a file, pickled, so that nobody changes another test's."""
    return pickle.dumps([doc for doc in yaml.load_all(path.read_text(), yaml.CSafeLoader) if doc])


def load(path: Path) -> Any:
    (document,) = pickle.loads(parsed(path))
    return document


def merge(base: dict, over: dict) -> dict:
    """Merge values as helm does with a second values file."""
    both_dicts = {
        key for key in base.keys() & over.keys() if isinstance(base[key], dict) and isinstance(over[key], dict)
    }
    return {**base, **over, **{key: merge(base[key], over[key]) for key in both_dicts}}


def chart_values(name: str) -> dict:
    values = load(CHART / "values.yaml")
    return values if name == "default" else merge(values, load(CHART / f"values-{name}.yaml"))


def check_schema(values: dict) -> None:
    jsonschema.validate(values, json.loads((CHART / "values.schema.json").read_text()))


def rendered(name: str) -> list[dict]:
    return pickle.loads(parsed(HELM / "rendered" / f"{name}.yaml"))


def by_name(name: str, kind: str) -> dict[str, dict]:
    return {doc["metadata"]["name"]: doc for doc in rendered(name) if doc["kind"] == kind}


def pod_spec(values: str, component: str) -> dict:
    return by_name(values, "Deployment")[f"hisparse-{component}"]["spec"]["template"]["spec"]


def helm_template(*options: str) -> subprocess.CompletedProcess[str]:
    command = [
        "helm",
        "template",
        "hisparse",
        str(CHART),
        "--namespace",
        "serving",
        "--kube-version",
        "1.31.0",
        *options,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", VALUES)
def test_values_fit_the_schema(name: str):
    check_schema(chart_values(name))


def test_schema_knows_every_value():
    def closed(schema: dict, path: str) -> None:
        for key, child in schema.get("properties", {}).items():
            if child.get("type") == "object" and "properties" in child:
                assert child["additionalProperties"] is False, f"{path}.{key}"
                closed(child, f"{path}.{key}")

    closed(json.loads((CHART / "values.schema.json").read_text()), "values")


@pytest.mark.parametrize(
    "bad",
    [
        {"decode": {"memoryGiB": None}},
        {"decode": {"gpus": 9}},
        {"decode": {"hisparse": {"hostPoolGiB": -1}}},
        {"decode": {"hisparse": {"host_pool_gib": 4}}},
        {"decode": {"tiers": [{"type": "tape"}]}},
        {"decode": {"tiers": [{"type": "fs", "volume": {}}]}},
        {"decode": {"tiers": [{"type": "fs", "quotaGiB": 0, "volume": {}}]}},
        {"decode": {"tiers": [{"type": "fs", "quotaGiB": 1, "volume": {"hostPath": "kv"}}]}},
        {"decode": {"tiers": [{"type": "fs", "quotaGiB": 1, "volume": {"hostPath": "/kv", "existingClaim": "kv"}}]}},
        {"decode": {"tiers": [{"type": "fs", "quotaGiB": 1, "volume": {}, "directory": "../other"}]}},
        {"decode": {"tiers": [{"type": "p2p", "peers": ["a:1"]}]}},
        {"decode": {"tiers": [{"type": "obj", "bucket": "kv", "endpoint": "http://s3"}]}},
        {"decode": {"tiers": [{"type": "obj", "bucket": "kv", "endpoint": "s3", "secret_key": "x"}]}},
        {"decode": {"tiers": [{"type": "obj", "bucket": "kv", "endpoint": "s3", "secretKey": "x"}]}},
        {"engine": {"kvCacheDtype": "int4"}},
        {"enginePort": 80},
        {"nixl": {"lockMemory": True}},
        {"nixl": {"sideChannelPort": 70000}},
        {"nixl": {"leaseSeconds": 5}},
        {"router": {"policy": {"decode": "fastest"}}},
        {"runAsUser": 0},
        {"prefill": {"replicas": 0}},
        {"unknown": 1},
    ],
)
def test_schema_refuses(bad: dict):
    with pytest.raises(jsonschema.ValidationError):
        check_schema(merge(chart_values("default"), bad))


def test_chart_knows_the_kv_dtypes():
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = schema["properties"]["engine"]["properties"]["kvCacheDtype"]["enum"]
    dtypes = KV_CACHE_DTYPES, DSA_KV_CACHE_DTYPES, DENSE_KV_CACHE_DTYPES
    assert set(known) == {dtype for by_device in dtypes for names in by_device.values() for dtype in names}
    checks = (CHART / "templates" / "_checks.tpl").read_text()
    for device, names in KV_CACHE_DTYPES.items():
        assert f'"{device}" (list {" ".join(map(json.dumps, names))})' in checks
    dsa, dense = (" ".join(map(json.dumps, by_device["cuda"])) for by_device in dtypes[1:])
    assert f'concat $known (ternary (list {dsa}) (list {dense}) (eq "dsa" $algorithm))' in checks
    assert not DSA_KV_CACHE_DTYPES["cpu"] and not DENSE_KV_CACHE_DTYPES["cpu"]


def test_chart_knows_the_tiny_models():
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["properties"]["model"]["properties"]["tiny"]["enum"] == ["", *VARIANTS]


def test_chart_knows_the_attention_backends():
    """The chart lists each back end that the table of models and back ends has, and no other."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = schema["properties"]["engine"]["properties"]["attentionBackend"]["enum"]
    backends = dict.fromkeys(attention["backend"] for attention in ATTENTION.values())
    assert known == ["", *backends]


@pytest.mark.long
@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("name", VALUES)
def test_renderings_fit_kubernetes(name: str, version: str):
    documents = rendered(name)
    assert {"Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget"} <= {doc["kind"] for doc in documents}
    for document in documents:
        if document["kind"] in CRDS:
            jsonschema.validate(document, CRDS[document["kind"]])
        else:
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("kind", CRDS)
def test_crds_refuse_what_the_operators_would(kind: str):
    document = next(iter(by_name("production", kind).values()))
    (items,) = [value for value in document["spec"].values() if isinstance(value, list)]
    items[0]["colour"] = "red"
    with pytest.raises(jsonschema.ValidationError, match="colour"):
        jsonschema.validate(document, CRDS[kind])


@pytest.mark.parametrize("name", VALUES)
def test_pods_are_locked_down(name: str):
    for component in ("prefill", "decode", "router"):
        pod = pod_spec(name, component)
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            # Added capabilities do not reach a user other than root: the kernel drops it when the program starts.
            assert security["capabilities"] == {"drop": ["ALL"]}
            writable = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert "/tmp" in writable
        assert pod["automountServiceAccountToken"] is (component == "router")


@pytest.mark.parametrize("name", VALUES)
def test_pods_end_after_their_longest_request(name: str):
    values = chart_values(name)
    for component in ("prefill", "decode"):
        pod = pod_spec(name, component)
        least = values["longestRequestSeconds"] + values["drainSeconds"]
        assert pod["terminationGracePeriodSeconds"] > least
        assert f"--shutdown-timeout={values['longestRequestSeconds']}" in pod["containers"][0]["args"]


def kv_connector(pod: dict) -> dict:
    """`--kv-transfer-config` of an engine's pod."""
    (argument,) = [arg for arg in pod["containers"][0]["args"] if arg.startswith("--kv-transfer-config=")]
    return json.loads(argument.partition("=")[2])


def decode_tiers(pod: dict) -> list[Tier]:
    """The tiers that the engine of a decode pod gets from its options."""
    return HiSparseConfig.from_extra_config(kv_connector(pod)["kv_connector_extra_config"]).tiers


@pytest.mark.parametrize("name", VALUES)
def test_decode_asks_for_its_host_pool(name: str):
    container = pod_spec(name, "decode")["containers"][0]
    config = kv_connector(pod_spec(name, "decode"))
    assert config["kv_connector"] == "HiSparseHostConnector" and config["kv_role"] == "kv_consumer"
    pool_mib = config["kv_connector_extra_config"]["host_pool_gib"] * 1024
    resources = container["resources"]
    assert resources["requests"] == resources["limits"]
    assert int(resources["requests"]["memory"].removesuffix("Mi")) > pool_mib


@pytest.mark.parametrize("name", VALUES)
def test_both_roles_have_one_lease(name: str):
    seconds = chart_values(name)["nixl"]["leaseSeconds"]
    for component in ("prefill", "decode"):
        options = kv_connector(pod_spec(name, component))["kv_connector_extra_config"]
        assert options["kv_lease_duration"] == seconds, component


@pytest.mark.parametrize("name", VALUES)
def test_only_engines_reach_the_nixl_ports(name: str):
    values = chart_values(name)
    policy = by_name(name, "NetworkPolicy")["hisparse-engine"]["spec"]
    (rule,) = [rule for rule in policy["ingress"] if any(port["port"] == "nixl" for port in rule["ports"])]
    (peer,) = rule["from"]
    (expression,) = peer["podSelector"]["matchExpressions"]
    assert set(expression["values"]) == {"prefill", "decode"} and "namespaceSelector" not in peer
    data = values["nixl"]["dataPorts"]
    assert {"protocol": "TCP", "port": data["first"], "endPort": data["last"]} in rule["ports"]
    assert not any("from" not in rule for rule in policy["ingress"])


@pytest.mark.parametrize("name", VALUES)
def test_prefill_pods_alone_have_a_side_channel(name: str):
    for component in ("prefill", "decode"):
        (container,) = pod_spec(name, component)["containers"]
        ports = {port["containerPort"] for port in container["ports"] if port["name"] == "nixl"}
        assert ports == ({chart_values(name)["nixl"]["sideChannelPort"]} if component == "prefill" else set())
        names = {variable["name"] for variable in container["env"] if "NIXL_SIDE_CHANNEL" in variable["name"]}
        assert len(names) == (2 if component == "prefill" else 0)


@pytest.mark.parametrize("name", VALUES)
def test_engines_take_the_charts_tiers(name: str):
    pod, values = pod_spec(name, "decode"), chart_values(name)["decode"]["tiers"]
    tiers = decode_tiers(pod)
    assert [tier.type for tier in tiers] == [value["type"] for value in values]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for value, tier in zip(values, tiers, strict=True):
        if isinstance(tier, FsTier):
            assert tier.quota_gib == value["quotaGiB"] and tier.num_threads == value.get("numThreads", 8)
            volume = volumes[mounts[str(Path(tier.path).parent)]]
            assert volume["hostPath"] == {"path": value["volume"]["hostPath"], "type": "Directory"}


def test_peers_are_the_decode_pods():
    pod = pod_spec("tiers", "decode")
    (tier,) = [tier for tier in decode_tiers(pod) if isinstance(tier, P2PTier)]
    service, port = tier.peers[0].split(":")
    spec = by_name("tiers", "Service")[service]["spec"]
    assert spec["clusterIP"] == "None" and {"name": "p2p", "port": int(port), "targetPort": "p2p"} in spec["ports"]
    assert spec["selector"]["app.kubernetes.io/component"] == "decode"
    (container,) = pod["containers"]
    assert {"name": "p2p", "containerPort": int(port)} in container["ports"]
    environment = {variable["name"]: variable for variable in container["env"]}
    # NOTE: the address that an instance listens on must be the one that the service's name resolves to.
    assert environment["VLLM_P2P_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"] == {"fieldPath": "status.podIP"}
    assert environment["VLLM_P2P_SIDE_CHANNEL_PORT"]["value"] == port


def test_keys_of_an_object_store_come_from_its_secret():
    pod = pod_spec("tiers", "decode")
    (tier,) = [tier for tier in decode_tiers(pod) if isinstance(tier, ObjTier)]
    assert (tier.access_key, tier.secret_key, tier.session_token) == ("", "", "")
    variables = {variable["name"]: variable for variable in pod["containers"][0]["env"]}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        reference = variables[name]["valueFrom"]["secretKeyRef"]
        assert (reference["name"], reference["key"]) == ("kv-store", name)
    prefill = {variable["name"] for variable in pod_spec("tiers", "prefill")["containers"][0]["env"]}
    assert not prefill & {"AWS_SECRET_ACCESS_KEY", "VLLM_P2P_SIDE_CHANNEL_PORT"}


@pytest.mark.parametrize("name", VALUES)
def test_only_decode_pods_reach_the_port_of_peers(name: str):
    policy = by_name(name, "NetworkPolicy")["hisparse-engine"]["spec"]
    rules = [rule for rule in policy["ingress"] if any(port["port"] == "p2p" for port in rule["ports"])]
    assert bool(rules) == any(tier["type"] == "p2p" for tier in chart_values(name)["decode"]["tiers"])
    for rule in rules:
        assert rule["ports"] == [{"protocol": "TCP", "port": "p2p"}]
        (peer,) = rule["from"]
        assert peer["podSelector"]["matchExpressions"][0]["values"] == ["decode"] and "namespaceSelector" not in peer


@pytest.mark.parametrize("name", VALUES)
def test_only_routers_and_named_scrapers_reach_the_engines_api(name: str):
    policy = by_name(name, "NetworkPolicy")["hisparse-engine"]["spec"]
    rules = [rule for rule in policy["ingress"] if any(port["port"] == "http" for port in rule["ports"])]
    peers = [peer for rule in rules for peer in rule["from"]]
    (router,) = [peer for peer in peers if "podSelector" in peer]
    assert router["podSelector"]["matchExpressions"][0]["values"] == ["router"]
    assert [peer for peer in peers if peer != router] == chart_values(name)["networkPolicy"]["scrapers"]


def test_every_selector_finds_its_pods():
    for name in VALUES:
        labels = {
            component: by_name(name, "Deployment")[f"hisparse-{component}"]["spec"]["template"]["metadata"]["labels"]
            for component in ("prefill", "decode", "router")
        }
        for kind in ("Service", "PodDisruptionBudget"):
            for document in by_name(name, kind).values():
                selector = document["spec"]["selector"]
                wanted = selector.get("matchLabels", selector)
                assert sum(wanted.items() <= pod.items() for pod in labels.values()) == 1, document["metadata"]["name"]


@needs_helm
@pytest.mark.parametrize("name", VALUES)
def test_renderings_are_current(name: str):
    result = helm_template(*([] if name == "default" else ["--values", str(CHART / f"values-{name}.yaml")]))
    assert result.returncode == 0, result.stderr
    fresh = [doc for doc in yaml.safe_load_all(result.stdout) if doc]
    assert fresh == rendered(name), "run deploy/helm/render.sh and commit what it writes"


@needs_helm
@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("decode.hisparse.hostPoolGiB=500", "decode.memoryGiB: got 160"),
        ("decode.hisparse.hostPoolGiB=0", "decode.hisparse.hostPoolGiB / hostToDeviceRatio"),
        ("decode.hisparse.hostToDeviceRatio=4", "exactly one of the two"),
        ("decode.memoryGiB=null", "memoryGiB"),
        ("prefill.extraArgs={--kv-cache-dtype=fp8}", "prefill.extraArgs: got --kv-cache-dtype=fp8"),
        ("decode.extraArgs={--model=other}", "decode.extraArgs: got --model=other"),
        ("nixl.sideChannelPort=8100", "nixl.sideChannelPort: got 8100"),
        ("enginePort=30500", "enginePort: got 30500"),
        ("router.metricsPort=8000", "router.metricsPort: got 8000"),
        ("decode.extraArgs={-tp}", "decode.extraArgs: got -tp"),
        ("decode.extraArgs={--revision=main}", "Move it to engine.extraArgs"),
        ("decode.extraArgs={--hf-overrides.rope_theta=1}", "Move it to engine.extraArgs"),
        ("decode.extraArgs={-qfp8}", "Move it to engine.extraArgs"),
        *(
            (f"prefill.extraArgs={{{argument}}}", f"prefill.extraArgs: got {argument}, expected no option that")
            for argument in (
                "--kv-transfer-config.kv_connector_extra_config.kv_lease_duration=300",
                "--kv_transfer_config.kv_role=kv_both",
                "--kv-transfer-conf",
                "--tensor-parallel=4",
                "-tp=4",
            )
        ),
        ("prefill.env.HF_TOKEN=secret", "prefill.env: got HF_TOKEN"),
        ("nixl.env.UCX_TLS=tcp", "nixl.env: got UCX_TLS"),
        ("service.port=29000", "service.port: got 29000"),
        ("serviceMonitor.enabled=true", "networkPolicy.scrapers: got []"),
        ("decode.autoscaling.kind=hpa", "decode.autoscaling reads the engines' metrics"),
        ("prefill.autoscaling.kind=keda", "prometheusAddress"),
        ("decode.autoscaling.minReplicas=9", "decode.autoscaling.maxReplicas: got 8"),
        ("drainSeconds=1", "drainSeconds: got 1"),
        ("model.tiny=glm", "model.id / model.tiny"),
        ("device=cpu", "prefill.gpus: got 1"),
        ("decode.gpus=2,decode.hisparse.extraConfig.algorithm=quest", "prefill.gpus: got 1, expected 2"),
        ("engine.kvCacheDtype=float16", "engine.kvCacheDtype: got float16"),
        ("engine.kvCacheDtype=fp8_ds_mla,decode.hisparse.extraConfig.algorithm=quest", "engine.kvCacheDtype: got fp8"),
        ("nixl.rdma.resource=rdma/hca", "nixl.rdma.count: got 0"),
        ("decode.hisparse.extraConfig.host_pool_gib=1", "decode.hisparse.extraConfig: got host_pool_gib"),
        ("decode.hisparse.extraConfig.tiers=none", "decode.hisparse.extraConfig: got tiers"),
        ("decode.hisparse.extraConfig.kv_lease_duration=300", "decode.hisparse.extraConfig: got kv_lease_duration"),
        ("decode.p2pPort=8100", "decode.p2pPort: got 8100"),
        ("decode.p2pPort=30001", "decode.p2pPort: got 30001"),
        ("decode.env.AWS_SECRET_ACCESS_KEY=x", "decode.env: got AWS_SECRET_ACCESS_KEY"),
    ],
)
def test_helm_refuses(option: str, named: str):
    result = helm_template("--set", option)
    assert result.returncode != 0
    assert named in result.stderr


DISK = {"type": "fs", "quotaGiB": 100, "volume": {}}
PEERS = {"type": "p2p"}
STORE = {"type": "obj", "bucket": "kv", "endpoint": "minio:9000", "credentialsSecret": "kv-store"}


def helm_tiers(*tiers: dict, **sets: str) -> subprocess.CompletedProcess[str]:
    words = [word for option, value in sets.items() for word in ("--set", f"{option.replace('__', '.')}={value}")]
    return helm_template("--set-json", f"decode.tiers={json.dumps(tiers)}", *words)


@needs_helm
@pytest.mark.parametrize(
    ("tiers", "sets", "named"),
    [
        ([PEERS, PEERS], {}, "decode.tiers: got several of type p2p"),
        ([STORE, {**STORE, "credentialsSecret": "b"}], {}, "decode.tiers: got credentialsSecret kv-store, b"),
        ([PEERS], {"decode__extraArgs": "{--data-parallel-size=2}"}, "decode.extraArgs: got --data-parallel-size=2"),
        *(
            ([DISK], {"engine__extraArgs": f"{{{argument}}}"}, f"engine.extraArgs: got {argument}")
            for argument in ("--no-enable-prefix-caching", "--disable-prefix-caching", "--no-enable-prefix-cach")
        ),
        ([DISK], {"decode__memoryGiB": "147"}, "at least 148: a host pool of 128 GiB and decode.overheadGiB 16, and 4"),
        (
            [DISK],
            {
                "decode__hisparse__hostPoolGiB": "144",
                "decode__memoryGiB": "160",
                "decode__hisparse__extraConfig__tier_buffer_gib": "1",
            },
            "at least 161: a host pool of 144 GiB and decode.overheadGiB 16, and 1",
        ),
        (
            [DISK],
            {"decode__hisparse__hostPoolGiB": "8", "decode__memoryGiB": "24"},
            "at least 24.5: a host pool of 8 GiB",
        ),
    ],
)
def test_helm_refuses_tiers(tiers: list[dict], sets: dict[str, str], named: str):
    result = helm_tiers(*tiers, **sets)
    assert result.returncode != 0
    assert named in result.stderr


@needs_helm
@pytest.mark.parametrize(
    ("volume", "rendered_as"),
    [
        ({}, {"emptyDir": {"sizeLimit": "106Gi"}}),
        ({"hostPath": "/mnt/kv"}, {"hostPath": {"path": "/mnt/kv", "type": "Directory"}}),
        ({"existingClaim": "kv"}, {"persistentVolumeClaim": {"claimName": "kv"}}),
        (
            {"storageClassName": "local"},
            {
                "ephemeral": {
                    "volumeClaimTemplate": {
                        "spec": {
                            "accessModes": ["ReadWriteOnce"],
                            "storageClassName": "local",
                            "resources": {"requests": {"storage": "106Gi"}},
                        }
                    }
                }
            },
        ),
    ],
)
def test_volumes_have_room_for_the_quota(volume: dict, rendered_as: dict):
    pod = decode_pod(helm_tiers(PEERS, {**DISK, "volume": volume, "directory": "v2"}))
    assert {"name": "tier-1", **rendered_as} in pod["volumes"]
    assert decode_tiers(pod)[1] == FsTier(type="fs", path="/tiers/1/v2", quota_gib=100)


@needs_helm
def test_helm_passes_all_options_of_a_store():
    options = {"scheme": "http", "region": "eu", "prefix": "a/", "numThreads": 2}
    (tier,) = decode_tiers(decode_pod(helm_tiers({**STORE, **options})))
    assert (tier.bucket, tier.endpoint, tier.scheme, tier.region) == ("kv", "minio:9000", "http", "eu")
    assert (tier.prefix, tier.num_threads) == ("a/", 2)


def decode_pod(result: subprocess.CompletedProcess[str]) -> dict:
    """The decode fleet's pod in what helm wrote."""
    assert result.returncode == 0, result.stderr
    documents = [doc for doc in yaml.safe_load_all(result.stdout) if doc]
    for document in documents:
        kubernetes_validate.validate(document, KUBERNETES_VERSIONS[-1], strict=True)
    deployments = {doc["metadata"]["name"]: doc for doc in documents if doc["kind"] == "Deployment"}
    return deployments["hisparse-decode"]["spec"]["template"]["spec"]


@needs_helm
def test_ratio_with_its_device_cache():
    sets = ("decode.hisparse.hostPoolGiB=0", "decode.hisparse.hostToDeviceRatio=4", "decode.hisparse.deviceKvGiB=20")
    result = helm_template(*(word for option in sets for word in ("--set", option)))
    assert result.returncode == 0, result.stderr
    assert '\\"host_to_device_ratio\\":4' in result.stdout and "--kv-cache-memory-bytes=21474836480" in result.stdout


@needs_helm
@pytest.mark.parametrize(("algorithm", "needed"), [("dsa", 84), ("quest", 164)])
def test_every_gpu_of_a_dense_model_has_a_pool(algorithm: str, needed: int):
    sets = {"decode.hisparse.hostPoolGiB": 0, "decode.hisparse.hostToDeviceRatio": 4}
    sets |= {"decode.hisparse.deviceKvGiB": 20, "decode.hisparse.extraConfig.algorithm": algorithm}
    sets |= {"decode.gpus": 2, "prefill.gpus": 2, "decode.overheadGiB": 4, "decode.memoryGiB": 40, "decode.shmGiB": 1}
    result = helm_template(*(word for option, value in sets.items() for word in ("--set", f"{option}={value}")))
    assert f"decode.memoryGiB: got 40, expected at least {needed}" in result.stderr


@needs_helm
@pytest.mark.parametrize(("prefill", "option"), [(2, None), (8, 8), (1, 1)])
def test_decode_knows_the_number_of_prefill_ranks(prefill: int, option: int | None):
    result = helm_template("--set", f"decode.gpus=2,prefill.gpus={prefill}")
    assert result.returncode == 0, result.stderr
    (found,) = [
        json.loads(arg.partition("=")[2])["kv_connector_extra_config"].get("prefill_tp_size")
        for doc in yaml.safe_load_all(result.stdout)
        if doc and doc["kind"] == "Deployment" and doc["metadata"]["name"].endswith("-decode")
        for arg in doc["spec"]["template"]["spec"]["containers"][0]["args"]
        if arg.startswith("--kv-transfer-config=")
    ]
    assert found == option


@needs_helm
def test_hpa_scales_on_the_queue():
    scrapers = 'networkPolicy.scrapers=[{"namespaceSelector": {}}]'
    result = helm_template("--set", "decode.autoscaling.kind=hpa", "--set-json", scrapers)
    assert result.returncode == 0, result.stderr
    documents = [doc for doc in yaml.safe_load_all(result.stdout) if doc]
    (scaler,) = [doc for doc in documents if doc["kind"] == "HorizontalPodAutoscaler"]
    kubernetes_validate.validate(scaler, KUBERNETES_VERSIONS[-1], strict=True)
    deployments = {doc["metadata"]["name"]: doc for doc in documents if doc["kind"] == "Deployment"}
    assert "replicas" not in deployments["hisparse-decode"]["spec"]
