#!/usr/bin/env bash
# Run the whole pipeline on real text, in a few minutes on two CPU cores: text -> tokens -> mixtures ->
# three models -> perplexity -> tables and figures. One domain is the target: what the model should
# be good at. It is not trained on. Each step runs an ordinary command.
# `megatron-chameleon quickstart` runs this script.
# After an interruption, run this script again: finished steps are skipped, stored embeddings are
# reused, and an unfinished training run starts from scratch. Use another RUN for other settings.
set -euo pipefail

RUN=${RUN:-runs/quickstart}            # output folder
TARGET=${TARGET:-reference_prose}      # the domain that is held out as the target
SIZE=${SIZE:-nano}                     # size of the proxy and the models
STEPS=${STEPS:-400}                    # of the proxy and the models
WARMUP=${WARMUP:-160}                  # must be less than the number of steps
SEED=${SEED:-1}

export OMP_NUM_THREADS=1               # one thread per process, since two processes run at a time
export CUDA_VISIBLE_DEVICES=           # CPU only: one GPU could not hold both ranks
export TORCHDYNAMO_DISABLE=1           # do not import TorchInductor: saves a second per process
CORPUS=$RUN/1-corpus
PROXY=$RUN/2-proxy/$SIZE-seed$SEED
STORE=$RUN/3-embeddings
MIXTURES=$RUN/4-mixture
BUDGET=$((STEPS * 8 * 128))       # training tokens of each model
TRAIN=(--corpus "$CORPUS" --model "$SIZE" --train-iters "$STEPS" --seed "$SEED" --seq-length 128
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
  [ "$name" = "$TARGET.jsonl" ] || INPUT+=(--input "${name%.jsonl}=$file")
done

say "2/7 Tokenizer and corpus; $TARGET is held out as the target"
[ -e "$RUN/tokenizer.json" ] ||
  megatron-chameleon train_tokenizer "${INPUT[@]}" --output "$RUN/tokenizer.json" --vocab-size 8192
[ -e "$CORPUS/corpus.json" ] ||
  megatron-chameleon preprocess_data "${INPUT[@]}" --held-out "$TARGET=$RUN/text/$TARGET.jsonl" \
    --output "$CORPUS" --tokenizer-model "$RUN/tokenizer.json" --split 80,10,10 \
    --min-tokens-per-split 2000

say "3/7 Weights for the target, from n-gram models of the domains"
megatron-chameleon compute_mixture --method mixmin --corpus "$CORPUS" --target "$TARGET" \
  --output "$MIXTURES/mixmin.json" --token-budget "$BUDGET"

say "4/7 Weights without a target: a proxy, its embeddings of the domains, and Chameleon"
torchrun "${RANKS[@]}" pretrain_gpt "${TRAIN[@]}" --mixture uniform --run-dir "$PROXY"
torchrun "${RANKS[@]}" compute_mixture --corpus "$CORPUS" --checkpoint "$PROXY" --store "$STORE" \
  --num-windows 512 --tensor-model-parallel-size 2 --token-budget "$BUDGET" \
  --output "$MIXTURES/chameleon-pretrain.json"

say "5/7 Models that differ only in their mixture, trained concurrently on one rank each"
# The proxy has the size and the steps of the models, so it is also the model with uniform weights.
if [ ! -e "$RUN/5-base/uniform-seed$SEED" ]; then
  mkdir -p "$RUN/5-base"
  rm -rf "$RUN/5-base/.uniform"   # of an interrupted copy
  cp -r "$PROXY" "$RUN/5-base/.uniform"
  mv "$RUN/5-base/.uniform" "$RUN/5-base/uniform-seed$SEED"
fi
echo "The proxy is also the model with uniform weights."
BASE=("$PYTHON" -m megatron_chameleon pretrain_gpt "${TRAIN[@]}")
mkdir -p "$RUN/logs"
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT   # Ctrl-C does not reach background processes
LOG=$RUN/logs/chameleon-pretrain-seed$SEED.log
"${BASE[@]}" --mixture "$MIXTURES/chameleon-pretrain.json" \
  --run-dir "$RUN/5-base/chameleon-pretrain-seed$SEED" > "$LOG" 2>&1 &
echo "The model of chameleon-pretrain.json logs to $LOG."
"${BASE[@]}" --mixture "$MIXTURES/mixmin.json" --run-dir "$RUN/5-base/mixmin-seed$SEED"
wait $! || { tail -n 3 "$LOG" >&2; exit 1; }

say "6/7 Held-out perplexity"
MODELS=()
for name in uniform chameleon-pretrain mixmin; do
  MODELS+=(--checkpoint "$RUN/5-base/$name-seed$SEED" --output "$RUN/6-evaluation/$name-seed$SEED.json")
done
torchrun "${RANKS[@]}" evaluate perplexity --corpus "$CORPUS" --target "$TARGET" \
  --max-tokens 16000 "${MODELS[@]}"

say "7/7 Tables and figures"
megatron-chameleon make_report "$RUN" --projection pca   # UMAP takes half a minute

say "Written to $RUN"
cat << END
  1-corpus      the text as tokens, in named domains
  2-proxy       the proxy, trained with uniform weights
  4-mixture     the weights: mixmin.json (for the target), chameleon-pretrain.json
  5-base        three models: the proxy, and those trained with these weights
  7-report      report.html: tables and figures

Next, weights for a target of your own, without any model:
  megatron-chameleon compute_mixture --method mixmin --input NAME=PATH --input NAME=PATH ... \\
    --target mine=PATH --output mixture.json
megatron-chameleon --help lists the other commands.
END
