#!/usr/bin/env bash
# Compare all methods on one corpus: compute each mixture, train the same base model with each
# mixture and several seeds, and print one table of weights, average held-out perplexity with its
# standard deviation across seeds, and the cost of each mixture.
#
#   bash examples/compare_methods.sh                          # on 2 CPU cores, in under an hour
#   SIZE=small CORPUS_NAME=registers bash examples/compare_methods.sh   # in about an hour
#   PRETRAINED=runs/compare-small/installed SIZE=small CORPUS_NAME=code \
#     bash examples/compare_methods.sh                        # fine-tuning, in half an hour
#   SIZE=tiny bash examples/compare_methods.sh                # smoke test, in minutes
#   METHODS="uniform chameleon doremi" SEEDS="1 2 3 4 5" bash examples/compare_methods.sh
#   TARGETS=leave-one-out SIZE=small CORPUS_NAME=registers bash examples/compare_methods.sh
#                        # mixtures for a target that is not trained on, for each domain in turn
#   STOP_AT=$(($(date +%s) + 540)) TARGETS=leave-one-out SIZE=gpu bash examples/compare_methods.sh
#                        # the same on a GPU, in pieces of at most 10 minutes
#
# The paper's experiments, on every GPU, in this order; pile uses the proxy of slimpajama, and wiki40b
# and stack fine-tune a model of pile:
#   EXPERIMENT=slimpajama bash examples/compare_methods.sh
#   EXPERIMENT=slimpajama VARIANT=2k bash examples/compare_methods.sh    # proxies of 2,000 steps
#   EXPERIMENT=slimpajama-1.2b bash examples/compare_methods.sh
#   EXPERIMENT=pile bash examples/compare_methods.sh
#   EXPERIMENT=wiki40b bash examples/compare_methods.sh
#   EXPERIMENT=stack bash examples/compare_methods.sh
#   EXPERIMENT=pile SIZE=tiny bash examples/compare_methods.sh           # smoke test on CPUs
#
# The same command resumes after an interruption; mixtures and seeds may be added. Seeds are paired:
# the models of all mixtures start from the same weights and sample with the same seed. Mixtures are
# computed once, with PROXY_SEED. A mixture that equals uniform shares the models of uniform.
#
#   SIZE         mini: real text of the installed packages, nano models; small: longer; gpu: the text of
#                small and models of 30 million parameters, on one GPU; paper: an EXPERIMENT at full
#                size; tiny: a smoke test (mini; with EXPERIMENT: paper)
#   EXPERIMENT   slimpajama, slimpajama-1.2b, pile, wiki40b or stack (with SIZE=paper: slimpajama)
#   VARIANT      2k: DoReMi and DoGE with proxies of 2,000 steps, next to uniform and Chameleon
#   BASE         model size of the base models of mini, small, gpu and tiny (nano; gpu: llama-30m)
#   PROXY_MODEL  model size of the proxies of mini, small, gpu and tiny (nano; gpu: llama-30m)
#   CORPUS_NAME  text of SIZE=small and gpu: installed, registers or code (installed)
#   METHODS      columns of the table, named as by compute_mixture --list-methods;
#                doremi-2k and doge-2k use proxies with Chameleon's number of steps;
#                chameleon-pretrain, -finetune, -paper and -scaled use that mode or recipe;
#                odm, chameleon-online and other online methods train base models with
#                --online, and need SIZE=small or gpu; printed-COLUMN is a column of the paper's tables of
#                weights, and needs EXPERIMENT (mini: uniform natural unimax chameleon doremi doge
#                regmix surrogate mixing-laws; small: uniform natural chameleon doremi surrogate odm;
#                EXPERIMENT: the columns of its tables in the paper)
#   TARGETS      leave-one-out, or names of domains, separated by spaces, or by commas if a name has
#                spaces: for each of them, a comparison in RUN/targets/NAME whose corpus holds the
#                domain out and whose mixtures have it as their target; then one table of the losses
#                of these targets. METHODS may have mixmin, mixmin-experts (a trained model
#                per domain), chameleon-target-pretrain and chameleon-target-finetune (uniform natural
#                chameleon chameleon-target-pretrain chameleon-target-finetune mixmin); with
#                SIZE=small, base models have 600 steps (gpu: 1200), and there are three seeds
#   PRETRAINED   with SIZE=small, the folder of an earlier comparison: its base models of uniform are
#                fine-tuned on CORPUS_NAME, each with its own seed, and the first one embeds the
#                domains (METHODS: uniform chameleon-finetune chameleon-pretrain; with TARGETS:
#                uniform chameleon-target-finetune mixmin). With EXPERIMENT=wiki40b and stack, the run
#                or checkpoint that is fine-tuned with every seed and embeds the domains
#                (runs/pile/5-base/chameleon-pretrain-seed1)
#   PROXY        with EXPERIMENT=pile, the run or checkpoint that embeds the domains
#                (runs/slimpajama/2-proxy/82m-seed1)
#   SEEDS        seeds of the base models, at least three ("1 2 3"; small: "1 2 3 4 5")
#   BASELINE     the column that perplexities are compared with (uniform; pile: printed-human)
#   PROXY_SEED   seed of the proxies (1)
#   RUN          folder of the experiment (mini: runs/compare-mini; EXPERIMENT: runs/EXPERIMENT)
#   CORPUS       output of preprocess_data (RUN/1-corpus; mini and small create it)
#   MAX_BYTES, VOCAB_SIZE   maximum bytes of text per domain, and entries of the tokenizer, of a corpus
#                that the script creates (mini: 3500000 and 8192; small: 20000000 and 4096)
#   TOKENIZER    tokenizer of such a corpus (trained; with PRETRAINED: PRETRAINED/tokenizer.json)
#   TASKS        yes: evaluate downstream tasks, too (yes with slimpajama, slimpajama-1.2b and pile,
#                as in the paper; no with SIZE=tiny unless DATA_DIR is set; otherwise no)
#   DATA_DIR     folder with copies of the tasks' datasets as OWNER/NAME (the hub)
#   JOBS_AT_ONCE number of concurrent jobs with one rank each; with 1, a job gets all ranks (mini: 2;
#                EXPERIMENT: 1)
#   RECORD       a .json file for the table with date, machine, versions and command; a Markdown
#                file is written next to it
#   BASE_STEPS, PROXY_STEPS, LONG_PROXY_STEPS, MEMBER_STEPS   steps; EXPERIMENT: only BASE_STEPS, and
#                not of wiki40b and stack
#   REGMIX_MEMBERS   proxies of RegMix and the surrogate (mini: 48; small: 32; tiny: 16)
set -euo pipefail
EXPERIMENT=${EXPERIMENT:-}
SIZE=${SIZE:-${EXPERIMENT:+paper}}
SIZE=${SIZE:-mini}
[ "$SIZE" != paper ] || EXPERIMENT=${EXPERIMENT:-slimpajama}
COMMAND_LINE=
for choice in SIZE EXPERIMENT VARIANT SETTINGS CORPUS_NAME TARGETS PRETRAINED PROXY PROXY_MODEL BASE \
  METHODS SEEDS BASELINE PROXY_SEED RUN CORPUS MAX_BYTES VOCAB_SIZE TOKENIZER TASKS DATA_DIR JOBS_AT_ONCE \
  BASE_STEPS PROXY_STEPS LONG_PROXY_STEPS MEMBER_STEPS REGMIX_MEMBERS TP PP NPROC; do
  [ -z "${!choice:-}" ] || printf -v COMMAND_LINE '%s%s=%q ' "$COMMAND_LINE" "$choice" "${!choice}"
