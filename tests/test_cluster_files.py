"""Files and commands for clusters: read by the programs they are for, and none of them opens anything to everybody."""

import copy
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

CLUSTER = ROOT / "cluster"
LAUNCHER = ("aws.yaml", "gcp.yaml")
GROUP = "SG_OF_ABOVE"


def yaml_of(name: str) -> dict:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with kubernetes-validate")
    return yaml.safe_load((CLUSTER / name).read_text())


def objects() -> dict[str, dict]:
    """Of cluster/kuberay.yaml, by kind."""
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with kubernetes-validate")
    return {one["kind"]: one for one in yaml.safe_load_all((CLUSTER / "kuberay.yaml").read_text())}


# ---- nothing listens for everybody; without Ray


def shipped() -> list[Path]:
    """Everything that a reader may run, apply or paste."""
    kinds = ("*.py", "*.md", "*.yaml", "*.yml", "*.sh", "*.service", "*.toml", "Dockerfile", ".ci/run")
    folders = (ROOT, ROOT / "common", ROOT / "benchmark", ROOT / "recipes", CLUSTER, ROOT / "docs", ROOT / "examples")
    return sorted({path for folder in folders for kind in kinds for path in folder.glob(kind) if path.is_file()})


def joined(text: str) -> str:
    """Lines that go on, as one: a backslash, YAML's folded blocks, comments that hold commands."""
    text = re.sub(r"\\\n\s*#?\s*", " ", text)
    return re.sub(
        r"(?m)^(\s*)([^\n#]*>-)\n((?:\1\s+\S[^\n]*\n)+)", lambda m: m[1] + m[2] + " ".join(m[3].split()) + "\n", text
    )


# words that open something to everybody, and what may stand there instead
OPEN = {
    "an address that is every interface": r"(?<![\d.])0\.0\.0\.0(?![\d.])|(?<![:\w])\[?::\]?(?=[:/]\d)",
    "a dashboard that others reach": r"dashboard-host[\"']?[=: ,]+(?![\"']?127\.0\.0\.1\b)(?=\S)",
    "an option that binds all interfaces": r"--bind[_-]all|--host[= ][\"']?(?!127\.0\.0\.1\b|localhost\b)[\w.:]+",
    "a service for the world": r"(?i:type): *[\"']?(LoadBalancer|NodePort)|hostNetwork: *true|hostPort:",
    "authentication switched off": r"RAY_AUTH_MODE(=|, *value:)(?! *[\"']?token\b)",
}
# a container's own interfaces, published to loopback of the host only (the line is looked at below); a page's warning
ALLOWED = {
    "docs/docker.md": ("spotrl -m tensorboard.main", "`0.0.0.0` is inside the container"),
    "docs/cloud.md": ("Never `--ip 0.0.0.0`",),
    "docs/troubleshooting.md": ("whoever reaches it uses it",),
}


def openings(path: Path, text: str) -> list[str]:
    name = str(path.relative_to(ROOT))
    lines = [line for line in joined(text).splitlines() if not any(x in line for x in ALLOWED.get(name, ()))]
    return [f"{name}: {why}: {line.strip()}" for line in lines for why, word in OPEN.items() if re.search(word, line)]


def test_nothing_that_is_shipped_listens_on_all_interfaces():
    assert {path.suffix for path in shipped()} >= {".py", ".md", ".yaml", ".sh", ".service"}
    assert [found for path in shipped() for found in openings(path, path.read_text())] == []
    (line,) = [line for line in (ROOT / "docs/docker.md").read_text().splitlines() if "spotrl -m tensorboard" in line]
    assert " -p 127.0.0.1:6006:6006 " in line


@pytest.mark.parametrize(
    "line",
    [
        "ray start --head --dashboard-host=0.0.0.0",
        "ray start --head --dashboard-host ::",
        "      dashboard-host: '10.0.0.1'",
        'settings = {"dashboard-host": "0.0.0.0"}',
        "tensorboard --bind_all",
        "tensorboard --host=0.0.0.0",
        "tensorboard --host 10.1.2.3",
        "  type: LoadBalancer",
        "  serviceType: NodePort",
        "    hostNetwork: true",
        "RAY_AUTH_MODE=disabled ray start --head",
        "- {name: RAY_AUTH_MODE, value: disabled}",
        "--cidr 0.0.0.0/0",
    ],
)
def test_an_opening_is_seen(line):
    assert openings(ROOT / "docs" / "x.md", line + "\n")


def starts() -> list[tuple[str, str]]:
    """Each `ray start` that somebody may type, from there to the end of its line."""
    found = []
    for path in shipped():
        if path.suffix in (".md", ".yaml", ".sh", ".service"):
            for line in joined(path.read_text()).splitlines():
                found += [(path.name, line)] if re.search(r"\b(ray|spotrl-ray) start --", line) else []
    return found


