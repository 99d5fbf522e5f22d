"""Helpers of tests: oracles, models, plans, workers and scripts."""
