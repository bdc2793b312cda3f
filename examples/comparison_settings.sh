# shellcheck shell=bash
# compare_methods.sh sources this file after launch.sh. It holds the settings of SIZE=mini, small, gpu
# and tiny, and those of the paper's experiments.
#
# Each function sets RUN, CORPUS, METHODS, SEEDS, BASELINE, JOBS_AT_ONCE, the flags TRAIN, EMBED and
# EVALUATE, and how Chameleon's mixtures are computed: PROXY embeds the domains. The job "proxy"
# trains it first, unless HAS_PROXY is set.

# The paper's experiments
#
#   EXPERIMENT       mixtures                                            base models       tasks
#   slimpajama       by every method                                     684m              yes
#   slimpajama-1.2b  those of slimpajama                                 1.2b              yes
#   pile             slimpajama's proxy; DoGE; otherwise as printed      684m, batch 512   yes
#   wiki40b, stack   by a model of pile                                  fine-tune it      no
papers_experiment() {
  local runs=runs model=684m proxy=82m kind=base recipe=slimpajama_627b.sh tasks=yes columns
  [ "$SIZE" != tiny ] || runs=runs/tiny model=tiny proxy=tiny
  DATA_SET=${EXPERIMENT%-1.2b}
  case $EXPERIMENT in
    slimpajama)
      columns="uniform doremi doge chameleon-pretrain regmix mixing-laws"
      # The table of proxies of 2,000 steps has no tasks.
      [ -z "$VARIANT" ] || columns="uniform chameleon-pretrain doremi-2k doge-2k" tasks=no
      ;;
    slimpajama-1.2b)
      columns="uniform doremi doge chameleon-pretrain regmix"
      [ "$SIZE" = tiny ] || model=1.2b
      SHARED=$runs/slimpajama
      CORPUS=${CORPUS:-$SHARED/1-corpus}
      ;;
    pile)
      columns="printed-human printed-doremi doge chameleon-pretrain printed-regmix"
      kind=base-pile recipe=pile.sh
      BASELINE=${BASELINE:-printed-human}
      PROXY=${PROXY:-$runs/slimpajama/2-proxy/$proxy-seed1} HAS_PROXY=yes
      ;;
    wiki40b | stack)
      columns="uniform chameleon-finetune chameleon-pretrain"
      kind=finetune recipe=$EXPERIMENT.sh tasks=no
      PRETRAINED=${PRETRAINED:-$runs/pile/5-base/chameleon-pretrain-seed1}
      PROXY=$PRETRAINED HAS_PROXY=yes
      ;;
    *) refuse "EXPERIMENT=$EXPERIMENT: must be slimpajama, slimpajama-1.2b, pile, wiki40b or stack" ;;
  esac
  RUN=${RUN:-$runs/$EXPERIMENT}
  CORPUS=${CORPUS:-$RUN/1-corpus}
  PROXY=${PROXY:-$RUN/2-proxy/$proxy-seed$PROXY_SEED}
  METHODS=${METHODS:-$columns}
  [ "$SIZE" != tiny ] || JOBS_AT_ONCE=${JOBS_AT_ONCE:-2}
  JOBS_AT_ONCE=${JOBS_AT_ONCE:-1}
  # A smoke test has no access to the tasks' datasets unless DATA_DIR has copies of them.
  [ "$SIZE" != tiny ] || [ -n "${DATA_DIR:-}" ] || tasks=no
  TASKS=${TASKS:-$tasks}
  SIZE=$model choose "$kind" "$recipe"
  RECIPE=$recipe
  [ -z "$PRETRAINED" ] || [ -d "$PRETRAINED" ] ||
    refuse "no run at $PRETRAINED; create it with 'EXPERIMENT=pile bash $0', or set PRETRAINED"
}

# The small settings, whose models train on CPUs

# Settings that SIZE=mini, small, gpu and tiny share.
mini() {
  [ -z "$TARGETS$TARGET" ] ||
    METHODS=${METHODS:-uniform natural chameleon chameleon-target-pretrain chameleon-target-finetune mixmin}
  RUN=${RUN:-runs/compare-mini}
  BASE=${BASE:-nano} PROXY_MODEL=${PROXY_MODEL:-nano}
  STEPS_IN_10_S=${STEPS_IN_10_S:-62}   # nano steps of a core
  JOBS_AT_ONCE=${JOBS_AT_ONCE:-2}      # 1.8 times as fast as one job at a time with two ranks
  METHODS=${METHODS:-uniform natural unimax chameleon doremi doge regmix surrogate mixing-laws}
  SEQ_LENGTH=128 BATCH=8 WARMUP=160 SWARM_WARMUP=40 LR=4e-3 MIN_LR=1e-3 SWARM_LR=1e-2 PRECISION=()
  BASE_STEPS=${BASE_STEPS:-800}
  PROXY_STEPS=${PROXY_STEPS:-1000}             # for Chameleon; a third of these steps is too few
  LONG_PROXY_STEPS=${LONG_PROXY_STEPS:-1500}   # for DoReMi and DoGE
  MEMBER_STEPS=${MEMBER_STEPS:-150} REGMIX_MEMBERS=${REGMIX_MEMBERS:-48} LAWS_MEMBERS=24
  EMBED=(--num-windows 512)            # as in the quickstart
  EVALUATE=(--max-tokens 25000)
  EVAL_TOKENS=4096
}

