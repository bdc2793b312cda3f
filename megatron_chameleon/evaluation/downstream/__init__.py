"""Is the model better at tasks? lm-eval's tasks, answered by our checkpoints in any layout."""