done
printf -v COMMAND_LINE '%sbash examples/compare_methods.sh%s' "$COMMAND_LINE" "${*:+ $*}"
source "$(dirname "$0")/launch.sh"
source "$HERE/jobs.sh"
source "$HERE/comparison_settings.sh"

# Reject invalid settings at the start, not after the training, when the table is made.
check_choice() {
  local name
  for name in $SEEDS $PROXY_SEED; do
    [[ $name =~ ^(0|[1-9][0-9]*)$ ]] || refuse "SEEDS and PROXY_SEED: $name is not an integer"
  done
  comparison --check choice || exit
  for name in $METHODS; do
    [ -z "$(online_method "$name")" ] || [[ " ${BASE_FLAGS[*]} ${EXTRA[*]} " == *" --permutation "* ]] ||
      refuse "METHODS: $name requires SIZE=small or gpu, or -- --permutation epoch"
    [[ $name != printed-* || -n $EXPERIMENT ]] || refuse "METHODS: $name requires EXPERIMENT"
    ! uses_proxy "$name" || is_found "$name" || [ "$EXPERIMENT" != pile ] || [ -d "$PROXY" ] ||
      refuse "no run at $PROXY; create it with 'EXPERIMENT=slimpajama bash $0', or set PROXY"
  done
}

