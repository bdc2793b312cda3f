"""Tables and figures from the artifacts of a run folder. Imports no model code."""
