"""The same mixture again and again, with one knob changed at a time."""
