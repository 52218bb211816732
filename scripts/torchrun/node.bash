# shellcheck shell=bash
# What the scripts of this folder share: this node's part of a job of torchrun. Sourced.
# Gives `fail`, `check_node`, `python`, `num_nodes`, the array `torchrun`, and the environment of the ranks; reads
#   NUM_NODES       1 if not set
#   NODE_RANK       this node, 0 to NUM_NODES - 1; ranks are numbered node by node, so that a node is a domain
#   MASTER_ADDR     name or address of node 0, as the other nodes know it
#   MASTER_PORT     a free port there
#   PYTHON          .venv/bin/python, as scripts/setup makes it, if not set
#   RENDEZVOUS_TIMEOUT_S  how long nodes wait for each other; 300 if not set
#   NUMA_BINDING    which cores a rank runs on, with GPUs: node, socket, exclusive or core-complex; node if not set
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

fail() {
  echo "scripts/torchrun/${0##*/}: $*" >&2
  exit 2
}

num_nodes=${NUM_NODES:-1}
python=${PYTHON:-$root/.venv/bin/python}

check_node() {
  [[ -x $(command -v "$python") ]] || fail "there is no $python; run scripts/setup first, or set PYTHON"
  if ((num_nodes > 1)); then
    [[ -n ${NODE_RANK:-} && -n ${MASTER_ADDR:-} ]] || fail "NUM_NODES is $num_nodes: set NODE_RANK and MASTER_ADDR"
  fi
}

export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
# NCCL says nothing by default, also where it falls back from InfiniBand to sockets.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# torch starts as many threads a rank as there are cores; ranks that share a node would fight for them.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Not set here, for they depend on the site: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME where a node has more than one
# network and the first is not the one that connects nodes; NCCL_IB_HCA where some adapters are for storage.

# Static rendezvous: node and rank numbers are those given here. torchrun's default numbers nodes as they come.
# shellcheck disable=SC2034 # for those that source this
torchrun=("$python" -m torch.distributed.run
  --nnodes="$num_nodes" --node-rank="${NODE_RANK:-0}"
  --rdzv-backend=static --master-addr="${MASTER_ADDR:-127.0.0.1}" --master-port="${MASTER_PORT:-29500}"
  --rdzv-conf=timeout="${RENDEZVOUS_TIMEOUT_S:-300}" --max-restarts=0)
# Ranks run on the cores near their GPUs.
if nvidia-smi -L >/dev/null 2>&1; then
  torchrun+=(--numa-binding="${NUMA_BINDING:-node}")
fi
