#!/usr/bin/env bash
# Write uniform weights for SlimPajama's seven domains: the baseline of the paper's tables, and the
# mixture of pretrain_684m.sh with MIXTURE=uniform. This script needs no training or GPU.
#
#   bash examples/baselines/uniform.sh
#   SIZE=tiny bash examples/baselines/uniform.sh      # smoke test on a small corpus
#   bash examples/baselines/uniform.sh -- --domains arxiv,book,c4
#
#   SIZE         size of the model to be trained with the weights (684m)
#   RUN          folder of the experiment (runs/slimpajama)
#   CORPUS       output of preprocess_data (RUN/1-corpus)
set -euo pipefail
SIZE=${SIZE:-684m}
source "$(dirname "$0")/../launch.sh"
RUN=${RUN:-runs/slimpajama}

choose base slimpajama_627b.sh
on_first_node python -m megatron_chameleon compute_mixture --method uniform --corpus "$CORPUS" \
  --token-budget "$BUDGET" --output "$RUN/4-mixture/uniform.json" "${EXTRA[@]}"
