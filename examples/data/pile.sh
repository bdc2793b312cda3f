#!/usr/bin/env bash
# Prepare the 17 freely licensed domains of the Pile (of 22), with their own validation and test text.
#
# Data: monology/pile-uncopyrighted on the Hugging Face hub; JSON lines (.jsonl.zst) in train/,
# val.jsonl.zst and test.jsonl.zst, with the text in `text` and the domain in `meta.pile_set_name`.
# Download the data first:
#   hf download monology/pile-uncopyrighted --repo-type dataset --local-dir data/pile
#   TOKENIZER=tokenizer.json bash examples/data/pile.sh
# In a copy of the whole Pile, the other five domains are skipped. On n machines that share INPUT
# and OUTPUT, set SHARD=1/n ... SHARD=n/n; then run once without SHARD.
set -euo pipefail

INPUT=${INPUT:-data/pile}              # the folder that holds train, val.jsonl.zst, test.jsonl.zst
OUTPUT=${OUTPUT:-corpora/pile}         # output corpus
TOKENIZER=${TOKENIZER:-tokenizer.json} # --tokenizer-model of preprocess_data
WORKERS=${WORKERS:-}                   # processes; default: one fewer than cores
SHARD=${SHARD:-}                       # i/n: machine i of n

NAMES=("ArXiv=arxiv" "DM Mathematics=dm_mathematics" "Enron Emails=enron_emails"
  "EuroParl=europarl" "FreeLaw=freelaw" "Github=github" "Gutenberg (PG-19)=gutenberg_pg_19"
  "HackerNews=hackernews" "NIH ExPorter=nih_exporter" "PhilPapers=philpapers" "Pile-CC=pile_cc"
  "PubMed Abstracts=pubmed_abstracts" "PubMed Central=pubmed_central"
  "StackExchange=stackexchange" "USPTO Backgrounds=uspto_backgrounds" "Ubuntu IRC=ubuntu_irc"
  "Wikipedia (en)=wikipedia_en"
  "Books3=" "BookCorpus2=" "OpenSubtitles=" "OpenWebText2=" "YoutubeSubtitles=")

python -m megatron_chameleon preprocess_data --input "$INPUT/train" \
  --valid-input "$INPUT/val.jsonl.zst" --test-input "$INPUT/test.jsonl.zst" --output "$OUTPUT" \
  --tokenizer-model "$TOKENIZER" --domain-key meta.pile_set_name \
  --rename-domain "${NAMES[@]}" ${WORKERS:+--workers "$WORKERS"} ${SHARD:+--shard "$SHARD"} "$@"
