"""Clusters of the published rows: pipefit's presets where it has the device, else data sheets, and their networks."""

from __future__ import annotations

import re
from dataclasses import replace

from rows import Inexpressible, Row

from pipefit import Cluster, load_cluster
from pipefit.schema.devices import Device, DeviceKind, Member, MemberKind

GIB = 1 << 30
# presets of a whole node by the name of its GPU and, where there are two, its nominal memory
NODES = {"A100 80GB": "dgx-a100", "A100 40GB": "dgx2-a100", "V100 32GB": "dgx1-v100", "V100 16GB": "dgx1-v100",
         "H100": "hgx-h100", "H200": "hgx-h200", "B200": "hgx-b200", "GH200": "gh200"}  # fmt: skip
SMALLER = {"V100 16GB": 16160 << 20}  # memory of a preset's GPUs where it was sold with less
CARDS = {"RTX 3090": "rtx-3090", "RTX 4090": "rtx-4090", "A10G": "a10g",
         "L40S": "l40s", "RTX 6000 Ada": "rtx-6000-ada", "RTX A6000": "rtx-a6000",
         "RTX PRO 6000": "rtx-pro-6000"}  # fmt: skip
# of data sheets: memory, bandwidth, FLOP/s by dtype
SHEETS = {
    "Tesla P40": (22.4, 346e9, {"float32": 11.76e12}),
    "A10": (22.06, 600e9, {"float32": 31.2e12, "tf32": 62.5e12, "float16": 125e12, "bfloat16": 125e12}),
    "Quadro RTX 8000": (47.5, 672e9, {"float32": 16.3e12, "float16": 130.5e12}),
    "A100 PCIe 40GB": (
        39.4,
        1555e9,
        {"float32": 19.5e12, "tf32": 156e12, "float16": 312e12, "bfloat16": 312e12},
    ),
    "A100 PCIe 80GB": (
        79.15,
        1935e9,
        {"float32": 19.5e12, "tf32": 156e12, "float16": 312e12, "bfloat16": 312e12},
    ),
    "H100 PCIe": (79.18, 2000e9, {"float32": 51e12, "tf32": 378e12, "float16": 756e12, "bfloat16": 756e12}),
}
ALIKE = {
    "A100": "dgx-a100",
    "H100": "hgx-h100",
}  # presets of the same chip, for the shares that kernels reach
# bytes per second of one GPU to other nodes, by words of the interconnect
NETWORKS = {r"8 x 200": 25e9, r"400 Gb/s RDMA a GPU": 50e9, r"RoCE 1600": 25e9,
            r"4 x V100.*4 x 100": 2.64e9, r"8 GPUs a node.*4 x 100": 2.53e9}  # fmt: skip
USUAL_NETWORK = {"A100": 25e9, "V100": 3e9}  # of a GPU, where not said; 50e9 for later ones


def gpu_of(row: Row) -> str:
    """Return the name of a row's GPU, without its form factor unless that has other figures.

    Raises:
        Inexpressible: no GPU is named.
    """
    text = re.sub(r"\(.*|NVIDIA|SXM\d?|Gen5", "", row.gpu).strip()
    if not text:
        raise Inexpressible("the GPU is not said")
    return text


def memory_of(row: Row) -> str:
    """Return the nominal memory of a row's GPU, such as `80GB`."""
    return (re.match(r"\d+GB", row.gpu_mem_nominal) or [""])[0]


def cluster_of(row: Row, devices: int) -> Cluster:
    """Return a cluster of `devices` GPUs of a row.

    Raises:
        Inexpressible: neither a preset nor a data sheet is known for the GPU.
    """
    gpu, memory = gpu_of(row), memory_of(row)
    for name in (gpu, f"{gpu} {memory}"):
        if name in NODES:
            cluster = _nodes(row, gpu, NODES[name], devices)
            if name in SMALLER:
                each = tuple(replace(one, memory_bytes=SMALLER[name]) for one in cluster.devices)
                return replace(cluster, devices=each)
            return cluster
        if name in CARDS:
            if devices > 16:
                raise Inexpressible("more cards than fit into a box")
            return load_cluster(f"{devices}x-{CARDS[name]}")
        if name in SHEETS:
            gib, bandwidth, flops = SHEETS[name]
            kind = DeviceKind(name=name, flops=flops, memory_bandwidth=bandwidth)
            if alike := next((node for words, node in ALIKE.items() if name.startswith(words)), None):
                kind = replace(
                    load_cluster(alike).devices[0].kind, name=name, flops=flops, memory_bandwidth=bandwidth
                )
            box = load_cluster(f"{devices}x-v100-16gb")
            each = tuple(replace(one, kind=kind, memory_bytes=int(gib * GIB)) for one in box.devices)
            return replace(box, name=name, devices=each)
    raise Inexpressible("the GPU has neither a preset nor a data sheet here")


def _nodes(row: Row, gpu: str, preset: str, devices: int) -> Cluster:
    """Return whole nodes of a preset, or of fewer GPUs if the row has some, with the network that the row names."""
    node = Cluster.preset(preset)
    if row.gpus and row.nodes and 1 < row.gpus // row.nodes < len(node.devices) and row.nodes > 1:
        node = _smaller(node, row.gpus // row.nodes)
    count = -(-devices // len(node.devices))
    if count == 1:
        return node
    usual = USUAL_NETWORK.get(gpu, 50e9)
    rate = next((rate for words, rate in NETWORKS.items() if re.search(words, row.interconnect)), usual)
    return node.machines(count, rate)


def _smaller(node: Cluster, count: int) -> Cluster:
    """Return a node with the first `count` GPUs, each of which has all its links to the others, as many to each."""
    gpus = set(map(Member.device, range(count)))
    between = [
        link for link in node.links if all(member.kind is MemberKind.DEVICE for member in link.members)
    ]
    lanes = sum(link.lanes for link in between if Member.device(0) in link.members) // (count - 1)
    links = tuple(
        replace(link, lanes=lanes) if link in between else link
        for link in node.links
        if all(member in gpus or member.kind is not MemberKind.DEVICE for member in link.members)
    )
    return replace(node, devices=node.devices[:count], links=links)


def with_tf32(cluster: Cluster) -> Cluster:
    """Return the cluster with float32 products at the rate of TF32, if the GPU has it."""

    def changed(device: Device) -> Device:
        kind = device.kind
        if "tf32" not in kind.flops:
            return device
        flops, reached = (
            {**of, "float32": of["tf32"]} for of in (kind.flops, {"tf32": kind.part_of_flops("tf32")})
        )
        return replace(
            device, kind=replace(kind, flops=flops, flops_reached={**kind.flops_reached, **reached})
        )

    return replace(cluster, devices=tuple(map(changed, cluster.devices)))


def with_context(cluster: Cluster, nbytes: int) -> Cluster:
    """Return the cluster with a CUDA context of these bytes, which the source measured."""
    return _with_overheads(cluster, context_bytes=nbytes)


def with_workspaces(cluster: Cluster, nbytes: int) -> Cluster:
    """Return the cluster with cuBLAS workspaces of these bytes, which an environment variable of the run sets."""
    return _with_overheads(cluster, cublas_workspace_bytes=nbytes)


def _with_overheads(cluster: Cluster, **nbytes: int) -> Cluster:
    def changed(device: Device) -> Device:
        overheads = replace(device.kind.overheads, **nbytes)
        return replace(device, kind=replace(device.kind, overheads=overheads))

    return replace(cluster, devices=tuple(map(changed, cluster.devices)))
