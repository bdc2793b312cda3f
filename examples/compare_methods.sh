#!/usr/bin/env bash
# Compare all methods on one corpus: compute each mixture, train the same base model with each
# mixture and several seeds, and print one table of weights, average held-out perplexity with its
# standard deviation across seeds, and the cost of each mixture.
#
#   bash examples/compare_methods.sh                          # on 2 CPU cores, in under an hour
#   SIZE=small CORPUS_NAME=registers bash examples/compare_methods.sh   # in about an hour
#   PRETRAINED=runs/compare-small/installed SIZE=small CORPUS_NAME=code \
#     bash examples/compare_methods.sh                        # fine-tuning, in half an hour
#   SIZE=paper bash examples/compare_methods.sh               # the paper's setting, on every GPU
#   SIZE=paper VARIANT=2k bash examples/compare_methods.sh    # the paper's proxies of 2,000 steps
#   SIZE=paper BASE=1.2b bash examples/compare_methods.sh     # the paper's larger base model
#   SIZE=tiny bash examples/compare_methods.sh                # smoke test, in minutes
#   METHODS="uniform chameleon doremi" SEEDS="1 2 3 4 5" bash examples/compare_methods.sh
#
# The same command resumes after an interruption; mixtures and seeds may be added. Seeds are paired:
# the models of all mixtures start from the same weights and sample with the same seed. Mixtures are
# computed once, with PROXY_SEED. A mixture that equals uniform shares the models of uniform.
#
#   SIZE         mini: real text of the installed packages, nano models; paper: SlimPajama; tiny:
#                a smoke test (mini)
#   VARIANT      2k: DoReMi and DoGE with proxies of 2,000 steps, next to uniform and Chameleon
#   BASE         model size of the base models (mini: nano; paper: 684m)
#   CORPUS_NAME  text of SIZE=small: installed, registers or code (installed)
#   METHODS      columns of the table, named as by compute_mixture --list-methods;
#                doremi-2k and doge-2k use proxies with Chameleon's number of steps;
#                chameleon-pretrain, -finetune, -paper and -scaled use that mode or recipe;
#                odm, chameleon-online and other online methods train base models with
#                --online, and need SIZE=small (uniform natural unimax chameleon doremi doge
#                regmix surrogate mixing-laws; small: uniform natural chameleon doremi surrogate odm)
#   PRETRAINED   with SIZE=small, the folder of an earlier comparison: its base models of uniform are
#                fine-tuned on CORPUS_NAME, each with its own seed, and the first one embeds the
#                domains (METHODS: uniform chameleon-finetune chameleon-pretrain)
#   SEEDS        seeds of the base models, at least three ("1 2 3"; small: "1 2 3 4 5")
#   BASELINE     the column that perplexities are compared with (uniform)
#   PROXY_SEED   seed of the proxies (1)
#   RUN          folder of the experiment (mini: runs/compare-mini; paper: runs/slimpajama)
#   CORPUS       output of preprocess_data (RUN/1-corpus; mini and small create it)
#   MAX_BYTES, VOCAB_SIZE   maximum bytes of text per domain, and entries of the tokenizer, of a corpus
#                that the script creates (mini: 3500000 and 8192; small: 20000000 and 4096)
#   TOKENIZER    tokenizer of such a corpus (trained; with PRETRAINED: PRETRAINED/tokenizer.json)
#   JOBS_AT_ONCE number of concurrent jobs with one rank each; with 1, a job gets all ranks (mini: 2)
#   RECORD       a .json file for the table with date, machine, versions and command; a Markdown
#                file is written next to it
#   BASE_STEPS, PROXY_STEPS, LONG_PROXY_STEPS, MEMBER_STEPS   steps, except with SIZE=paper
#   REGMIX_MEMBERS   proxies of RegMix and the surrogate (mini: 48; small: 32; tiny: 16)
set -euo pipefail
SIZE=${SIZE:-mini}
COMMAND_LINE=
for choice in SIZE CORPUS_NAME PRETRAINED VARIANT BASE METHODS SEEDS BASELINE PROXY_SEED RUN \
  CORPUS MAX_BYTES VOCAB_SIZE TOKENIZER JOBS_AT_ONCE BASE_STEPS PROXY_STEPS LONG_PROXY_STEPS \
  MEMBER_STEPS REGMIX_MEMBERS TP PP NPROC; do
  [ -z "${!choice:-}" ] || printf -v COMMAND_LINE '%s%s=%q ' "$COMMAND_LINE" "$choice" "${!choice}"
