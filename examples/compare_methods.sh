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
export SIZE=${SIZE:-${EXPERIMENT:+paper}}
SIZE=${SIZE:-mini}
[ "$SIZE" != paper ] || export EXPERIMENT=${EXPERIMENT:-slimpajama}
source "$(dirname "$0")/launch.sh"
exec python -m megatron_chameleon.experiments.compare "$HERE" "${RANKS[@]}" -- "${EXTRA[@]}"
