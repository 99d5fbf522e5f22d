"""Tensors and state that are offloaded: copies, streams, memory of hosts, peers and disks."""
