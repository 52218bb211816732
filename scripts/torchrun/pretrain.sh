#!/usr/bin/env bash
# Pretrains on this node, one of NUM_NODES, with ranks that torchrun starts. Run it on every node at the same time:
#   NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=node0 scripts/torchrun/pretrain.sh CONFIG OUT [OPTION ...]
#   NUM_NODES=2 NODE_RANK=1 MASTER_ADDR=node0 scripts/torchrun/pretrain.sh CONFIG OUT [OPTION ...]
# One node needs no variables. OUT is the run folder, on a file system that all nodes share. Options are those of
# `charm-megatron pretrain`. SIGUSR1, once training has begun, saves a checkpoint and ends all
# ranks of all nodes with code 0.
#   NUM_NODES       1 if not set
#   NODE_RANK       this node, 0 to NUM_NODES - 1; ranks are numbered node by node, so that a node is a domain
#   MASTER_ADDR     name or address of node 0, as the other nodes know it
#   MASTER_PORT     a free port there
#   RANKS_PER_NODE  launch.ranks of CONFIG / NUM_NODES if not set
#   PYTHON          .venv/bin/python, as scripts/setup makes it, if not set
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

fail() {
  echo "scripts/torchrun/pretrain.sh: $*" >&2
  exit 2
}

[[ $# -ge 2 && $1 != -* && $2 != -* ]] || fail "usage: scripts/torchrun/pretrain.sh CONFIG OUT [OPTION ...]"
config=$1 out=$2
shift 2
num_nodes=${NUM_NODES:-1}
python=${PYTHON:-$root/.venv/bin/python}
[[ -x $(command -v "$python") ]] || fail "there is no $python; run scripts/setup first, or set PYTHON"
if ((num_nodes > 1)); then
  [[ -n ${NODE_RANK:-} && -n ${MASTER_ADDR:-} ]] || fail "NUM_NODES is $num_nodes: set NODE_RANK and MASTER_ADDR"
fi

# Prints launch.ranks of the configuration. Runs in the same Python as the ranks, which a container may bring along.
configured_ranks() {
  "$python" - "$config" "$@" <<'PYTHON'
import sys
from pathlib import Path

from charm_megatron.config import load_run_config
from charm_megatron.errors import CharmError

config, *options = sys.argv[1:]
settings = [value for option, value in zip(options, options[1:]) if option == "--set"]
try:
    print(load_run_config(Path(config), settings).launch.ranks)
except CharmError as error:
    sys.exit(f"error: {error}")
PYTHON
}

export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
if [[ -z ${RANKS_PER_NODE:-} ]]; then
  ranks=$(configured_ranks "$@")
  ((ranks % num_nodes == 0)) || fail "launch.ranks $ranks of $config does not split evenly over $num_nodes nodes"
  RANKS_PER_NODE=$((ranks / num_nodes))
fi

# Megatron wants compute and communication queued in the order of their launches on GPUs before Blackwell; with more
# hardware queues, a transfer posted first may start after the attention that was to hide it.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# NCCL says nothing by default, also where it falls back from InfiniBand to sockets.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# torch starts as many threads a rank as there are cores; ranks that share a node would fight for them.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Not set here, for they depend on the site: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME where a node has more than one
# network and the first is not the one that connects nodes; NCCL_IB_HCA where some adapters are for storage.

# Megatron's handler, told of the signal that SLURM sends ahead of the end of a job's time: ranks agree in each iteration
# whether one of them has seen it, save, and end.
#
# Static rendezvous: node and rank numbers are those given here. torchrun's default numbers nodes as they come.
# SIGUSR1 would end torchrun, and a rank before Megatron has its handler: both start with it ignored. srun sends it to
# every process of a step, other senders only to this one.
(
  trap '' USR1
  exec "$python" -m torch.distributed.run \
    --nnodes="$num_nodes" --node-rank="${NODE_RANK:-0}" --nproc-per-node="$RANKS_PER_NODE" \
    --rdzv-backend=static --master-addr="${MASTER_ADDR:-127.0.0.1}" --master-port="${MASTER_PORT:-29500}" \
    --rdzv-conf=timeout="${RENDEZVOUS_TIMEOUT_S:-300}" --max-restarts=0 \
    -m charm_megatron pretrain "$config" --out "$out" \
    --set megatron.exit_signal_handler=true --set megatron.exit_signal=SIGUSR1 "$@"
) &
agent=$!

# shellcheck disable=SC2329 # the trap calls it
pass_on_usr1() {
  local rank
  for rank in $(<"/proc/$agent/task/$agent/children"); do
    kill -USR1 "$rank" || true
  done
}
trap pass_on_usr1 USR1
trap 'kill -TERM "$agent"' TERM INT

# A trapped signal ends `wait` early.
while kill -0 "$agent" 2>/dev/null; do
  wait "$agent" && code=0 || code=$?
done
exit "$code"
