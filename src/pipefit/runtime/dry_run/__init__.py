"""The dry run: the runtime over fake tensors, with representatives of all equal parts."""
