#!/usr/bin/env bash
# The Pile without what may not be copied: 17 of its 22 domains, with validation and test text of
# their own.
#
# The data: monology/pile-uncopyrighted on the Hugging Face hub; JSON lines (.jsonl.zst) in train/,
# val.jsonl.zst and test.jsonl.zst, `text`, and the domain in `meta.pile_set_name`. Fetch it first:
#   hf download monology/pile-uncopyrighted --repo-type dataset --local-dir data/pile
#   TOKENIZER=tokenizer.json bash examples/data/pile.sh
# In a copy of the whole Pile the five domains that are missing here are left out.
# On n machines that share INPUT and OUTPUT: SHARD=1/n ... SHARD=n/n, and in the end once without.
set -euo pipefail

INPUT=${INPUT:-data/pile}              # the folder that holds train, val.jsonl.zst, test.jsonl.zst
OUTPUT=${OUTPUT:-corpora/pile}         # the corpus is written here
TOKENIZER=${TOKENIZER:-tokenizer.json} # what tools/preprocess_data.py takes as --tokenizer-model
WORKERS=${WORKERS:-}                   # processes; one fewer than there are cores
SHARD=${SHARD:-}                       # i/n: the i-th of n machines

NAMES=("ArXiv=arxiv" "DM Mathematics=dm_mathematics" "Enron Emails=enron_emails"
  "EuroParl=europarl" "FreeLaw=freelaw" "Github=github" "Gutenberg (PG-19)=gutenberg_pg_19"
  "HackerNews=hackernews" "NIH ExPorter=nih_exporter" "PhilPapers=philpapers" "Pile-CC=pile_cc"
  "PubMed Abstracts=pubmed_abstracts" "PubMed Central=pubmed_central"
  "StackExchange=stackexchange" "USPTO Backgrounds=uspto_backgrounds" "Ubuntu IRC=ubuntu_irc"
  "Wikipedia (en)=wikipedia_en"
  "Books3=" "BookCorpus2=" "OpenSubtitles=" "OpenWebText2=" "YoutubeSubtitles=")

python "$(dirname "$0")/../../tools/preprocess_data.py" --input "$INPUT/train" \
  --valid-input "$INPUT/val.jsonl.zst" --test-input "$INPUT/test.jsonl.zst" --output "$OUTPUT" \
  --tokenizer-model "$TOKENIZER" --domain-key meta.pile_set_name \
  --rename-domain "${NAMES[@]}" ${WORKERS:+--workers "$WORKERS"} ${SHARD:+--shard "$SHARD"} "$@"
