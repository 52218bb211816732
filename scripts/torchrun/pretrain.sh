#!/usr/bin/env bash
# Pretrains on this node, one of NUM_NODES, with ranks that torchrun starts. Run it on every node at the same time:
#   NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=node0 scripts/torchrun/pretrain.sh CONFIG OUT [OPTION ...]
#   NUM_NODES=2 NODE_RANK=1 MASTER_ADDR=node0 scripts/torchrun/pretrain.sh CONFIG OUT [OPTION ...]
# One node needs no variables. OUT is the run folder, on a file system that all nodes share. Options are those of
# `charm-megatron pretrain`. SIGUSR1, once training has begun, saves a checkpoint and ends all
# ranks of all nodes with code 0.
# RANKS_PER_NODE is launch.ranks of CONFIG / NUM_NODES if not set. All other variables: node.bash.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=node.bash
source "$(dirname "${BASH_SOURCE[0]}")/node.bash"

[[ $# -ge 2 && $1 != -* && $2 != -* ]] || fail "usage: scripts/torchrun/pretrain.sh CONFIG OUT [OPTION ...]"
config=$1 out=$2
shift 2
check_node

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

if [[ -z ${RANKS_PER_NODE:-} ]]; then
  ranks=$(configured_ranks "$@")
  ((ranks % num_nodes == 0)) || fail "launch.ranks $ranks of $config does not split evenly over $num_nodes nodes"
  RANKS_PER_NODE=$((ranks / num_nodes))
fi

# Megatron's handler, told of the signal that SLURM sends ahead of the end of a job's time: ranks agree in each iteration
# whether one of them has seen it, save, and end.
#
# SIGUSR1 would end torchrun, and a rank before Megatron has its handler: both start with it ignored. srun sends it to
# every process of a step, other senders only to this one.
(
  trap '' USR1
  exec "${torchrun[@]}" --nproc-per-node="$RANKS_PER_NODE" \
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
