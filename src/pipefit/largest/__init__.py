"""The largest size that fits, plans of tasks, and the overview of what fits."""
