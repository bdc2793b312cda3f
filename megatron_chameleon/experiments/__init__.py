"""Experiments of many runs, as lists of jobs. The launchers in ``examples/`` start them."""