done
printf -v COMMAND_LINE '%sbash examples/compare_methods.sh%s' "$COMMAND_LINE" "${*:+ $*}"
source "$(dirname "$0")/launch.sh"
source "$HERE/jobs.sh"

VARIANT=${VARIANT:-}
PRETRAINED=${PRETRAINED:-}
if [ -n "$PRETRAINED" ]; then
  [ "$SIZE" = small ] || refuse "PRETRAINED: requires SIZE=small"
  METHODS=${METHODS:-uniform chameleon-finetune chameleon-pretrain}
fi
if [ "$SIZE" = small ]; then
  SEEDS=${SEEDS:-1 2 3 4 5}
  METHODS=${METHODS:-uniform natural chameleon doremi surrogate odm}
fi
SEEDS=${SEEDS:-1 2 3}
BASELINE=${BASELINE:-uniform}
PROXY_SEED=${PROXY_SEED:-1}
ALL_METHODS="uniform natural unimax chameleon doremi doge regmix surrogate mixing-laws"
case $VARIANT in
  '') METHODS=${METHODS:-$ALL_METHODS} ;;
  2k) METHODS=${METHODS:-uniform chameleon doremi-2k doge-2k} ;;
  *) refuse "VARIANT=$VARIANT: must be 2k or unset" ;;
esac

# Reject invalid settings at the start, not after the training, when the table is made.
check_choice() {
  local name
  for name in $SEEDS $PROXY_SEED; do
    [[ $name =~ ^(0|[1-9][0-9]*)$ ]] || refuse "SEEDS and PROXY_SEED: $name is not an integer"
  done
  comparison --check choice || exit
  for name in $METHODS; do
    [ -z "$(online_method "$name")" ] || [[ " ${BASE_FLAGS[*]} ${EXTRA[*]} " == *" --permutation "* ]] ||
      refuse "METHODS: $name requires SIZE=small, or -- --permutation epoch"
    [ "$SIZE" = paper ] || continue
    uses_proxy "$name" || is_found "$name" || [ -e "$(baseline_launcher "$name")" ] ||
      refuse "METHODS: unknown method $name: no $(baseline_launcher "$name")" \
        "and no $RUN/4-mixture/$name.json"
  done
}

# comparison FLAGS...: run compare_methods on METHODS and SEEDS.
comparison() {
  # shellcheck disable=SC2086   # names and seeds contain no spaces
  python -m megatron_chameleon compare_methods --run "$RUN" --mixtures $METHODS --seeds $SEEDS \
    --run-suffix="$SUFFIX" --baseline "$BASELINE" "$@"
}

baseline_launcher() {
  local method=${1%-2k}
  echo "$HERE/baselines/${method//-/_}.sh"
}

# Print the --online method of a column that has no mixture file.
online_method() {
  case $1 in
    odm | ado | aioli) echo "$1" ;;
    *-online) echo "${1%-online}" ;;
  esac
}

is_finished() { grep -qs '"status": "finished"' "$1/run.json"; }

# Return whether a column is a mixture of Chameleon's, which embeds the domains with PROXY. The user's
# own mixture may have such a name, too, so an existing mixture is judged by its method.
uses_proxy() {
  [[ $1 == chameleon* && -z $(online_method "$1") ]] || return
  ! is_found "$1" || grep -Eqs '"method": *"chameleon-' "$RUN/4-mixture/$1.json"
}

is_found() { [ -e "$RUN/4-mixture/$1.json" ]; }

