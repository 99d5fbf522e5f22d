"""Offloading of tensors and state: copies, streams, memory of hosts, peers and disks."""
