#!/usr/bin/env bash
# Train a 684M base model on the 17 domains of the Pile, in batches of 512. Each MIXTURE is a column
# of the paper's tables for the Pile (section "Scalable to Pile"). examples/transfer_pile.sh computes
# the weights with the proxy of SlimPajama.
#
#   bash examples/pretrain_684m_pile.sh                      # with Chameleon's weights
#   MIXTURE=uniform bash examples/pretrain_684m_pile.sh      # not in the paper's tables
#   SIZE=tiny bash examples/pretrain_684m_pile.sh            # smoke test on 2 CPU ranks
#   bash examples/pretrain_684m_pile.sh -- --train-iters 20000 --micro-batch-size 4
#
# The same command resumes an interrupted run. To run on many nodes under SLURM, use
# examples/slurm/pretrain.sbatch.
#
#   SIZE         model size (684m)
#   RUN          folder of the experiment (runs/pile)
#   CORPUS       output of preprocess_data (RUN/1-corpus)
#   MIXTURE      uniform, or a name in RUN/4-mixture, or a file (chameleon-pretrain)
set -euo pipefail
SIZE=${SIZE:-684m}
source "$(dirname "$0")/launch.sh"
RUN=${RUN:-runs/pile}
MIXTURE=${MIXTURE:-chameleon-pretrain}

choose base-pile pile.sh
mixture "$MIXTURE"
limit_time
exec torchrun "${RANKS[@]}" -m megatron_chameleon pretrain_gpt "${TRAIN[@]}" "${LIMIT[@]}" \
  --mixture "$WEIGHTS" --run-dir "$RUN/5-base/$NAME-seed$SEED" "${EXTRA[@]}"
