"""What is the largest that fits: searches over plans, each end of the answer certified by the dry run."""
