"""Studies: lists of jobs, run by one executor in local processes, or as tasks of a Ray cluster."""
