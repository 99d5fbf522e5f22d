"""Optimizers: updates by layer, master weights, versions of weights."""