# 2 million tokens per base model, and the validation losses from which the table computes tokens for
# the same loss. Online methods need --permutation epoch. Domains keep their own sizes up to 20 MB;
# with 4,096 entries, a step takes 0.6 times as long as with 8,192.
small() {
  local seed
  if [ -n "$TARGETS$TARGET" ]; then
    SEEDS=${SEEDS:-1 2 3}
    BASE_STEPS=${BASE_STEPS:-600}
  fi
  CORPUS_NAME=${CORPUS_NAME:-installed}
  [ -e "$HERE/data/${CORPUS_NAME}_text.sh" ] ||
    refuse "CORPUS_NAME=$CORPUS_NAME: must be installed, registers or code"
  RUN=${RUN:-runs/compare-small/${PRETRAINED:+finetune-}$CORPUS_NAME}
  export MAX_BYTES=${MAX_BYTES:-20000000} VOCAB_SIZE=${VOCAB_SIZE:-4096}
  STEPS_IN_10_S=${STEPS_IN_10_S:-110}
  SEEDS=${SEEDS:-1 2 3 4 5}
  if [ -n "$PRETRAINED" ]; then
    [ -z "$TARGETS$TARGET" ] || METHODS=${METHODS:-uniform chameleon-target-finetune mixmin}
    METHODS=${METHODS:-uniform chameleon-finetune chameleon-pretrain}
    BASE_STEPS=${BASE_STEPS:-1000}
    export TOKENIZER=${TOKENIZER:-$PRETRAINED/tokenizer.json}
    [ -n "${CORPUS:-}" ] || [ -e "$TOKENIZER" ] ||
      refuse "no $TOKENIZER; set CORPUS, TOKENIZER, or another PRETRAINED"
    for seed in $SEEDS $PROXY_SEED; do
      is_finished "$(initial_run "$seed")" ||
        refuse "PRETRAINED=$PRETRAINED: must be the RUN of a comparison with SIZE=small and seed $seed"
    done
    PROXY=$(initial_run "$PROXY_SEED") HAS_PROXY=yes
  fi
  [ -n "$TARGETS$TARGET" ] || METHODS=${METHODS:-uniform natural chameleon doremi surrogate odm}
  BASE_STEPS=${BASE_STEPS:-2000}
  # After 150 steps, members predict worse than token frequencies.
  MEMBER_STEPS=${MEMBER_STEPS:-400} REGMIX_MEMBERS=${REGMIX_MEMBERS:-32}
  BASE_FLAGS=(--permutation epoch --eval-interval $((BASE_STEPS / 10)) --eval-tokens 4096)
  mini
}

# The text of SIZE=small and models of 30 million parameters, trained on 39 million tokens on one
# GPU, which trains two of them at a time (JOBS_AT_ONCE).
gpu() {
  [[ -z $PRETRAINED ]] || refuse "PRETRAINED: requires SIZE=small"
  CORPUS_NAME=${CORPUS_NAME:-installed}
  RUN=${RUN:-runs/compare-gpu/$CORPUS_NAME}
  BASE=${BASE:-llama-30m} PROXY_MODEL=${PROXY_MODEL:-llama-30m}
  SEEDS=${SEEDS:-1 2 3}
  BASE_STEPS=${BASE_STEPS:-1200} PROXY_STEPS=${PROXY_STEPS:-1200}
  LONG_PROXY_STEPS=${LONG_PROXY_STEPS:-1200}
  STEPS_IN_10_S=${STEPS_IN_10_S:-150}
  small
  SEQ_LENGTH=512 BATCH=64 LR=2e-3 MIN_LR=2e-4 SWARM_LR=2e-3 PRECISION=(--bf16)
  WARMUP=$((BASE_STEPS / 10)) SWARM_WARMUP=$((MEMBER_STEPS / 10))
  EMBED=(--num-windows 1024)
  EVALUATE=(--max-tokens 100000)
  EVAL_TOKENS=65536
  BASE_FLAGS=(--permutation epoch --eval-interval $((BASE_STEPS / 10)) --eval-tokens "$EVAL_TOKENS")
}

