# shellcheck shell=bash
# What the jobs of this folder share; sourced in the repository's root. Gives `run_ranks`, and the environment that
# scripts/torchrun/node.bash reads.

# The first node of the list, as nodes call each other: srun numbers tasks in the list's order, so it has rank 0.
# Not a MASTER_ADDR from the submitting shell: sbatch passes its environment on, and 127.0.0.1 is another machine
# on every node.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Two jobs on one node must not meet. Ports below 32768 are none that the kernel gives out.
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT NUM_NODES=$SLURM_NNODES
if [[ -n ${SLURM_GPUS_ON_NODE:-} ]]; then
  export RANKS_PER_NODE=$SLURM_GPUS_ON_NODE
fi

# Container (pyxis and enroot): CHARM_CONTAINER=nvcr.io#nvidia/pytorch:26.06-py3 sbatch ..., whose python3 needs
# what pyproject.toml lists, and megatron-core to pretrain; torch and Transformer Engine are its own. CHARM_MOUNTS adds
# to the one mount, of the repository.
container=()
if [[ -n ${CHARM_CONTAINER:-} ]]; then
  container=(--container-image="$CHARM_CONTAINER" --container-workdir="$PWD"
    --container-mounts="$PWD:$PWD${CHARM_MOUNTS:+,$CHARM_MOUNTS}")
  export PYTHON=${PYTHON:-python3}
fi

# Starts a script of scripts/torchrun once a node. SLURM_NODEID is known only on the node. --export=ALL also where the
# job was submitted with less, since srun would pass on no more than that. --kill-on-bad-exit: ranks of the other nodes
# would wait for the dead until their timeout. --cpus-per-task: a step has one core a task if not told otherwise, and one
# task has all ranks of a node. In the background, srun itself must be $!: hence exec.
run_ranks() {
  # shellcheck disable=SC2016
  exec srun --export=ALL --kill-on-bad-exit=1 ${SLURM_CPUS_ON_NODE:+--cpus-per-task=$SLURM_CPUS_ON_NODE} "${container[@]}" \
    bash -c 'NODE_RANK=$SLURM_NODEID exec "$0" "$@"' "$@"
}