# Set the flags of SIZE=mini and tiny; the paper's flags are in hyperparameters.sh and baselines/.
mini() {
  RUN=${RUN:-runs/compare-mini}
  BASE=${BASE:-nano}
  STEPS_IN_10_S=${STEPS_IN_10_S:-62}   # nano steps of a core
  JOBS_AT_ONCE=${JOBS_AT_ONCE:-2}      # 1.8 times as fast as one job at a time with two ranks
  SEQ_LENGTH=128 BATCH=8 WARMUP=160 SWARM_WARMUP=40
  BASE_STEPS=${BASE_STEPS:-800}
  PROXY_STEPS=${PROXY_STEPS:-1000}             # for Chameleon; a third of these steps is too few
  LONG_PROXY_STEPS=${LONG_PROXY_STEPS:-1500}   # for DoReMi and DoGE
  MEMBER_STEPS=${MEMBER_STEPS:-150} REGMIX_MEMBERS=${REGMIX_MEMBERS:-48} LAWS_MEMBERS=24
  EMBED=(--num-windows 512)            # as in the quickstart
  EVALUATE=(--max-tokens 25000)        # as in the quickstart
  EVAL_TOKENS=4096
}

# Set the flags of SIZE=small: 2 million tokens per base model, and the validation losses from which
# the table computes tokens for the same loss. Online methods need --permutation epoch. Domains keep
# their own sizes up to 20 MB; with 4,096 entries, a step takes 0.6 times as long as with 8,192.
small() {
  local seed
  CORPUS_NAME=${CORPUS_NAME:-installed}
  [ -e "$HERE/data/${CORPUS_NAME}_text.sh" ] ||
    refuse "CORPUS_NAME=$CORPUS_NAME: must be installed, registers or code"
  RUN=${RUN:-runs/compare-small/${PRETRAINED:+finetune-}$CORPUS_NAME}
  export MAX_BYTES=${MAX_BYTES:-20000000} VOCAB_SIZE=${VOCAB_SIZE:-4096}
  STEPS_IN_10_S=${STEPS_IN_10_S:-110}
  if [ -n "$PRETRAINED" ]; then
    BASE_STEPS=${BASE_STEPS:-1000}
    export TOKENIZER=${TOKENIZER:-$PRETRAINED/tokenizer.json}
    [ -n "${CORPUS:-}" ] || [ -e "$TOKENIZER" ] ||
      refuse "no $TOKENIZER; set CORPUS, TOKENIZER, or another PRETRAINED"
    for seed in $SEEDS $PROXY_SEED; do
      is_finished "$PRETRAINED/5-base/uniform-seed$seed" ||
        refuse "PRETRAINED=$PRETRAINED: must be the RUN of a comparison with SIZE=small and seed $seed"
    done
  fi
  BASE_STEPS=${BASE_STEPS:-2000}
  # After 150 steps, members predict worse than token frequencies.
  MEMBER_STEPS=${MEMBER_STEPS:-400} REGMIX_MEMBERS=${REGMIX_MEMBERS:-32}
  BASE_FLAGS=(--permutation epoch --eval-interval $((BASE_STEPS / 10)) --eval-tokens 4096)
  mini
}

# Set the flags of a smoke test, in which models learn nothing.
tiny() {
  BASE_STEPS=${BASE_STEPS:-12} PROXY_STEPS=${PROXY_STEPS:-8}
  LONG_PROXY_STEPS=${LONG_PROXY_STEPS:-12} MEMBER_STEPS=${MEMBER_STEPS:-4}
  REGMIX_MEMBERS=${REGMIX_MEMBERS:-16}
  mini
  SEQ_LENGTH=64 WARMUP=2 SWARM_WARMUP=1 LAWS_MEMBERS=12 EVAL_TOKENS=512
  # Weights of an untrained proxy would be shrunk to uniform, whose models are not trained again.
  EMBED=(--num-windows 32 --bootstrap-resamples 50 --no-shrink)
  EVALUATE=(--max-tokens 1024)
}

