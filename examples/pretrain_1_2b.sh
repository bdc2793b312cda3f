#!/usr/bin/env bash
# Train a 1.2B base model on SlimPajama. Each MIXTURE is a column of the paper's tables for 1.2B,
# which show that the weights of an 82M proxy are also good for a larger model ("Scale to 1.2B
# model").
#
#   bash examples/pretrain_1_2b.sh                      # with Chameleon's weights
#   MIXTURE=uniform bash examples/pretrain_1_2b.sh      # the baseline
#   SIZE=tiny bash examples/pretrain_1_2b.sh            # smoke test on 2 CPU ranks
#   bash examples/pretrain_1_2b.sh -- --train-iters 20000 --micro-batch-size 4
#
# The same command resumes an interrupted run. To run on many nodes under SLURM, use
# examples/slurm/pretrain.sbatch.
#
#   SIZE         model size (1.2b)
#   RUN          folder of the experiment (runs/slimpajama-1.2b)
#   CORPUS       output of preprocess_data (runs/slimpajama/1-corpus)
#   MIXTURE      uniform, or a name in RUN/4-mixture, or a file
#                (runs/slimpajama/4-mixture/chameleon-pretrain.json)
set -euo pipefail
SIZE=${SIZE:-1.2b}
source "$(dirname "$0")/launch.sh"
RUN=${RUN:-runs/slimpajama-1.2b}
CORPUS=${CORPUS:-runs/slimpajama/1-corpus}
MIXTURE=${MIXTURE:-runs/slimpajama/4-mixture/chameleon-pretrain.json}

choose base slimpajama_627b.sh
mixture "$MIXTURE"
limit_time
exec torchrun "${RANKS[@]}" -m megatron_chameleon pretrain_gpt "${TRAIN[@]}" "${LIMIT[@]}" \
  --mixture "$WEIGHTS" --run-dir "$RUN/5-base/$NAME-seed$SEED" "${EXTRA[@]}"
