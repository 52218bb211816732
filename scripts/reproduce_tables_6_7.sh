#!/usr/bin/env bash
# Tables 6 and 7 of the CHARM+ paper on GPUs of your own: each row with the schedules ring and charm.
# Usage: scripts/reproduce_tables_6_7.sh print  | submit | show  [SBATCH OPTION ...]
#   print   the commands, for 2 nodes of 8 GPUs (the default)
#   submit  the same, submitted; options go to sbatch, such as --partition=h100
#   show    milliseconds of an iteration, from run folders that are there, beside the paper's
# `ring` is this package's ring, executed as charm is. The paper's ring is that of Transformer Engine in Table 7.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mode=${1:-print}
shift || true
runs=runs/tables_6_7

# Prints "file variant" of every row.
rows() {
  local file
  for file in gpt_350m gpt_1_3b; do
    sed -nE "s/^  (table_[67]_[0-9]+x[0-9]+):.*/$file \1/p" "configs/run/$file.yaml"
  done
}

commands() {
  local file variant schedule
  while read -r file variant; do
    for schedule in ring charm; do
      printf 'CHARM_OUT=%s sbatch --nodes=2 --gpus-per-node=8 --job-name=%s' \
        "$runs/$file-$variant-$schedule" "$file-$variant-$schedule"
      if (($#)); then printf ' %q' "$@"; fi
      printf ' scripts/slurm/pretrain.sbatch configs/run/%s.yaml --set variant=%s --set charm.schedule=%s\n' \
        "$file" "$variant" "$schedule"
    done
  done < <(rows)
}

case $mode in
  print) commands "$@" ;;
  submit)
    while read -r command; do
      echo "$command"
      bash -c "$command"
    done < <(commands "$@")
    ;;
  show) exec "${PYTHON:-.venv/bin/python}" -m charm_megatron bench tables-6-7 "$runs" ;;
  *)
    echo "usage: scripts/reproduce_tables_6_7.sh print | submit | show [SBATCH OPTION ...]" >&2
    exit 2
    ;;
esac