# Build the flags of proxies, swarms and base models.
fill_in() {
  local batches=(--seq-length "$SEQ_LENGTH" --global-batch-size "$BATCH")
  # These settings were chosen for small differences between seeds. At a learning rate of 1e-2, one
  # model in twenty lagged far behind. With half the warm-up and beta2 0.95, the mean losses of
  # seeds differed by up to 0.3; with these settings, they differ by 0.07.
  local run=("${batches[@]}" --micro-batch-size "$BATCH" --lr-warmup-iters "$WARMUP" --lr 4e-3
    --min-lr 1e-3 --adam-beta2 0.99 --log-interval 50 --save-interval 200)
  PROXY_FLAGS=(--model nano "${run[@]}" --seed "$PROXY_SEED")
  SWARM=(--model nano "${batches[@]}" --lr-warmup-iters "$SWARM_WARMUP" --lr 1e-2
    --seed "$PROXY_SEED" --train-iters "$MEMBER_STEPS" --eval-tokens "$EVAL_TOKENS")
  TRAIN=(--model "$BASE" "${run[@]}" --train-iters "$BASE_STEPS" --corpus "$CORPUS"
    "${BASE_FLAGS[@]}")
  EMBED+=(--corpus "$CORPUS")
  EVALUATE+=(--corpus "$CORPUS")
  BUDGET=$((BASE_STEPS * SEQ_LENGTH * BATCH))
}

SUFFIX=
BASE_FLAGS=()
case $SIZE in
  mini | small | tiny)
    export CUDA_VISIBLE_DEVICES= TORCHDYNAMO_DISABLE=1   # models too small for a GPU
    "$SIZE"
    check_choice
    CORPUS=${CORPUS:-$RUN/1-corpus}
    if [ "$SIZE" != tiny ] && [ ! -e "$CORPUS/corpus.json" ]; then
      say "Text: ${CORPUS_NAME:=installed}"
      OUTPUT=$CORPUS bash "$HERE/data/${CORPUS_NAME}_text.sh"
    fi
    [ -e "$CORPUS/corpus.json" ] ||
      refuse "no corpus at $CORPUS; $(corpus_hint installed_text.sh)"
    fill_in
    PROXY=$RUN/2-proxy/nano-seed$PROXY_SEED
    [ -z "$PRETRAINED" ] || PROXY=$PRETRAINED/5-base/uniform-seed$PROXY_SEED
    ;;
  paper)
    RUN=${RUN:-runs/slimpajama}
    BASE=${BASE:-684m}
    CORPUS=${CORPUS:-$RUN/1-corpus}
    JOBS_AT_ONCE=${JOBS_AT_ONCE:-1}
    SIZE=$BASE choose base slimpajama_627b.sh
    PROXY=$RUN/2-proxy/82m-seed$PROXY_SEED
    [ "$BASE" = 684m ] || SUFFIX=-$BASE
    check_choice
    ;;
  *) refuse "SIZE=$SIZE: must be mini, small, paper or tiny" ;;
esac
TRAIN+=("${EXTRA[@]}")
REGMIX_SWARM=$RUN/4-mixture/regmix     # the surrogate is fitted to RegMix's proxies
START=(python)
[ "$JOBS_AT_ONCE" != 1 ] || START=(torchrun "${RANKS[@]}")

# The following functions run the jobs. Each job replaces its shell (exec), so that a signal to the
# job reaches the command.

train_proxy() {
  [ "$SIZE" != paper ] || launcher "$HERE/pretrain_82m_proxy.sh"
  limit_time
  exec "${START[@]}" -m megatron_chameleon pretrain_gpt "${PROXY_FLAGS[@]}" "${LIMIT[@]}" \
    --train-iters "$PROXY_STEPS" --corpus "$CORPUS" --mixture uniform --run-dir "$PROXY"
}

# launcher FILE FLAGS...: run another launcher with the paper's settings.
launcher() {
  exec env -u SIZE -u MIXTURE RUN="$RUN" CORPUS="$CORPUS" SEED="$PROXY_SEED" \
    bash "$1" -- "${@:2}"
}