def test_each_node_is_started_with_the_token_and_a_head_keeps_its_dashboard_to_itself():
    found = starts()
    assert {name for name, _ in found} >= {"aws.yaml", "gcp.yaml", "kuberay.yaml", "cluster.md"}
    for name, line in found:
        assert "RAY_AUTH_MODE=token" in line, (name, line)
        heads = len(re.findall(r"\bstart --head\b", line))
        assert len(re.findall(r"--dashboard-host=127\.0\.0\.1(?= |$)", line)) == heads, (name, line)
    assert sum("--head" in line for _, line in found) >= 3


def test_the_image_has_the_token_on_by_itself():
    assert re.search(r"^ENV .*\bRAY_AUTH_MODE=token\b", (ROOT / "Dockerfile").read_text(), re.MULTILINE)


def test_ssh_is_let_in_from_one_address_and_everything_else_from_members_only():
    aws, gcp = ((CLUSTER / name).read_text() for name in LAUNCHER)
    rules = [line for line in joined(aws).splitlines() if "authorize-security-group-ingress" in line]
    assert len(rules) == 2
    assert [' --source-group "$GROUP"' in line for line in rules] == [True, False]
    assert '--port 22 --cidr "$ME/32"' in rules[1]
    rules = [line for line in joined(gcp).splitlines() if "firewall-rules create" in line]
    assert len(rules) == 2
    assert "--source-tags spotrl-ray --target-tags spotrl-ray" in rules[0]
    assert '--allow tcp:22 --source-ranges "$ME/32" --target-tags spotrl-ray' in " ".join(rules[1].split())


# ---- Ray's cluster launcher


def prepared(name: str) -> dict:
    pytest.importorskip("ray", reason="comes with requirements-ray.txt")
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(copy.deepcopy(yaml_of(name)))
    validate_config(config)
    return config


@pytest.mark.parametrize("name", LAUNCHER)
def test_rays_own_validator_takes_the_file(name):
    config = prepared(name)
    assert set(config["available_node_types"]) == {"head", "worker"}
    # nothing of the launcher's own defaults is left in what is run on the nodes
    for key, commands in config.items():
        if key.endswith("_commands"):
            assert not re.search(r"0\.0\.0\.0|anaconda|ray-wheels", " ".join(commands)), key
    zone = config["provider"]["availability_zone"]
    assert "," not in zone


@pytest.mark.parametrize("name", LAUNCHER)
def test_the_validator_refuses_a_wrong_file(name):
    jsonschema = pytest.importorskip("jsonschema", reason="comes with ray")
    pytest.importorskip("ray", reason="comes with requirements-ray.txt")
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml_of(name) | {"max_worker": 3})
    with pytest.raises(jsonschema.ValidationError):
        validate_config(config)


@pytest.mark.parametrize("name", LAUNCHER)
def test_workers_are_spot_machines_and_the_head_is_not(name):
    head, worker = (yaml_of(name)["available_node_types"][kind]["node_config"] for kind in ("head", "worker"))
    assert "spot" in str(worker).lower().replace("spotrl", "")
    assert "spot" not in str(head).lower().replace("spotrl", "")
    network = "SecurityGroupIds" if name == "aws.yaml" else "networkInterfaces"
    assert worker[network] == head[network]


@pytest.mark.slow
def test_the_launcher_opens_nothing_of_its_own_on_aws(tmp_path, monkeypatch):
    """Its preparation against moto's AWS: keys, roles, subnets, groups, all but machines."""
    pytest.importorskip("moto", reason="comes with requirements-cloud.txt")
    config = prepared("aws.yaml")
    (tmp_path / ".ssh").mkdir()
    for name, value in {"HOME": str(tmp_path), "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(name, value)
    import boto3
    from moto import mock_aws
    from ray.autoscaler._private.aws import config as aws

    monkeypatch.setattr(aws.time, "sleep", lambda seconds: None)  # it waits for a new role
    with mock_aws(config={"iam": {"load_aws_managed_policies": True}}):
        ec2 = boto3.client("ec2", "us-east-1")
        (vpc,) = [one["VpcId"] for one in ec2.describe_vpcs()["Vpcs"]]
        group = ec2.create_security_group(GroupName="spotrl-ray", Description="x", VpcId=vpc)["GroupId"]
        for node in config["available_node_types"].values():
            assert node["node_config"]["SecurityGroupIds"] == [GROUP]
            node["node_config"]["SecurityGroupIds"] = [group]
        done = aws.bootstrap_aws(config)
        groups = ec2.describe_security_groups()["SecurityGroups"]
    assert {one["GroupName"] for one in groups} == {"default", "spotrl-ray"}
    assert "0.0.0.0/0" not in str([one["IpPermissions"] for one in groups])
    for node in done["available_node_types"].values():
        assert node["node_config"]["SecurityGroupIds"] == [group]
        assert len(node["node_config"]["SubnetIds"]) >= 1
    assert done["available_node_types"]["worker"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}


# ---- Kubernetes


def ray_pods() -> list[dict]:
    spec = objects()["RayCluster"]["spec"]
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def pods() -> list[dict]:
    return [*ray_pods(), objects()["Job"]["spec"]["template"]]


def test_the_manifest_is_valid():
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    found = objects()
    assert list(found) == ["Namespace", "ResourceQuota", "LimitRange", "NetworkPolicy", "RayCluster", "Job"]
    for kind, one in found.items():
        assert kind == "Namespace" or one["metadata"]["namespace"] == "spotrl"
        if kind != "RayCluster":  # Kubernetes knows nothing of it
            validate.validate(one, validate.latest_version(), strict=True)
    for pod in ray_pods():
        validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **pod},
            validate.latest_version(),
            strict=True,
        )


