"""Chameleon from the proxy and the corpus to the mixture, once and during training."""