# comparison FLAGS...: run compare_methods on METHODS and SEEDS.
comparison() {
  # shellcheck disable=SC2086   # names and seeds contain no spaces
  python -m megatron_chameleon compare_methods --run "$RUN" --mixtures $METHODS --seeds $SEEDS \
    --baseline "$BASELINE" "$@"
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

# Print the run or checkpoint that training with a seed starts from; nothing if from scratch.
initial_run() {
  [ -n "$PRETRAINED" ] || return 0
  if [ "$SIZE" = small ]; then echo "$PRETRAINED/5-base/uniform-seed$1"; else echo "$PRETRAINED"; fi
}

VARIANT=${VARIANT:-}
TARGETS=${TARGETS:-}
TARGET=${TARGET:-}    # set for the comparison of one of TARGETS
PRETRAINED=${PRETRAINED:-}
PROXY_SEED=${PROXY_SEED:-1}
HAS_PROXY=            # not empty if PROXY is an existing model, which no job trains
SHARED=               # a run folder whose proxies and mixtures RUN uses
BASE_FLAGS=()
[[ -z $VARIANT || $VARIANT:$EXPERIMENT = 2k:slimpajama ]] ||
  refuse "VARIANT=$VARIANT: must be unset, or 2k with EXPERIMENT=slimpajama"
[[ -z $PRETRAINED || $SIZE = small || $EXPERIMENT =~ ^(wiki40b|stack)$ ]] ||
  refuse "PRETRAINED: requires SIZE=small, EXPERIMENT=wiki40b or EXPERIMENT=stack"
[[ -z $TARGETS || -z $EXPERIMENT ]] || refuse "TARGETS: requires SIZE=mini, small, gpu or tiny"
[[ -z ${PROXY:-} || $EXPERIMENT = pile ]] || refuse "PROXY: requires EXPERIMENT=pile"
[[ -z ${BASE:-} || -z $EXPERIMENT ]] ||
  refuse "BASE: requires SIZE=mini, small, gpu or tiny; the larger model is EXPERIMENT=slimpajama-1.2b"
[[ -z ${BASE_STEPS:-} || ! $EXPERIMENT =~ ^(wiki40b|stack)$ ]] ||
  refuse "BASE_STEPS: does not apply to EXPERIMENT=$EXPERIMENT, whose steps the paper states"
[[ -z ${TASKS:-} || -n $EXPERIMENT && $TASKS =~ ^(yes|no)$ ]] ||
  refuse "TASKS=$TASKS: must be unset, or yes or no with an EXPERIMENT"
case $EXPERIMENT:$SIZE in
  :gpu) gpu ;;
  :mini | :small | :tiny)
    export CUDA_VISIBLE_DEVICES= TORCHDYNAMO_DISABLE=1   # models too small for a GPU
    "$SIZE"
    ;;
  :*) refuse "SIZE=$SIZE: must be mini, small, gpu, paper or tiny" ;;
  *:paper | *:tiny) papers_experiment ;;
  *) refuse "SIZE=$SIZE: must be paper or tiny with an EXPERIMENT" ;;
esac
SEEDS=${SEEDS:-1 2 3}
BASELINE=${BASELINE:-uniform}
check_choice
[ -n "$EXPERIMENT" ] || finish_small_settings
TRAIN+=("${EXTRA[@]}")
REGMIX_SWARM=$RUN/4-mixture/regmix     # the surrogate is fitted to RegMix's proxies
START=(python)
[ "$JOBS_AT_ONCE" != 1 ] || START=(torchrun "${RANKS[@]}")

# The following functions run the jobs. Each job replaces its shell (exec), so that a signal to the
# job reaches the command.

