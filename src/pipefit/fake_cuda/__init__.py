"""Fake devices: their tensors have shapes, strides and storages but no bytes, and follow the kernels of a target."""
