"""Evaluation: held-out perplexity per domain and downstream accuracy."""
