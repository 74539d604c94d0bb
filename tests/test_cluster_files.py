"""The files that start a cluster: each is run, or read, as far as one machine can."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import clusters
import pytest
import yaml

from runners.store import read_json

ROOT = Path(__file__).resolve().parent.parent
FILES = ROOT / "runners" / "cluster"

SRUN = """
# Stands in for Slurm's: node1 is 127.0.0.2, node2 is 127.0.0.3. Says what it was asked.
echo "srun $*" >> "$SRUN_LOG"
ip=127.0.0.3
while [ "${1#--}" != "$1" ]; do [ "$1" != --nodelist=node1 ] || ip=127.0.0.2; shift; done
case "$1 ${2:-}" in
  "hostname --ip-address") echo "$ip 10.9.8.7" ;;
  "ray start") case "$*" in *--head*) exec "$@" ;; *) exec "$@" --node-ip-address=$ip ;; esac ;;
  *) exit 9 ;;
esac
"""


@pytest.fixture
def shims(tmp_path: Path) -> Path:
    """A folder of commands that a Slurm node has, and ours."""
    folder = tmp_path / "bin"
    folder.mkdir()
    python = shlex.quote(sys.executable)
    lines = {
        "srun": SRUN,
        "scontrol": '[ "$1 $2 $3" = "show hostnames node[1-2]" ] && printf "node1\\nnode2\\n"',
        "sweep": f'exec {python} -m sweeps "$@"',
        "ray": f'exec {python} -m ray.scripts.scripts "$@"',
        "python3": f'exec {python} "$@"',
    }
    for name, text in lines.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_slurm_script_runs_a_sweep(tmp_path: Path, shims: Path) -> None:
    job = 10_000 * 7 + os.getpid() % 10_000
    slurm = {"SLURM_JOB_ID": str(job), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    slurm |= {"SLURM_CPUS_PER_TASK": "1", "SRUN_LOG": str(shims / "log")}
    env = {**os.environ, **slurm, "PATH": f"{shims}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    line = [str(FILES / "slurm.sh"), "specs/smoke.yaml", "--store", str(tmp_path / "runs"), "--no-report"]
    line += ["--set", "train.steps=60", "--only", "mechanism=[linear,softmax]"]
    ran = subprocess.run(
        line, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=500, stdin=subprocess.DEVNULL, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    address = f"127.0.0.2:{20_000 + job % 10_000}"
    assert f"2 of 2 nodes at {address}" in ran.stdout
    assert "2 trials at once on CPU" in ran.stdout
    assert "Now: 4 complete" in ran.stdout
    asked = (shims / "log").read_text().splitlines()
    assert any("--nodelist=node1" in line and "--head" in line for line in asked)
    assert any("--nodes=1 --ntasks=1 --exclude=node1" in line and f"--address={address}" in line for line in asked)
    places = {read_json(path)["ip"] for path in (tmp_path / "runs").glob("trials/*/attempts/*/node.json")}
    assert places == {"127.0.0.2", "127.0.0.3"}
    assert not [line for line in clusters.lines() if address in line], "the cluster ends with the job"


def test_slurm_script_says_how_it_is_used() -> None:
    ran = subprocess.run([str(FILES / "slurm.sh")], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr[:6]) == (2, "usage:")


@pytest.mark.slow
def test_ray_cluster_file_is_one() -> None:
    """Ray's own check of the file, and of the options of the commands in it."""
    from ray.autoscaler._private.util import prepare_config, validate_config
    from ray.scripts.scripts import start

    config = prepare_config(yaml.safe_load((FILES / "ray-cluster.yaml").read_text()))
    validate_config(config)
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        words = shlex.split(config[key][-1])
        options = words[words.index("start") + 1 :]
        assert words[words.index("start") - 1] == "ray"
        start.make_context("start", options)
    health = re.findall(r"RAY_(health_check_\w+)=\d+", config["head_start_ray_commands"][-1])
    assert {f"RAY_{name}" for name in health} < clusters.VARIABLES.keys()


def job() -> dict[str, Any]:
    """The KubeRay job; its entrypoint is run in tests/test_cluster.py."""
    return yaml.safe_load((FILES / "kuberay-job.yaml").read_text())


def test_kuberay_job_is_of_a_piece() -> None:
    """Every container mounts what its pod has; head and workers run one image; the job reaches its own store."""
    found = job()
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayJob")
    cluster = found["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = set()
    for pod in (group["template"]["spec"] for group in pods):
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            images.add(container["image"])
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["resources"]["limits"] == container["resources"]["requests"]
    assert len(images) == 1
    assert pods[0]["rayStartParams"]["num-cpus"] == "0"
    words = shlex.split(found["spec"]["entrypoint"])
    store = words[words.index("--store") + 1]
    assert store.startswith(pods[0]["template"]["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] + "/")
    secrets = {env["name"] for env in pods[0]["template"]["spec"]["containers"][0]["env"]}
    assert secrets == {"MEMSWEEP_LEDGER"}
