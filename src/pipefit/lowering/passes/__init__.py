"""Passes of the lowering: each rewrites the program for one purpose."""