train_proxy() {
  [ -z "$EXPERIMENT" ] || launcher pretrain_82m_proxy
  limit_time
  exec "${START[@]}" -m megatron_chameleon pretrain_gpt "${PROXY_FLAGS[@]}" "${LIMIT[@]}" \
    --train-iters "$PROXY_STEPS" --corpus "$CORPUS" --mixture uniform --run-dir "$PROXY"
}

# launcher NAME FLAGS...: run another launcher with the paper's settings.
launcher() {
  local size=(-u SIZE)
  [ "$SIZE" != tiny ] || size=(SIZE=tiny)
  [ "$JOBS_AT_ONCE" = 1 ] || size+=(NPROC=1)
  exec env -u MIXTURE "${size[@]}" RUN="$RUN" CORPUS="$CORPUS" SEED="$PROXY_SEED" RECIPE="$RECIPE" \
    bash "$HERE/$1.sh" -- "${@:2}"
}

find_mixture() {
  local name=$1 method=${1%-2k} flags=(--output "$RUN/4-mixture/$1.json") steps
  limit_time
  if uses_proxy "$name"; then
    case $name in
      chameleon-finetune) flags+=(--mode finetune) ;;
      chameleon-paper | chameleon-scaled) flags+=(--recipe "${name#chameleon-}") ;;
      chameleon-target-*) flags+=(--mode "${name#chameleon-target-}" --target "$TARGET") ;;
    esac
    exec "${ENDED[@]}" "${START[@]}" -m megatron_chameleon compute_mixture "${EMBED[@]}" "${flags[@]}" \
      --checkpoint "$PROXY" --store "$RUN/3-embeddings/${PROXY##*/}"
  elif [[ $name == printed-* ]]; then
    export PUBLISHED=$DATA_SET/${name#printed-}
    launcher baselines/manual
  elif [ -n "$EXPERIMENT" ]; then
    flags+=(--token-budget "$BUDGET")
    # paper: tab:ppl_2k, "2k steps"
    [[ $name = "$method" || $SIZE = tiny ]] || flags+=(--train-iters 2000)
    launcher "baselines/${method//-/_}" "${flags[@]}"
  fi
  steps=$LONG_PROXY_STEPS
  [ "$name" = "$method" ] || steps=$PROXY_STEPS
  case $method in
    doremi | doge) flags+=("${PROXY_FLAGS[@]}" --train-iters "$steps" --accept-uncertain) ;;
    regmix) flags+=("${SWARM[@]}" --num-proxies "$REGMIX_MEMBERS" --accept-uncertain) ;;
    surrogate)   # if no gain is certain, before the proxies or after, its mixture is uniform
      flags+=("${SWARM[@]}" --num-proxies "$REGMIX_MEMBERS" --work-dir "$REGMIX_SWARM" --prior uniform)
      ;;
    mixing-laws) flags+=("${SWARM[@]}" --num-proxies "$LAWS_MEMBERS" --accept-uncertain) ;;
    mixmin-experts)   # one model per domain, which all targets share
      method=mixmin
      flags+=(--experts "${PROXY_FLAGS[1]}" "${PROXY_FLAGS[@]:2}" --train-iters "$PROXY_STEPS"
        --work-dir "$EXPERT_RUNS")
      ;;
  esac
  [[ -z $TARGET || ! $method =~ ^(mixmin|doge|regmix|surrogate|mixing-laws)$ ]] ||
    flags+=(--target "$TARGET")
  exec "${ENDED[@]}" "${START[@]}" -m megatron_chameleon compute_mixture --method "$method" --corpus "$CORPUS" \
    --token-budget "$BUDGET" "${flags[@]}"
}

train_base() {
  local mixture=(--mixture "$RUN/4-mixture/$1.json") online from
  online=$(online_method "$1")
  [ -z "$online" ] || mixture=(--mixture uniform --online "$online")
  from=$(initial_run "$2")
  [ -z "$from" ] || mixture+=(--pretrained-checkpoint "$from")
  limit_time
  exec "${START[@]}" -m megatron_chameleon pretrain_gpt "${TRAIN[@]}" "${LIMIT[@]}" --seed "$2" \
    "${mixture[@]}" --run-dir "$RUN/5-base/$1-seed$2"
}

