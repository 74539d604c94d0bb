#!/usr/bin/env bash
# One sweep on several Slurm nodes: a Ray cluster for the length of the job, and a launch on it.
#
#   sbatch --nodes=4 slurm.sh specs/capacity.yaml --store /shared/runs
#
# What follows the script's name goes to `sweep launch`. The store has to be on a file system that all nodes mount, and
# its ledger elsewhere if that is NFS or Lustre (MEMSWEEP_LEDGER; see README.md beside this file). Submit again to go
# on: what is done stays done. Run it in the environment in which `sweep` and `ray` are (module load, conda activate).
#SBATCH --job-name=memsweep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=memsweep-%j.log
# On a cluster with GPUs, also: --gpus-per-node=4
# Five minutes before the time is up the launch is told to stop at a checkpoint, and submitting again goes on there.
#SBATCH --signal=B:TERM@300
set -euo pipefail

[ $# -gt 0 ] || { echo "usage: sbatch [OPTIONS] slurm.sh SPEC [OPTIONS OF sweep launch]" >&2; exit 2; }
nodes=${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}
cpus=${SLURM_CPUS_PER_TASK:-1}
gpus=${SLURM_GPUS_ON_NODE:-0}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ip=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 10000)) # two jobs may share a node
address=$ip:$port

# Others share these nodes and their network: only who knows this job's word may run code on its cluster.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN
export RAY_USAGE_STATS_ENABLED=0
unset RAY_ADDRESS # of another cluster

steps=()
launch=
finish() {
  trap - EXIT TERM INT
  [ ${#steps[@]} -eq 0 ] || kill "${steps[@]}" 2>/dev/null || true
  wait || true
}
trap finish EXIT
trap '[ -z "$launch" ] || kill -TERM "$launch"' TERM INT

serve() { # the nodes' part of the cluster, until the job ends: srun's options, --, ray's options
  local where=()
  while [ "$1" != -- ]; do where+=("$1"); shift; done
  shift
  srun "${where[@]}" --cpus-per-task="$cpus" \
    ray start --block --num-cpus="$cpus" --num-gpus="$gpus" --disable-usage-stats "$@" >/dev/null &
  steps+=($!)
}

serve --nodes=1 --ntasks=1 --nodelist="$head" -- --head --node-ip-address="$ip" --port="$port" --include-dashboard=false
if [ "$nodes" -gt 1 ]; then
  serve --nodes=$((nodes - 1)) --ntasks=$((nodes - 1)) --exclude="$head" -- --address="$address"
fi

# A launch counts the nodes that are there, so wait for all; go on without those that take more than three minutes.
python3 - "$address" "$nodes" <<'PYTHON'
import sys
import time

address, wanted = sys.argv[1], int(sys.argv[2])
end = time.monotonic() + 180
found = 0
import ray

while found < wanted and time.monotonic() < end:
    try:
        if not ray.is_initialized():
            ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        found = sum(node["Alive"] for node in ray.nodes())
    except Exception as error:  # the head node is not up yet
        found, last = 0, error
    time.sleep(1)
if not found:
    sys.exit(f"no Ray cluster came up at {address}: {last}")
print(f"{found} of {wanted} nodes at {address}", flush=True)
PYTHON

sweep launch "$@" --address "$address" &
launch=$!
code=0
wait "$launch" || code=$?
while kill -0 "$launch" 2>/dev/null; do # a signal ends `wait`, and the launch is still on its way to a checkpoint
  code=0
  wait "$launch" || code=$?
done
exit "$code"
