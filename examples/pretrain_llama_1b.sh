#!/usr/bin/env bash
# Pretrain a model of the shape of Llama 3.2 1B on SlimPajama, with uniform and with Chameleon's
# weights.
#
#   bash examples/pretrain_llama_1b.sh                      # on every GPU of this machine
#   SIZE=tiny bash examples/pretrain_llama_1b.sh            # smoke test on 2 CPU ranks
#   bash examples/pretrain_llama_1b.sh -- --train-iters 5000 --lr-warmup-iters 500
#
# The stages are: proxy, embeddings and weights, one run per mixture, evaluation, report. The report
# is printed at the end. The same command resumes after an interruption. Flags after -- apply to the
# runs with a mixture, not to the proxy. Corpora of your own: examples/data/, docs/corpus.md.
#
#   SIZE         model size (llama-1b)
#   PROXY_SIZE   model size of the proxy (llama-30m)
#   RUN          folder of the experiment (runs/llama-1b)
#   CORPUS       output of preprocess_data or import_corpus (runs/slimpajama/1-corpus)
#   MIXTURE      mixtures to train with: uniform, names in RUN/4-mixture, or files
#                ("uniform chameleon-pretrain")
set -euo pipefail
SIZE=${SIZE:-llama-1b}
source "$(dirname "$0")/launch.sh"
PROXY_SIZE=${PROXY_SIZE:-llama-30m}
RUN=${RUN:-runs/llama-1b}
CORPUS=${CORPUS:-runs/slimpajama/1-corpus}
MIXTURE=${MIXTURE:-uniform chameleon-pretrain}

source "$HERE/compare_mixtures.sh"
pretrain_and_compare slimpajama_627b.sh