def amount(text: str) -> float:
    units = {"m": 1e-3, "Mi": 2**20, "Gi": 2**30}
    number, unit = re.fullmatch(r"([\d.]+)(\w*)", text).groups()
    return float(number) * (units[unit] if unit else 1)


def test_the_quota_has_room_for_the_largest_cluster_and_for_no_more():
    head, worker, job = pods()
    most = objects()["RayCluster"]["spec"]["workerGroupSpecs"][0]["maxReplicas"]
    hard = objects()["ResourceQuota"]["spec"]["hard"]
    for kind in ("requests", "limits"):
        for what in ("cpu", "memory"):
            each = [amount(pod["spec"]["containers"][0]["resources"][kind][what]) for pod in (head, worker, job)]
            wanted, allowed = each[0] + most * each[1] + each[2], amount(hard[f"{kind}.{what}"])
            assert wanted <= allowed < wanted + each[1], (kind, what, wanted, allowed)
    assert hard["requests.nvidia.com/gpu"] == "1"
    assert int(hard["pods"]) >= 2 + most
    assert hard["services.loadbalancers"] == hard["services.nodeports"] == "0"


def test_all_pods_are_in_one_zone_with_the_token_and_nobody_else_reaches_them():
    zones = {pod["spec"]["nodeSelector"]["topology.kubernetes.io/zone"] for pod in pods()}
    assert len(zones) == 1
    for pod in pods():
        (container,) = pod["spec"]["containers"]
        env = {one["name"]: one for one in container["env"]}
        assert env["RAY_AUTH_MODE"]["value"] == "token"
        assert env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "ray-token", "key": "auth_token"}
        assert pod["spec"]["automountServiceAccountToken"] is False
    policy = objects()["NetworkPolicy"]["spec"]
    assert policy == {
        "podSelector": {},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {}}]}],
    }
    head = objects()["RayCluster"]["spec"]["headGroupSpec"]
    assert head["rayStartParams"]["dashboard-host"] == "127.0.0.1"  # the operator's default is all interfaces
    assert head["serviceType"] == "ClusterIP"


def test_the_job_is_tried_again_as_in_the_recipe():
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with kubernetes-validate")
    recipe = yaml.safe_load((ROOT / "recipes" / "kubernetes.yaml").read_text())["spec"]
    job = objects()["Job"]["spec"]
    assert job["podFailurePolicy"] == recipe["podFailurePolicy"]
    assert job["backoffLimit"] == recipe["backoffLimit"]
    for key in ("restartPolicy", "terminationGracePeriodSeconds"):
        assert job["template"]["spec"][key] == recipe["template"]["spec"][key]
    shell, flag, script = job["template"]["spec"]["containers"][0]["command"]
    assert (shell, flag) == ("sh", "-c")
    assert " && exec python ppo_atari_ray.py " in script  # the shell must not keep the signals to itself
    assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0
    head = f"{objects()['RayCluster']['metadata']['name']}-head-svc:6379"  # as the operator names it
    assert shlex.split(script).count(head) + shlex.split(script).count(f"--address={head}") == 2


# ---- a cluster of this machine alone


@pytest.mark.slow
def test_a_cluster_of_this_machine_listens_on_loopback_only(tmp_path):
    pytest.importorskip("ray", reason="comes with requirements-ray.txt")
    program = """
import psutil
from common.cluster import connected
with connected(None):
    import ray
    ray.get(ray.remote(lambda: 1).remote())  # a worker process too
    me = psutil.Process()
    sockets = [one for p in [me, *me.children(recursive=True)] for one in p.net_connections("inet")]
    found = [one.laddr.ip for one in sockets if one.status == "LISTEN"]
    print(*sorted(set(found)), len(found))
"""
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    *addresses, count = done.stdout.split()
    assert int(count) >= 3  # the store, the raylet, the workers
    assert addresses
    assert all(re.fullmatch(r"127\.0\.0\.1|::1|::ffff:127\.0\.0\.1", address) for address in addresses), addresses
