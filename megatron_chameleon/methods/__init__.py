"""One file a mixing method, found by being there; the folders beside them are their machinery."""
