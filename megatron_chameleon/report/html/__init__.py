"""A report as one HTML page that loads nothing: style, script and pictures are in it."""
