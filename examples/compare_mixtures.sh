# shellcheck shell=bash
# Launchers that compare mixtures source this file after launch.sh and after setting RUN, CORPUS and
# MIXTURE. The same command resumes after an interruption.

# fine_tune_and_compare RECIPE: compute weights with the run PRETRAINED, fine-tune this model with
# each mixture in MIXTURE, and compare the runs. examples/data/RECIPE creates the corpus.
fine_tune_and_compare() {
  choose finetune "$1"
  start_from "$PRETRAINED"
  weigh_domains "$PRETRAINED" finetune pretrain
  train_and_compare
}

# pretrain_and_compare RECIPE: train PROXY_SIZE with uniform weights, compute weights with this
# proxy, pretrain SIZE with each mixture in MIXTURE, and compare the runs. examples/data/RECIPE
# creates the corpus. Flags after -- apply to SIZE.
pretrain_and_compare() {
  local size=$SIZE proxy=$RUN/2-proxy/$PROXY_SIZE-seed$SEED
  SIZE=$PROXY_SIZE
  choose proxy "$1"
  say "Proxy, uniform weights"
  limit_time
  torchrun "${RANKS[@]}" -m megatron_chameleon pretrain_gpt "${TRAIN[@]}" "${LIMIT[@]}" \
    --mixture uniform --run-dir "$proxy"
  weigh_domains "$proxy" pretrain
  SIZE=$size
  choose base "$1"
  train_and_compare
}

# weigh_domains CHECKPOINT MODE...: write RUN/4-mixture/chameleon-MODE.json for every mode.
weigh_domains() {
  say "Weights from the embeddings of $1"
  EMBED+=(--checkpoint "$1" --store "$RUN/3-embeddings")
  within_limit torchrun "${RANKS[@]}" -m megatron_chameleon compute_mixture "${EMBED[@]}" --mode "$2" \
    --output "$RUN/4-mixture/chameleon-$2.json"
  # The embeddings are stored now, so the other modes run no forward pass and need only one process.
  local mode
  for mode in "${@:3}"; do
    on_first_node python -m megatron_chameleon compute_mixture "${EMBED[@]}" "${ALONE[@]}" --mode "$mode" \
      --output "$RUN/4-mixture/chameleon-$mode.json"
  done
}

# Train with each mixture in MIXTURE, and compare the runs; choose has been called.
train_and_compare() {
  local choice runs=()
  for choice in $MIXTURE; do
    mixture "$choice"
    limit_time
    say "Training, $NAME"
    torchrun "${RANKS[@]}" -m megatron_chameleon pretrain_gpt "${TRAIN[@]}" "${LIMIT[@]}" \
      --mixture "$WEIGHTS" --run-dir "$RUN/5-base/$NAME-seed$SEED" "${EXTRA[@]}"
    runs+=(--checkpoint "$RUN/5-base/$NAME-seed$SEED")
    runs+=(--output "$RUN/6-evaluation/$NAME-seed$SEED.json")
  done
  say "Comparison"
  within_limit torchrun "${RANKS[@]}" -m megatron_chameleon evaluate perplexity "${EVALUATE[@]}" "${runs[@]}"
  on_first_node python -m megatron_chameleon make_report "$RUN"
}
