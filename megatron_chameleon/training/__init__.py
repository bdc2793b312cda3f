"""Training: from samples and a model to checkpoints and metrics."""
