#!/usr/bin/env bash
# Compute UniMax weights for SlimPajama's seven domains: uniform weights with at most four epochs of
# each domain. The paper does not include UniMax. Within 2.6 billion tokens no domain of SlimPajama
# is repeated, so UniMax equals Uniform; on smaller corpora the two differ. This script needs no
# training or GPU.
#
#   bash examples/baselines/unimax.sh
#   SIZE=tiny bash examples/baselines/unimax.sh       # smoke test on a small corpus
#   bash examples/baselines/unimax.sh -- --token-budget 300000000000
#
#   SIZE         size of the model to be trained with the weights (684m)
#   RUN          folder of the experiment (runs/slimpajama)
#   CORPUS       output of preprocess_data (RUN/1-corpus)
set -euo pipefail
SIZE=${SIZE:-684m}
source "$(dirname "$0")/../launch.sh"
RUN=${RUN:-runs/slimpajama}

choose base slimpajama_627b.sh
UNIMAX=(
  --max-epochs 4                 # assumed: Muennighoff et al. 2023; up to 4 epochs cost little
  --token-budget "$BUDGET"       # the base model's tokens
)
on_first_node python -m megatron_chameleon compute_mixture --method unimax --corpus "$CORPUS" \
  "${UNIMAX[@]}" --output "$RUN/4-mixture/unimax.json" "${EXTRA[@]}"
