# shellcheck shell=bash
# The fine-tuning launchers source this file after launch.sh and after setting
# RUN, CORPUS, PRETRAINED and MIXTURE. The same command resumes after an interruption.

# compare_mixtures RECIPE: compute weights with PRETRAINED, fine-tune this model with each mixture
# in MIXTURE, and compare the runs. examples/data/RECIPE creates the corpus.
compare_mixtures() {
  choose finetune "$1"
  start_from "$PRETRAINED"
  weigh_domains
  local choice runs=()
  for choice in $MIXTURE; do
    mixture "$choice"
    limit_time
    say "Fine-tuning, $NAME"
    torchrun "${RANKS[@]}" "$TOOLS/pretrain_gpt.py" "${TRAIN[@]}" "${LIMIT[@]}" \
      --mixture "$WEIGHTS" --run-dir "$RUN/5-base/$NAME-seed$SEED" "${EXTRA[@]}"
    runs+=(--checkpoint "$RUN/5-base/$NAME-seed$SEED")
    runs+=(--output "$RUN/6-evaluation/$NAME-seed$SEED.json")
  done
  say "Comparison"
  within_limit torchrun "${RANKS[@]}" "$TOOLS/evaluate.py" perplexity "${EVALUATE[@]}" "${runs[@]}"
  on_first_node python "$TOOLS/make_report.py" "$RUN"
}

# Write fine-tuning and pretraining weights to RUN/4-mixture.
weigh_domains() {
  say "Weights from the pretrained model: no proxy is needed"
  EMBED+=(--checkpoint "$PRETRAINED" --store "$RUN/3-embeddings")
  within_limit torchrun "${RANKS[@]}" "$TOOLS/compute_mixture.py" "${EMBED[@]}" --mode finetune \
    --output "$RUN/4-mixture/chameleon-finetune.json"
  # The embeddings are stored now, so the second mode runs no forward pass and needs only one
  # process.
  on_first_node python "$TOOLS/compute_mixture.py" "${EMBED[@]}" "${ALONE[@]}" --mode pretrain \
    --output "$RUN/4-mixture/chameleon-pretrain.json"
}
