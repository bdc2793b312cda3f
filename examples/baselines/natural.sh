#!/usr/bin/env bash
# Write natural weights: each of SlimPajama's domains is weighted by its share of the tokens. This is
# a common baseline that the paper does not include. This script needs no training or GPU.
#
#   bash examples/baselines/natural.sh
#   SIZE=tiny bash examples/baselines/natural.sh      # smoke test on a small corpus
#   bash examples/baselines/natural.sh -- --temperature 2
#
#   SIZE         size of the model to be trained with the weights (684m)
#   RUN          folder of the experiment (runs/slimpajama)
#   CORPUS       output of preprocess_data (RUN/1-corpus)
set -euo pipefail
SIZE=${SIZE:-684m}
source "$(dirname "$0")/../launch.sh"
RUN=${RUN:-runs/slimpajama}

choose base slimpajama_627b.sh
NATURAL=(
  --temperature 1                # assumed: weights proportional to tokens
  --token-budget "$BUDGET"       # the base model's tokens
)
on_first_node python -m megatron_chameleon compute_mixture --method natural --corpus "$CORPUS" \
  "${NATURAL[@]}" --output "$RUN/4-mixture/natural.json" "${EXTRA[@]}"
