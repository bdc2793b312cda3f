#!/usr/bin/env bash
# Train a 124M proxy on SlimPajama. The paper's ablation shows that the weights hardly depend on the
# proxy's size (appendix, "Stable domain weights").
#
#   bash examples/pretrain_124m_proxy.sh                 # on every GPU of this machine
#   SIZE=tiny bash examples/pretrain_124m_proxy.sh       # smoke test on 2 CPU ranks
#   bash examples/pretrain_124m_proxy.sh -- --train-iters 5000 --micro-batch-size 16
#
# The same command resumes an interrupted run. Then compute the weights:
#   torchrun -m megatron_chameleon compute_mixture --corpus runs/slimpajama/1-corpus \
#     --checkpoint runs/slimpajama/2-proxy/124m-seed1 --store runs/slimpajama/3-embeddings/124m \
#     --output runs/slimpajama/4-mixture/chameleon-124m.json
#
#   SIZE         model size (124m)
#   RUN          folder of the experiment (runs/slimpajama)
#   CORPUS       output of preprocess_data (RUN/1-corpus)
#   MIXTURE      uniform, as in the paper, or a name in RUN/4-mixture, or a file (uniform)
set -euo pipefail
SIZE=${SIZE:-124m}
source "$(dirname "$0")/launch.sh"
RUN=${RUN:-runs/slimpajama}
MIXTURE=${MIXTURE:-uniform}

choose proxy slimpajama_627b.sh
mixture "$MIXTURE"
limit_time
exec torchrun "${RANKS[@]}" -m megatron_chameleon pretrain_gpt "${TRAIN[@]}" "${LIMIT[@]}" \
  --mixture "$WEIGHTS" --run-dir "$RUN/2-proxy/$SIZE-seed$SEED" "${EXTRA[@]}"