# A smoke test, in which models learn nothing.
tiny() {
  RUN=${RUN:-runs/tiny/compare_methods}
  CORPUS=${CORPUS:-runs/quickstart/1-corpus}
  BASE_STEPS=${BASE_STEPS:-12} PROXY_STEPS=${PROXY_STEPS:-8}
  LONG_PROXY_STEPS=${LONG_PROXY_STEPS:-12} MEMBER_STEPS=${MEMBER_STEPS:-4}
  REGMIX_MEMBERS=${REGMIX_MEMBERS:-16}
  mini
  SEQ_LENGTH=64 WARMUP=2 SWARM_WARMUP=1 LAWS_MEMBERS=12 EVAL_TOKENS=512
  EMBED=(--num-windows 32 --bootstrap-resamples 50)
  EVALUATE=(--max-tokens 1024)
}

# Find or create the corpus, and build the flags of proxies, swarms and base models.
finish_small_settings() {
  CORPUS=${CORPUS:-$RUN/1-corpus}
  if [ "$SIZE" != tiny ] && [ ! -e "$CORPUS/corpus.json" ]; then
    say "Text: ${CORPUS_NAME:=installed}"
    OUTPUT=$CORPUS bash "$HERE/data/${CORPUS_NAME}_text.sh"
  fi
  [ -e "$CORPUS/corpus.json" ] || refuse "no corpus at $CORPUS; $(corpus_hint installed_text.sh)"
  local batches=(--seq-length "$SEQ_LENGTH" --global-batch-size "$BATCH" "${PRECISION[@]}")
  # These settings were chosen for small differences between seeds. At a learning rate of 1e-2, one
  # model in twenty lagged far behind. With half the warm-up and beta2 0.95, the mean losses of
  # seeds differed by up to 0.3; with these settings, they differ by 0.07.
  local run=("${batches[@]}" --micro-batch-size "$BATCH" --lr-warmup-iters "$WARMUP" --lr "$LR"
    --min-lr "$MIN_LR" --adam-beta2 0.99 --log-interval 50 --save-interval 200)
  PROXY_FLAGS=(--model "$PROXY_MODEL" "${run[@]}" --seed "$PROXY_SEED")
  SWARM=(--model "$PROXY_MODEL" "${batches[@]}" --lr-warmup-iters "$SWARM_WARMUP" --lr "$SWARM_LR"
    --seed "$PROXY_SEED" --train-iters "$MEMBER_STEPS" --eval-tokens "$EVAL_TOKENS")
  TRAIN=(--model "$BASE" "${run[@]}" --train-iters "$BASE_STEPS" --corpus "$CORPUS"
    "${BASE_FLAGS[@]}")
  EMBED+=(--corpus "$CORPUS")
  EVALUATE+=(--corpus "$CORPUS")
  BUDGET=$((BASE_STEPS * SEQ_LENGTH * BATCH))
  PROXY=${PROXY:-$RUN/2-proxy/$PROXY_MODEL-seed$PROXY_SEED}
  EXPERT_RUNS=${EXPERT_RUNS:-$RUN/2-proxy/experts}
}

# Print the approximate seconds of a job: in the paper's experiments on an H100, otherwise on one CPU
# core. Only their ratios matter.
seconds_for() {
  if [ "$1" = surrogate ] && [[ " $METHODS " != *" regmix "* ]]; then   # it trains the proxies
    seconds_for regmix
    return
  fi
  if [ -n "$EXPERIMENT" ]; then
    case $1 in
      proxy) echo 2800 ;;
      doremi) echo 26600 ;;
      doge) echo 22700 ;;
      *-2k) echo 5300 ;;
      regmix) echo 25000 ;;
      mixing-laws) echo 1000000 ;;
      base) echo 201600 ;;
      tasks) echo 3600 ;;
      *) echo 600 ;;
    esac
    return
  fi
  case $1 in   # DoReMi trains two models
    proxy) echo $((PROXY_STEPS * 10 / STEPS_IN_10_S + 10)) ;;
    doremi) echo $((LONG_PROXY_STEPS * 27 / STEPS_IN_10_S + 20)) ;;
    doge) echo $((LONG_PROXY_STEPS * 14 / STEPS_IN_10_S + 20)) ;;
    doremi-2k) echo $((PROXY_STEPS * 27 / STEPS_IN_10_S + 20)) ;;
    doge-2k) echo $((PROXY_STEPS * 14 / STEPS_IN_10_S + 20)) ;;
    regmix) echo $((MEMBER_STEPS * REGMIX_MEMBERS * 10 / STEPS_IN_10_S + 20)) ;;
    mixing-laws) echo $((MEMBER_STEPS * LAWS_MEMBERS * 10 / STEPS_IN_10_S + 20)) ;;
    mixmin-experts) echo $((PROXY_STEPS * 80 / STEPS_IN_10_S + 20)) ;;   # of eight domains
    base) echo $((BASE_STEPS * 10 / STEPS_IN_10_S + 10)) ;;
    evaluation) echo 45 ;;
    *) echo 15 ;;
  esac
}
