#!/usr/bin/env bash
# Races attention schedules on this node, one of NUM_NODES, with ranks that torchrun starts: NCCL where there are GPUs,
# else gloo. Run it on every node at the same time:
#   NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=node0 RANKS_PER_NODE=8 scripts/torchrun/bench_operator.sh [OPTION ...]
#   NUM_NODES=2 NODE_RANK=1 MASTER_ADDR=node0 RANKS_PER_NODE=8 scripts/torchrun/bench_operator.sh [OPTION ...]
# One node needs RANKS_PER_NODE only, on GPUs one rank each. Options are those of `charm-megatron bench operator`; what
# they name must mean the same on all nodes. A node is a domain. Rank 0 prints and writes. All other variables: node.bash.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=node.bash
source "$(dirname "${BASH_SOURCE[0]}")/node.bash"

check_node
[[ -n ${RANKS_PER_NODE:-} ]] || fail "set RANKS_PER_NODE; on GPUs, to their number on a node"
exec "${torchrun[@]}" --nproc-per-node="$RANKS_PER_NODE" -m charm_megatron bench operator "$@"
