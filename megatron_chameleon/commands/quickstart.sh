#!/usr/bin/env bash
# Run the whole pipeline on real text, in a few minutes on two CPU cores: text -> tokens -> proxy ->
# mixture -> two models -> perplexity -> tables and figures. Each step runs an ordinary command.
# `megatron-chameleon quickstart` runs this script.
# After an interruption, run this script again: finished steps are skipped, stored embeddings are
# reused, and an unfinished training run starts from scratch. Use another RUN for other settings.
set -euo pipefail

RUN=${RUN:-runs/quickstart}            # output folder
SIZE=${SIZE:-nano}                     # model size of the proxy and the two models
PROXY_STEPS=${PROXY_STEPS:-500}
BASE_STEPS=${BASE_STEPS:-650}
WARMUP=${WARMUP:-160}                  # must be less than the numbers of steps
SEED=${SEED:-1}

export OMP_NUM_THREADS=1               # one thread per process, since two processes run at a time
export CUDA_VISIBLE_DEVICES=           # CPU only: one GPU could not hold both ranks
export TORCHDYNAMO_DISABLE=1           # do not import TorchInductor: saves a second per process
CORPUS=$RUN/1-corpus
PROXY=$RUN/2-proxy/$SIZE-seed$SEED
STORE=$RUN/3-embeddings
MIXTURES=$RUN/4-mixture
TRAIN=(--corpus "$CORPUS" --model "$SIZE" --seed "$SEED" --seq-length 128
  --global-batch-size 8 --micro-batch-size 4 --lr 4e-3 --min-lr 1e-3 --lr-warmup-iters "$WARMUP"
  --adam-beta2 0.99 --log-interval 50 --save-interval 1000)

say() { printf '\n== %s\n' "$*"; }
PYTHON=${PYTHON:-python}
megatron-chameleon() { "$PYTHON" -m megatron_chameleon "$@"; }
torchrun() { "$PYTHON" -m torch.distributed.run --standalone "$@"; }
RANKS=(--nproc-per-node 2 -m megatron_chameleon)

say "1/7 Text from the installed packages"
[ -e "$RUN/text/gathered.json" ] ||
  megatron-chameleon gather_installed_text --output-dir "$RUN/text" --max-bytes-per-domain 3500000
INPUT=()
for file in "$RUN"/text/*.jsonl; do
  name=${file##*/}
  INPUT+=(--input "${name%.jsonl}=$file")
done

say "2/7 Tokenizer and corpus"
[ -e "$RUN/tokenizer.json" ] ||
  megatron-chameleon train_tokenizer "${INPUT[@]}" --output "$RUN/tokenizer.json" --vocab-size 8192
[ -e "$CORPUS/corpus.json" ] ||
  megatron-chameleon preprocess_data "${INPUT[@]}" --output "$CORPUS" \
    --tokenizer-model "$RUN/tokenizer.json" --split 80,10,10 --min-tokens-per-split 2000

say "3/7 Proxy, uniform weights, tensor parallel over 2 ranks"
torchrun "${RANKS[@]}" pretrain_gpt "${TRAIN[@]}" --mixture uniform --run-dir "$PROXY" \
  --train-iters "$PROXY_STEPS" --tensor-model-parallel-size 2

say "4/7 Domain embeddings and Chameleon weights"
MIX=(--corpus "$CORPUS" --checkpoint "$PROXY" --store "$STORE" --num-windows 512)
torchrun "${RANKS[@]}" compute_mixture "${MIX[@]}" --mode pretrain --tensor-model-parallel-size 2 \
  --output "$MIXTURES/chameleon-pretrain.json" --token-budget $((BASE_STEPS * 8 * 128))
# The embeddings are stored, so that the second mode needs no forward pass.
megatron-chameleon compute_mixture "${MIX[@]}" --mode finetune \
  --output "$MIXTURES/chameleon-finetune.json"

say "5/7 Two models that differ only in their mixture, trained concurrently on one rank each"
BASE=("$PYTHON" -m megatron_chameleon pretrain_gpt "${TRAIN[@]}" --train-iters "$BASE_STEPS")
mkdir -p "$RUN/logs"
LOG=$RUN/logs/chameleon-pretrain-seed$SEED.log
"${BASE[@]}" --mixture "$MIXTURES/chameleon-pretrain.json" \
  --run-dir "$RUN/5-base/chameleon-pretrain-seed$SEED" > "$LOG" 2>&1 &
trap 'kill $! 2> /dev/null || true' EXIT   # Ctrl-C does not reach a background process
echo "The model trained with Chameleon's weights logs to $LOG."
"${BASE[@]}" --mixture uniform --run-dir "$RUN/5-base/uniform-seed$SEED"
wait $! || { tail -n 3 "$LOG" >&2; exit 1; }

say "6/7 Held-out perplexity"
torchrun "${RANKS[@]}" evaluate perplexity --corpus "$CORPUS" --max-tokens 25000 \
  --checkpoint "$RUN/5-base/uniform-seed$SEED" \
  --output "$RUN/6-evaluation/uniform-seed$SEED.json" \
  --checkpoint "$RUN/5-base/chameleon-pretrain-seed$SEED" \
  --output "$RUN/6-evaluation/chameleon-pretrain-seed$SEED.json"

say "7/7 Tables and figures"
megatron-chameleon make_report "$RUN"

say "Written to $RUN"
cat << END
  1-corpus      the text as tokens, in named domains
  2-proxy       the proxy model, trained with uniform weights
  4-mixture     Chameleon's weights: chameleon-pretrain.json, chameleon-finetune.json
  5-base        two models, trained with uniform and with Chameleon's weights
  7-report      report.html: tables and figures

Next, weights for your own text, from a Hugging Face model or a run such as $PROXY:
  megatron-chameleon compute_mixture --input NAME=PATH --input NAME=PATH ... \\
    --checkpoint MODEL --output mixture.json
megatron-chameleon --help lists the other commands.
END