evaluate() {
  local seed run runs=()
  for seed in $SEEDS; do   # the tool skips existing results of the same weights
    run=$1-seed$seed
    runs+=(--checkpoint "$RUN/5-base/$run" --output "$RUN/6-evaluation/$run.json")
  done
  limit_time
  exec "${ENDED[@]}" "${START[@]}" -m megatron_chameleon evaluate perplexity "${EVALUATE[@]}" "${runs[@]}"
}

evaluate_tasks() {
  local seed
  CHECKPOINTS=
  for seed in $SEEDS; do CHECKPOINTS+="$RUN/5-base/$1-seed$seed "; done
  export CHECKPOINTS
  launcher evaluate_downstream
}

# Return whether a job was stopped by STOP_AT. Training and other launchers handle STOP_AT
# themselves; other commands are killed by timeout.
was_ended() {
  case $1 in
    proxy | *-seed* | *-tasks) return 1 ;;
    chameleon* | *-evaluation) is_out_of_time ;;
    *) [ -z "$EXPERIMENT" ] && is_out_of_time ;;
  esac
}

# The following functions return whether a job is done.

is_trained() { is_finished "$RUN/5-base/$1-seed$2" || is_uniform "$1"; }

# Return whether all results of a mixture exist and belong to the current weights.
is_evaluated() { has_results "$1" .json evaluations evaluation; }

has_tasks() { has_results "$1" -downstream.json downstream tasks; }

# has_results NAME ENDING CHECK JOB: check the results of a mixture's base models; log to NAME-JOB.log.
has_results() {
  local seed
  ! is_uniform "$1" || return 0
  for seed in $SEEDS; do
    [ -e "$RUN/6-evaluation/$1-seed$seed$2" ] || return 1
  done
  METHODS=$1 comparison --check "$3" 2>> "$RUN/logs/$1-$4.log"
}

# Return whether a mixture equals uniform to nine digits, and uniform is among METHODS.
is_uniform() {
  [[ $1 != uniform && " $METHODS " == *" uniform "* ]] && is_found "$1" && is_found uniform &&
    [ "$(weights_of "$1")" = "$(weights_of uniform)" ]
}

weights_of() {
  sed -n '/^  "weights": {/,/^  }/ s/\(\.[0-9]\{9\}\)[0-9]*/\1/p' "$RUN/4-mixture/$1.json"
}

# Reject a run folder that was started with other settings.
hold_to_settings() {
  local proxies="seed of the proxies: $PROXY_SEED"
  if [ -z "$EXPERIMENT" ]; then
    proxies+=$'\n'"proxies: ${PROXY_FLAGS[*]}, $PROXY_STEPS and $LONG_PROXY_STEPS steps"
    proxies+=$'\n'"swarms: ${SWARM[*]}, $REGMIX_MEMBERS and $LAWS_MEMBERS members"
    proxies+=$'\n'"embeddings: ${EMBED[*]}"
  else
    proxies+=$'\n'"settings: $SIZE ${SETTINGS:-default}"
  fi
  hold "${SHARED:-$RUN}/logs/settings-proxies.txt" "$proxies"
  hold "$RUN/logs/settings.txt" \
    "base models: ${TRAIN[*]}${PRETRAINED:+ from $PRETRAINED}"$'\n'"evaluation: ${EVALUATE[*]}"
}

# hold FILE TEXT: write TEXT to FILE, or fail if FILE differs.
hold() {
  mkdir -p "${1%/*}"
  [ -e "$1" ] || printf '%s\n' "$2" > "$1"
  [ "$(cat "$1")" = "$2" ] ||
    refuse "$RUN was started with other settings (see $1); use those, or another RUN"
}

