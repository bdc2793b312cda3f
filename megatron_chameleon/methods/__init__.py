"""One file a mixing method: what it runs to feed its maths in ``mixture``."""
