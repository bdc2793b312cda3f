#!/usr/bin/env bash
# Compute a mixture of SlimPajama by Data Mixing Laws, at the cost that Chameleon's paper counts
# (appendix, "Additional baseline"): train proxies of four sizes on 20 mixtures each, extrapolate
# their losses to the base model's size, and fit laws over mixtures to the extrapolated losses. The
# cost is hundreds of times that of Chameleon.
#
#   bash examples/baselines/mixing_laws.sh                # on every GPU of this machine
#   SIZE=tiny bash examples/baselines/mixing_laws.sh      # smoke test on 2 CPU ranks
#   bash examples/baselines/mixing_laws.sh -- --max-extrapolation 0
#
# --accept-uncertain trains the proxies whatever gain MixMin predicts: the baseline is the method itself.
#
# The same command resumes after an interruption. The proxies are in RUN/4-mixture/mixing-laws.
#
#   SIZE         size of the model to be trained with the weights (684m)
#   RUN          folder of the experiment (runs/slimpajama)
#   CORPUS       output of preprocess_data (RUN/1-corpus)
set -euo pipefail
SIZE=${SIZE:-684m}
source "$(dirname "$0")/../launch.sh"
RUN=${RUN:-runs/slimpajama}

LAWS=(
  --num-proxies 20                     # paper: appendix, "20 separate mixtures"
  --models 60m 82m 124m 210m           # assumed: the paper says only "4 different proxy sizes"
  --target-model "$SIZE"               # assumed: the base model
  --train-iters 10000                  # assumed: the FLOPs per run of DoReMi's proxy
  --seq-length 1024                    # assumed: from the paper's FLOPs
  --global-batch-size 128              # paper: experimental setup
  --lr 5e-4                            # paper: table of architectures
  --min-lr 1e-4                        # paper: table of architectures
  --lr-decay-style cosine              # paper: experimental setup
  --lr-warmup-iters 500                # assumed: the baselines' code
  --weight-decay 0.01                  # paper: experimental setup
  --clip-grad 1.0                      # paper: experimental setup
  --bf16                               # assumed: usual on the paper's H100
)
if [ "$SIZE" = tiny ]; then
  LAWS+=(
    --num-proxies 8                    # tiny: seconds
    --models nano regmix-1m tiny       # tiny: seconds
    --target-model mini                # tiny: the next larger size
    --train-iters 6                    # tiny: seconds
    --seq-length 64                    # tiny: seconds
    --global-batch-size 8              # tiny: seconds
    --lr 1e-2                          # tiny: learns in a few steps
    --min-lr 1e-3                      # tiny: a tenth
    --lr-warmup-iters 2                # tiny: must be smaller than --train-iters
    --eval-tokens 512                  # tiny: seconds
    --smallest-weight 0.02             # tiny: a corpus of three domains has few mixtures
    --no-bf16                          # tiny: slow on CPUs
  )
fi

choose base slimpajama_627b.sh
limit_time
exec torchrun "${RANKS[@]}" -m megatron_chameleon compute_mixture --method mixing-laws --corpus "$CORPUS" \
  "${LAWS[@]}" --seed "$SEED" "${LIMIT[@]}" --accept-uncertain --token-budget "$BUDGET" \
  --output "$RUN/4-mixture/mixing-laws.json" "${EXTRA[@]}"
