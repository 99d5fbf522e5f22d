"""Fake devices: tensors with shapes, strides and storages but no bytes, that follow the kernels of a target."""
