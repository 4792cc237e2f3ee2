"""Serving: a live model, the protocol, and weights that are updated in place."""