find_mixture() {
  local name=$1 method=${1%-2k} flags=(--output "$RUN/4-mixture/$1.json") steps
  limit_time
  if uses_proxy "$name"; then
    case $name in
      chameleon-finetune) flags+=(--mode finetune) ;;
      chameleon-paper | chameleon-scaled) flags+=(--recipe "${name#chameleon-}") ;;
    esac
    exec "${ENDED[@]}" "${START[@]}" -m megatron_chameleon compute_mixture "${EMBED[@]}" "${flags[@]}" \
      --checkpoint "$PROXY" --store "$RUN/3-embeddings/${PROXY##*/}"
  elif [ "$SIZE" = paper ]; then
    [ "$name" = "$method" ] || flags+=(--train-iters 2000)   # paper: tab:ppl_2k, "2k steps"
    launcher "$(baseline_launcher "$name")" "${flags[@]}"
  fi
  steps=$LONG_PROXY_STEPS
  [ "$name" = "$method" ] || steps=$PROXY_STEPS
  case $method in
    doremi | doge) flags+=("${PROXY_FLAGS[@]}" --train-iters "$steps") ;;
    regmix) flags+=("${SWARM[@]}" --num-proxies "$REGMIX_MEMBERS") ;;
    surrogate) flags+=("${SWARM[@]}" --num-proxies "$REGMIX_MEMBERS" --work-dir "$REGMIX_SWARM") ;;
    mixing-laws) flags+=("${SWARM[@]}" --num-proxies "$LAWS_MEMBERS") ;;
  esac
  exec "${ENDED[@]}" "${START[@]}" -m megatron_chameleon compute_mixture --method "$method" --corpus "$CORPUS" \
    --token-budget "$BUDGET" "${flags[@]}"
}

train_base() {
  local mixture=(--mixture "$RUN/4-mixture/$1.json") online
  online=$(online_method "$1")
  [ -z "$online" ] || mixture=(--mixture uniform --online "$online")
  [ -z "$PRETRAINED" ] || mixture+=(--pretrained-checkpoint "$PRETRAINED/5-base/uniform-seed$2")
  limit_time
  exec "${START[@]}" -m megatron_chameleon pretrain_gpt "${TRAIN[@]}" "${LIMIT[@]}" --seed "$2" \
    "${mixture[@]}" --run-dir "$RUN/5-base/$1$SUFFIX-seed$2"
}

evaluate() {
  local seed run runs=()
  for seed in $SEEDS; do   # the tool skips existing results of the same weights
    run=$1$SUFFIX-seed$seed
    runs+=(--checkpoint "$RUN/5-base/$run" --output "$RUN/6-evaluation/$run.json")
  done
  limit_time
  exec "${ENDED[@]}" "${START[@]}" -m megatron_chameleon evaluate perplexity "${EVALUATE[@]}" "${runs[@]}"
}

# Return whether a job was stopped by STOP_AT. Training and the paper's launchers handle STOP_AT
# themselves; other commands are killed by timeout.
was_ended() {
  case $1 in
    proxy | *-seed*) return 1 ;;
    chameleon* | *-evaluation) is_out_of_time ;;
    *) [ "$SIZE" != paper ] && is_out_of_time ;;
  esac
}

# The following functions return whether a job is done.

is_trained() { is_finished "$RUN/5-base/$1$SUFFIX-seed$2" || is_uniform "$1"; }

# Return whether all evaluations of a mixture exist and belong to the current weights.
is_evaluated() {
  local seed
  ! is_uniform "$1" || return 0
  for seed in $SEEDS; do
    [ -e "$RUN/6-evaluation/$1$SUFFIX-seed$seed.json" ] || return 1
  done
  METHODS=$1 comparison --check evaluations 2>> "$RUN/logs/$1-evaluation.log"
}

# Return whether a mixture equals uniform to nine digits, and uniform is among METHODS.
is_uniform() {
  [[ $1 != uniform && " $METHODS " == *" uniform "* ]] && is_found "$1" && is_found uniform &&
    [ "$(weights_of "$1")" = "$(weights_of uniform)" ]
}

weights_of() {
  sed -n '/^  "weights": {/,/^  }/ s/\(\.[0-9]\{9\}\)[0-9]*/\1/p' "$RUN/4-mixture/$1.json"
}

