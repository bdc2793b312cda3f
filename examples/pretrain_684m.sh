#!/usr/bin/env bash
# Train a 684M base model on SlimPajama. Each MIXTURE is a column of the paper's tables of
# perplexity and of downstream accuracy (section "Universal Generalization").
#
#   bash examples/pretrain_684m.sh                      # with Chameleon's weights
#   MIXTURE=uniform bash examples/pretrain_684m.sh      # the baseline
#   SIZE=tiny bash examples/pretrain_684m.sh            # smoke test on 2 CPU ranks
#   bash examples/pretrain_684m.sh -- --train-iters 20000 --micro-batch-size 4
#
# The same command resumes an interrupted run. To run on many nodes under SLURM, use
# examples/slurm/pretrain.sbatch.
#
#   SIZE         model size (684m)
#   RUN          folder of the experiment (runs/slimpajama)
#   CORPUS       output of preprocess_data (RUN/1-corpus)
#   MIXTURE      uniform, or a name in RUN/4-mixture, or a file
#                (chameleon-pretrain)
set -euo pipefail
SIZE=${SIZE:-684m}
source "$(dirname "$0")/launch.sh"
RUN=${RUN:-runs/slimpajama}
MIXTURE=${MIXTURE:-chameleon-pretrain}

choose base slimpajama_627b.sh
mixture "$MIXTURE"
limit_time
exec torchrun "${RANKS[@]}" -m megatron_chameleon pretrain_gpt "${TRAIN[@]}" "${LIMIT[@]}" \
  --mixture "$WEIGHTS" --run-dir "$RUN/5-base/$NAME-seed$SEED" "${EXTRA[@]}"
