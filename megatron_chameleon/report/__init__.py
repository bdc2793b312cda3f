"""From the artifacts of a run folder to tables and pictures. Imports no model code."""