# Print the approximate seconds of a job: with SIZE=paper on an H100, otherwise on one CPU core.
seconds_for() {
  if [ "$1" = surrogate ] && [[ " $METHODS " != *" regmix "* ]]; then   # it trains the proxies
    seconds_for regmix
    return
  fi
  if [ "$SIZE" = paper ]; then
    case $1 in
      proxy) echo 2800 ;;
      doremi) echo 26600 ;;
      doge) echo 22700 ;;
      *-2k) echo 5300 ;;
      regmix) echo 25000 ;;
      mixing-laws) echo 1000000 ;;
      base) echo 201600 ;;
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
    base) echo $((BASE_STEPS * 10 / STEPS_IN_10_S + 10)) ;;
    evaluation) echo 45 ;;
    *) echo 15 ;;
  esac
}

# Reject a run folder that was started with other settings. Base models of another size have
# separate settings, but use the same proxies.
hold_to_settings() {
  local proxies="seed of the proxies: $PROXY_SEED"
  if [ "$SIZE" != paper ]; then
    proxies+=$'\n'"proxies: ${PROXY_FLAGS[*]}, $PROXY_STEPS and $LONG_PROXY_STEPS steps"
    proxies+=$'\n'"swarms: ${SWARM[*]}, $REGMIX_MEMBERS and $LAWS_MEMBERS members"
    proxies+=$'\n'"embeddings: ${EMBED[*]}"
  fi
  hold "$RUN/logs/settings-proxies.txt" "$proxies"
  hold "$RUN/logs/settings$SUFFIX.txt" \
    "base models: ${TRAIN[*]}${PRETRAINED:+ from $PRETRAINED}"$'\n'"evaluation: ${EVALUATE[*]}"
}

# hold FILE TEXT: write TEXT to FILE, or fail if FILE differs.
hold() {
  mkdir -p "$RUN/logs"
  [ -e "$1" ] || printf '%s\n' "$2" > "$1"
  [ "$(cat "$1")" = "$2" ] ||
    refuse "$RUN was started with other settings (see $1); use those, or another RUN"
}

# Print METHODS sorted by duration, longest first.
longest_first() {
  local name
  for name in $METHODS; do
    [ -n "$(online_method "$name")" ] || echo "$(seconds_for "$name") $name"
  done | sort -s -k 1,1nr |
    cut -d ' ' -f 2
}

# Define all jobs, longest first, so that no long job runs alone at the end.
list_jobs() {
  local name seed uniform= bases
  for name in $METHODS; do
    uses_proxy "$name" || continue
    job proxy "$(seconds_for proxy)" "" "is_finished $(printf %q "$PROXY")" train_proxy
    break
  done
  for name in $(longest_first); do
    local after=
    ! uses_proxy "$name" || after=proxy
    [[ $name != surrogate || " $METHODS " != *" regmix "* ]] || after=regmix
    job "$name" "$(seconds_for "$name")" "$after" "is_found $name" find_mixture "$name"
  done
  [[ " $METHODS " != *" uniform "* ]] || uniform=uniform   # other mixtures may equal uniform
  for name in $METHODS; do
    bases=
    local after="$name $uniform"
    [ -z "$(online_method "$name")" ] || after=
    for seed in $SEEDS; do
      job "$name-seed$seed" "$(seconds_for base)" "$after" "is_trained $name $seed" \
        train_base "$name" "$seed"
      bases+=" $name-seed$seed"
    done
    job "$name-evaluation" "$(seconds_for evaluation)" "$bases" "is_evaluated $name" \
      evaluate "$name"
  done
}

print_estimate() {
  local name sum=0
  for name in "${JOBS[@]}"; do sum=$((sum + EXPECTED[$name])); done
  echo "all jobs take about $((sum / JOBS_AT_ONCE / 60)) minutes on an idle machine"
}

compare() {
  local record=()
  [ -z "${RECORD:-}" ] ||
    record=(--record "$RECORD" --command "$COMMAND_LINE"
      --wall-seconds "$(cat "$RUN/logs/seconds")")
  comparison --name "compare_methods${VARIANT:+-$VARIANT}$SUFFIX" "${record[@]}"
}

{ # bash parses this whole block before running it, so that the file can be edited meanwhile.
  hold_to_settings
  list_jobs
  [ "$SIZE" = paper ] || print_estimate
  run_jobs "$JOBS_AT_ONCE"
  on_first_node compare
  exit
}
