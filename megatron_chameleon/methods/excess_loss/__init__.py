"""DoReMi's machinery: a reference, a proxy that is watched, and the mixture they give."""