# Let RUN use the proxies, embeddings and mixtures of SHARED.
link_shared() {
  local stage
  for stage in 2-proxy 3-embeddings 4-mixture; do
    mkdir -p "$SHARED/$stage"
    [ -e "$RUN/$stage" ] || ln -s "$(realpath "$SHARED/$stage")" "$RUN/$stage"
  done
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
  local name seed proxy= uniform= bases
  for name in $METHODS; do
    uses_proxy "$name" && [ -z "$HAS_PROXY" ] || continue
    proxy=proxy
    job proxy "$(seconds_for proxy)" "" "is_finished $(printf %q "$PROXY")" train_proxy
    break
  done
  for name in $(longest_first); do
    local after=
    ! uses_proxy "$name" || after=$proxy
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
    [ "${TASKS:-no}" = no ] ||
      job "$name-tasks" "$(seconds_for tasks)" "$bases" "has_tasks $name" evaluate_tasks "$name"
  done
}

print_estimate() {
  local name sum=0
  for name in "${JOBS[@]}"; do sum=$((sum + EXPECTED[$name])); done
  echo "all jobs take about $((sum / JOBS_AT_ONCE / 60)) minutes on an idle machine"
}

# Hold each target out of the corpus, compare the methods on it, and compare these targets. Unknown
# names are rejected before the first comparison.
compare_targets() {
  local number names folders
  mapfile -d '' -t names < <(list_targets names)
  wait $! || exit 2
  mapfile -d '' -t folders < <(list_targets folders)
  [ "${#names[@]}" != 0 ] || refuse "TARGETS=$TARGETS: names no domain"
  for number in "${!names[@]}"; do
    [ -e "${folders[number]}/1-corpus/corpus.json" ] ||
      python -m megatron_chameleon import_corpus --corpus "$CORPUS" --held-out "${names[number]}" \
        --output "${folders[number]}/1-corpus"
  done
  for number in "${!names[@]}"; do
    say "target: ${names[number]}"
    env -u TARGETS -u RECORD TARGET="${names[number]}" RUN="${folders[number]}" \
      CORPUS="${folders[number]}/1-corpus" EXPERT_RUNS="$EXPERT_RUNS" METHODS="$METHODS" SEEDS="$SEEDS" \
      BASE_STEPS="$BASE_STEPS" bash "$0" ${EXTRA:+-- "${EXTRA[@]}"} || exit
  done
  set -- --targets "${names[@]}"
  [ -z "${RECORD:-}" ] || set -- "$@" --record "$RECORD" --command "$COMMAND_LINE"
  comparison "$@"
}

# Print the names of TARGETS, or the folders of their comparisons, each followed by a NUL.
list_targets() {
  python -c '
import json, sys
from megatron_chameleon.artifacts.corpus import file_name_of
what, value, run, corpus = sys.argv[1:]
with open(corpus) as stream:
    domains = list(json.load(stream)["domains"])
if value == "leave-one-out":
    names = domains
elif value in domains:
    names = [value]
else:
    names = [name.strip() for name in (value.split(",") if "," in value else value.split())]
names = list(filter(None, dict.fromkeys(names)))
for name in names:
    if name not in domains:
        print(f"error: TARGETS={value}: {name} is not a domain of {corpus}", file=sys.stderr)
        sys.exit(2)
for name in names:
    print(name if what == "names" else f"{run}/targets/{file_name_of(name)}", end="\0")
' "$1" "$TARGETS" "$RUN" "$CORPUS/corpus.json"
}

compare() {
  local flags=(--name "compare_methods${VARIANT:+-$VARIANT}")
  [ -z "$HAS_PROXY" ] || flags+=(--existing-model)
  [ -z "${RECORD:-}" ] ||
    flags+=(--record "$RECORD" --command "$COMMAND_LINE"
      --wall-seconds "$(cat "$RUN/logs/seconds")")
  if [ -n "$TARGET" ]; then
    comparison "${flags[@]}" > "$RUN/logs/comparison.txt"
    return
  fi
  comparison "${flags[@]}"
  # The report shows the paper's figures next to those of the runs.
  [ -z "$EXPERIMENT" ] ||
    python -m megatron_chameleon make_report "$RUN" --baseline "$BASELINE-seed${SEEDS%% *}"
}

{ # bash parses this whole block before running it, so that the file can be edited meanwhile.
  if [ -n "$TARGETS" ]; then
    compare_targets
    exit
  fi
  hold_to_settings
  [ -z "$SHARED" ] || link_shared
  list_jobs
  [ -n "$EXPERIMENT" ] || print_estimate
  run_jobs "$JOBS_AT_ONCE"
  on_first_node compare
  exit
}
