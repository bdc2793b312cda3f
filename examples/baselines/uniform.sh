#!/usr/bin/env bash
# Uniform weights for SlimPajama's seven domains: the baseline of the paper's tables, and what
# pretrain_684m.sh trains by with MIXTURE=uniform. Nothing is trained, and no GPU is needed.
#
#   bash examples/baselines/uniform.sh
#   SIZE=tiny bash examples/baselines/uniform.sh      # tries it out on a small corpus
#   bash examples/baselines/uniform.sh -- --domains arxiv,book,c4
#
#   SIZE         of the model that will be trained by it (684m)
#   RUN          folder of the experiment (runs/slimpajama)
#   CORPUS       what tools/preprocess_data.py made (RUN/1-corpus)
set -euo pipefail
SIZE=${SIZE:-684m}
source "$(dirname "$0")/../launch.sh"
RUN=${RUN:-runs/slimpajama}
CORPUS=${CORPUS:-$RUN/1-corpus}

UNIFORM=(
  --token-budget 1310720000      # assumed: the base model's 10,000 steps of 128 x 1024 tokens
)
if [ "$SIZE" = tiny ]; then
  UNIFORM+=(
    --token-budget 6144          # tiny: 12 steps of 8 x 64 tokens
  )
fi

choose base slimpajama_627b.sh
on_first_node python "$TOOLS/compute_mixture.py" --method uniform --corpus "$CORPUS" \
  "${UNIFORM[@]}" --output "$RUN/4-mixture/uniform.json" "${EXTRA[@]}"
