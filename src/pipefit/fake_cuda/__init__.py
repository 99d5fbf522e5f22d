"""Fake devices: tensors with shapes, strides and storages but no bytes, which follow the kernels of a
target.
"""
