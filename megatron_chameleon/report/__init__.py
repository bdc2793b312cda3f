"""Tables and figures from the artifacts of a run folder. The package imports no model code."""
