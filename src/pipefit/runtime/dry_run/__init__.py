"""The dry run: the runtime over fake tensors, with parts that stand for all that equal them."""
