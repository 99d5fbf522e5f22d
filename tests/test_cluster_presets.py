"""Clusters by name and from user TOML: figures match the data sheets, mistakes give one sentence."""

from __future__ import annotations

import pytest

from pipefit.errors import FileError, UsageError
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Link, Member, MemberKind, Overheads
from pipefit.schema.json_io import is_cluster, load_cluster
from pipefit.schema.presets import card_names, is_preset, machine_names, nearest, preset_text

# devices, MiB that the driver offers, GB/s between devices 0 and 1, GB/s to the host,
# TFLOP/s in half precision
EXPECTED = {
    "4x-a100-80gb": (4, 81050, 100, 31.5, 312),
    "dgx-a100": (8, 81050, 300, 31.5, 312),
    "dgx1-v100": (8, 32510, 25, 15.75, 125),
    "dgx2-a100": (8, 40339, 300, 31.5, 312),
    "gh200": (1, 96768, None, 450, 990),
    "hgx-b200": (8, 182630, 900, 63, 2250),
    "hgx-h100": (8, 81082, 450, 63, 989.5),
    "hgx-h200": (8, 143156, 450, 63, 989.5),
    "8x-a10g": (8, 22587, 31.5, 31.5, 70),
    "8x-l4": (8, 22558, 31.5, 31.5, 121),
    "4x-l40s": (4, 45486, 31.5, 31.5, 362),
    "2x-rtx-3060-12gb": (2, 11931, 31.5, 31.5, 25.4),
    "4x-rtx-3090": (4, 24259, 31.5, 31.5, 71),
    "3x-rtx-4080": (3, 16049, 31.5, 31.5, 97.5),
    "4x-rtx-4090": (4, 24207, 31.5, 31.5, 165.2),
    "4x-rtx-5090": (4, 32112, 63, 63, 209.5),
    "4x-rtx-6000-ada": (4, 48622, 31.5, 31.5, 364.2),
    "4x-rtx-a6000": (4, 48676, 31.5, 31.5, 154.8),
    "2x-rtx-pro-6000": (2, 97249, 63, 63, 503.8),
    "16x-t4": (16, 14909, 15.75, 15.75, 65),
    "4x-titan-rtx": (4, 24217, 15.75, 15.75, 130),
    "1x-v100-16gb": (1, 16158, None, 15.75, 112),
    "8x-v100-32gb": (8, 32501, 15.75, 15.75, 112),
}
# Measured GB/s of copies between devices 0 and 1, to the host, and to the host in each direction while both
# directions are busy; GB of the host, and of its disk
MEASURED = {
    "4x-a100-80gb": (86, 24.8, (24 + 11) / 2, 512, 0),
    "dgx-a100": (517 / 2, 24.8, (24 + 11) / 2, 2000, 0),
    "dgx1-v100": (45 / 2, 10.4, 10.4 * 0.7, 768, 0),
    "dgx2-a100": (517 / 2, 24.8, (24 + 11) / 2, 948, 6000),
    "gh200": (None, 320, 320 / 2, 480, 0),
    "hgx-h100": (376, 52.8, 52.8 * 50.9 / 56.3, 2000, 0),
    "hgx-h200": (376, 52.8, 52.8 * 50.9 / 56.3, 2000, 0),
    "4x-rtx-4090": (26.3, 26.3, 26.3 * 0.7, 256, 2000),
    "4x-rtx-3090": (26.3, 26.3, 26.3 * 0.7, 128, 0),
    "4x-rtx-5090": (52.8, 52.8, 52.8 * 50.9 / 56.3, 256, 2000),
    "4x-titan-rtx": (12.4, 12.4, 12.4 * 0.7, 128, 0),
}
NAMES = [name if name in machine_names() else f"1x-{name.partition('x-')[2]}" for name in EXPECTED]
LANES = (  # the hybrid cube mesh of a DGX-1, row by row
    "01122000",
    "10210200",
    "12020010",
    "21200001",
    "20000112",
    "02001021",
    "00101202",
    "00012120",
)


def test_every_preset_is_expected() -> None:
    """Every preset has a row in the table above."""
    assert [*machine_names(), *(f"1x-{card}" for card in card_names())] == NAMES
    assert all(is_preset(name) and is_cluster(name) for name in EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_preset_has_its_drivers_memory_and_its_data_sheets_rates(name: str) -> None:
    """Devices, memory, link rates and FLOP/s match the table, and the name matches the file."""
    devices, memory, between, to_host, tflops = EXPECTED[name]
    cluster = Cluster.preset(name)
    assert cluster.name == name
    assert [device.memory_bytes for device in cluster.devices] == [memory << 20] * devices
    assert cluster.devices[0].kind.peak_flops("float16") == tflops * 1e12
    assert sheet_rate(cluster, Member.device(0), Member.host(0)) == to_host * 1e9
    if between is not None:
        assert sheet_rate(cluster, Member.device(0), Member.device(1)) == between * 1e9


def sheet_rate(cluster: Cluster, source: Member, target: Member) -> float:
    """Return the data-sheet rate of the link between two members, all lanes, or of the host's link if none
    joins them.
    """
    rates = [
        link.bytes_per_second * link.lanes for link in cluster.links if {source, target} <= {*link.members}
    ]
    return max(rates) if rates else sheet_rate(cluster, source, Member.host(0))


@pytest.mark.parametrize("name", MEASURED)
def test_copies_are_as_fast_as_somebody_measured(name: str) -> None:
    """Routes match measured rates to two per cent, and hosts match in memory, bandwidth and disk."""
    between, to_host, both_ways, memory, disk = MEASURED[name]
    cluster = Cluster.preset(name)
    route = cluster.route(Member.device(0), Member.host(0))
    assert route.bytes_per_second == pytest.approx(to_host * 1e9, rel=0.02)
    assert route.both_ways_per_second == pytest.approx(both_ways * 1e9, rel=0.02)
    if between is not None:
        found = cluster.route(Member.device(0), Member.device(1)).bytes_per_second
        assert found == pytest.approx(between * 1e9, rel=0.02)
    (host,) = cluster.hosts
    assert (host.memory_bytes, host.disk_bytes) == (memory * 10**9, disk * 10**9)
    assert host.memory_bandwidth is not None and 80e9 < host.memory_bandwidth < 700e9


@pytest.mark.parametrize("name", ["4x-rtx-4090", "dgx2-a100"])
def test_a_disk_is_reached_through_the_host(name: str) -> None:
    """Any device reaches the disk at the drive's rate, over the device's uplink and the drive's wire."""
    cluster = Cluster.preset(name)
    disk = Member(MemberKind.DISK, 0)
    for device in range(len(cluster.devices)):
        up, down = (
            cluster.route(*ends) for ends in ((Member.device(device), disk), (disk, Member.device(device)))
        )
        assert up.bytes_per_second == down.bytes_per_second == pytest.approx(3.94e9)
        assert len(up.wires) == 2 and not set(up.wires) & set(down.wires)
        assert up.wires[0] == cluster.route(Member.device(device), Member.host(0)).wires[0]


def test_the_nvlinks_of_a_dgx1_are_a_hybrid_cube_mesh() -> None:
    """The lanes of every pair match the machine, six for each GPU; other pairs communicate through the
    host.
    """
    cluster = Cluster.preset("dgx1-v100")
    for a in range(8):
        assert sum(map(int, LANES[a])) == 6
        for b in range(8):
            rate = cluster.route(Member.device(a), Member.device(b)) if a != b else None
            if rate is not None and int(LANES[a][b]):
                assert rate.bytes_per_second == pytest.approx(int(LANES[a][b]) * 22.5e9)
            elif rate is not None:
                assert rate.bytes_per_second == pytest.approx(10.4e9, rel=1e-3)
                assert all(wire.startswith("pcie") for wire in rate.wires)


def test_gpus_of_a_pair_contend_for_their_uplink() -> None:
    """On one PCIe switch both transfers to the host use the same wire, a separate one per direction."""
    cluster = Cluster.preset("dgx1-v100")
    up = [cluster.route(Member.device(number), Member.host(0)).wires for number in range(8)]
    assert up[0] == up[1] != up[2] == up[3] != up[4]
    assert cluster.route(Member.host(0), Member.device(0)).wires != up[0]


def test_an_unknown_preset_is_answered_with_the_closest() -> None:
    """The message suggests the closest name and says how to list all, in one sentence."""
    with pytest.raises(
        UsageError, match=r"did you mean hgx-h100\? run pipefit clusters for the list, .*emulated:4x256MiB"
    ) as told:
        Cluster.preset("hgx-h10")
    assert len(str(told.value)) < 240


@pytest.mark.parametrize(
    ("asked", "near"),
    [("4x-rtx3090", "4x-rtx-3090"), ("rtx4090", "1x-rtx-4090"), ("2x3060", "2x-rtx-3060-12gb"), ("2xT4", "2x-t4"),
     ("4x-a100", "4x-a100-80gb or dgx-a100"), ("v100", "dgx1-v100 or 1x-v100-16gb"),
     ("24x24GiB", "emulated:24x24GiB"), ("", "")],
)  # fmt: skip
def test_cards_are_meant_however_they_are_written(asked: str, near: str) -> None:
    """The number, hyphens and capitals in a card's name are optional."""
    assert nearest(asked) == (f"did you mean {near}?" if near else "")


@pytest.mark.parametrize("count", [1, 2, 16])
def test_cards_in_a_box_are_as_many_of_one(count: int) -> None:
    """Each card has a separate uplink to the one host and its disk; two of them copy to the host in
    parallel.
    """
    one, some = Cluster.preset("1x-rtx-4090"), Cluster.preset(f"{count}x-rtx-4090")
    assert (some.devices, some.hosts, some.name) == (one.devices * count, one.hosts, f"{count}x-rtx-4090")
    up = [some.route(Member.device(number), Member.host(0)) for number in range(count)]
    assert len({way.wires for way in up}) == count and len({way.bytes_per_second for way in up}) == 1
    assert some.capacity(Member(MemberKind.DISK, 0)) == one.capacity(Member(MemberKind.DISK, 0)) > 0
    assert load_cluster(f"2x{count}x-rtx-4090@1.25GB/s").devices[-1].host == 1


@pytest.mark.parametrize("name", ["0x-t4", "17x-t4"])
def test_a_box_has_room_for_sixteen_cards(name: str) -> None:
    """Zero cards and more than sixteen are refused with the limits."""
    with pytest.raises(UsageError, match="cards in one box must be a whole number from 1 to 16"):
        Cluster.preset(name)


SOLD_AS = {
    "titan-rtx": 24, "v100": 32, "a100-40gb": 40, "a100-80gb": 80, "h100": 80, "h200": 141, "gh200": 96, "b200": 192,
    "a10g": 24, "l4": 24, "l40s": 48, "rtx-3060-12gb": 12, "rtx-3090": 24, "rtx-4080": 16, "rtx-4090": 24,
    "rtx-5090": 32, "rtx-6000-ada": 48, "rtx-a6000": 48, "rtx-pro-6000": 96, "t4": 16, "v100-16gb": 16, "v100-32gb": 32,
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_a_devices_memory_is_not_the_figure_it_is_sold_by(name: str) -> None:
    """Drivers report some percent less than the figure in GiB, never the round number of GB, and the file
    says so.
    """
    for device in Cluster.preset(name).devices:
        sold = SOLD_AS[device.kind.name]
        assert device.memory_bytes != sold * 10**9
        assert 0.9 * sold * 2**30 < device.memory_bytes < sold * 2**30
    assert "\n# Memory is what " in preset_text(name) or "\n# Memory is torch's " in preset_text(name)


HEAD = """
name = "mine"
backend = "cuda"
[kinds.small]
flops = { float32 = 1e12 }
memory_bandwidth = "100GB/s"
[[devices]]
count = 3
kind = "small"
memory = "1GiB"
[[hosts]]
memory = "8GiB"
"""


def links_of(text: str) -> tuple[Link, ...]:
    """Return the links of a cluster of three devices and one host."""
    return Cluster.parse(f"{HEAD}\n[[links]]\nbytes_per_second = 1e9\n{text}", "mine.toml").links


def test_links_are_written_in_three_ways() -> None:
    """TOML accepts a switch by pattern, a link for each pair with its lanes, and one from each of a range to
    one member.
    """
    first, second, third, host = *map(Member.device, range(3)), Member.host(0)
    assert [link.members for link in links_of('members = ["device*", "host0"]')] == [
        (first, second, third, host)
    ]
    assert [(link.members, link.lanes) for link in links_of('pairs = ["0-1:4", "1-2"]')] == [
        ((first, second), 4),
        ((second, third), 1),
    ]
    spokes = links_of('each = "device1-2"\nto = "host0"\nwire = "bus"')
    assert [(link.members, link.wire) for link in spokes] == [
        ((second, host), "bus"),
        ((third, host), "bus"),
    ]


def test_efficiency_and_the_hosts_bandwidth_are_written_in_toml() -> None:
    """A link with an efficiency copies at that part of its rate; a host's bandwidth is a rate, or None if
    omitted.
    """
    (half,) = links_of('pairs = ["0-1:4"]\nefficiency = 0.5')
    assert half.copy_rate == 2e9
    said = Cluster.parse(HEAD + 'memory_bandwidth = "150GB/s"', "mine.toml")
    assert [cluster.hosts[0].memory_bandwidth for cluster in (said, Cluster.parse(HEAD, "mine.toml"))] == [
        150e9,
        None,
    ]


def test_what_estimates_reckon_with_is_written_in_toml() -> None:
    """TOML sets the parts of the peak figures, by dtype, and the constant of an operation; omitted values use
    the defaults.
    """
    line = "flops_reached = { float16 = 0.5 }\nbandwidth_reached = 0.9\noperation_seconds = 1e-5\n"
    line += "multiprocessors = 80\n"
    said = Cluster.parse(HEAD.replace("[[devices]]", f"{line}[[devices]]"), "mine.toml").devices[0].kind
    silent = Cluster.parse(HEAD, "mine.toml").devices[0].kind
    assert (said.part_of_flops("float16"), said.part_of_flops("float32")) == (0.5, 0.6)
    assert (said.bandwidth_reached, said.operation_seconds) == (0.9, 1e-5)
    assert (silent.flops_reached, silent.bandwidth_reached, silent.operation_seconds) == ({}, 0.8, 5e-6)
    assert (said.multiprocessors, silent.multiprocessors) == (80, None)
    assert said.key != silent.key
    assert said.estimates("float16") == "50 % of 1 TFLOP/s, 90 % of 100 GB/s, 10 us an operation"


def test_what_a_process_takes_besides_tensors_is_written_in_toml() -> None:
    """TOML sets non-tensor sizes, including zero, and cuBLAS workspaces as in `CUBLAS_WORKSPACE_CONFIG`;
    omitted values use the defaults.
    """

    def overheads(line: str) -> Overheads:
        return (
            Cluster.parse(HEAD.replace("[[devices]]", f"{line}\n[[devices]]"), "mine.toml")
            .devices[0]
            .kind.overheads
        )

    assert overheads("") == Overheads()
    assert (
        Overheads().cublas_workspace_bytes
        == overheads('cublas_workspace = ":4096:2:16:8"').cublas_workspace_bytes
    )
    said = overheads('context = "300MiB"\ncommunicator = 0\ncublas_workspace = ":4096:8"')
    assert said == Overheads(context_bytes=300 << 20, communicator_bytes=0, cublas_workspace_bytes=32 << 20)
    assert overheads('cublas_workspace = "1MiB"').cublas_workspace_bytes == 1 << 20
    assert overheads('cublas_workspace = ":0:0"').cublas_workspace_bytes == 0


@pytest.mark.parametrize(
    ("written", "left"), [('"10%"', 107_374_182), ('"64MiB"', 64 << 20), ("0", 0), ('"0%"', 0)]
)
def test_a_reserve_is_a_size_or_a_part_of_the_device(written: str, left: int) -> None:
    """The reserve applies to each device of its group; without one, a GPU uses the reserve of its kind."""
    said = Cluster.parse(HEAD.replace('"1GiB"', f'"1GiB"\nreserve = {written}'), "mine.toml")
    usual = Cluster.parse(HEAD, "mine.toml")
    assert said.reserves == (left,) * 3
    assert said.budgets == ((1 << 30) - left,) * 3
    assert usual.reserves == (said.devices[0].kind.overheads.of_process(alone=False),) * 3
    with pytest.raises(FileError, match=r"less than the .* of its device"):
        Cluster.parse(HEAD.replace('"1GiB"', '"1GiB"\nreserve = "100%"'), "mine.toml")


@pytest.mark.parametrize("none", ["0", '"0"', '"0MiB"'])
def test_what_may_be_none_at_all_is_zero_as_a_number_or_as_text(none: str) -> None:
    """Non-tensor memory and a disk may be zero; device memory may not."""
    line = f"context = {none}\ncommunicator = {none}\ncublas_workspace = {none}\n[[devices]]"
    said = Cluster.parse(f"{HEAD.replace('[[devices]]', line)}disk = {none}", "mine.toml")
    nothing = Overheads(context_bytes=0, communicator_bytes=0, cublas_workspace_bytes=0)
    assert (said.devices[0].kind.overheads, said.hosts[0].disk_bytes) == (nothing, 0)
    with pytest.raises((FileError, UsageError)):
        Cluster.parse(HEAD.replace('"1GiB"', none), "mine.toml")


@pytest.mark.parametrize(
    ("name", "mebibytes"),
    [
        *(
            (name, 32)
            for name in ("hgx-h100", "hgx-h200", "gh200", "hgx-b200", "1x-rtx-5090", "1x-rtx-pro-6000")
        ),
        *((name, 8.125) for name in ("dgx1-v100", "dgx-a100", "1x-l4", "1x-rtx-4090", "1x-t4")),
    ],
)
def test_presets_have_the_workspaces_of_their_architecture(name: str, mebibytes: float) -> None:
    """32 MiB on Hopper and Blackwell (compute capability 9, 10 and 12), else 8 MiB and an eighth."""
    (found,) = {device.kind.overheads.cublas_workspace_bytes for device in Cluster.preset(name).devices}
    assert found == mebibytes * (1 << 20)


NINES = "9" * 5000  # more digits than `int` takes

MISTAKES = {
    "a workspace that is none": (
        HEAD.replace("[[devices]]", 'cublas_workspace = ":4096"\n[[devices]]'),
        "is not a cuBLAS workspace",
    ),
    "a workspace of too many digits": (
        HEAD.replace("[[devices]]", f'cublas_workspace = ":4:{NINES}"\n[[devices]]'),
        "is not a cuBLAS workspace",
    ),
    "a workspace in other digits": (
        HEAD.replace("[[devices]]", 'cublas_workspace = ":\u0664:\u0662"\n[[devices]]'),
        "is not a cuBLAS workspace",
    ),
    "a size of too many digits": (HEAD.replace("1GiB", f"{NINES}GB"), "is not a size"),
    "endless hosts": (HEAD + "count = 1000000000", "group of hosts needs a count from 1 to 4096"),
    "too many digits in a pair": (
        HEAD + f'[[links]]\nbytes_per_second = 1.0\npairs = ["0-{NINES}"]',
        "is not a pair",
    ),
    "too many lanes": (HEAD + f'[[links]]\nbytes_per_second = 1.0\npairs = ["0-1:{NINES}"]', "is not a pair"),
    "too many digits in a member": (
        HEAD + f'[[links]]\nbytes_per_second = 1.0\nmembers = ["device{NINES}"]',
        "does not name members",
    ),
    "too many digits behind to": (
        HEAD + f'[[links]]\nbytes_per_second = 1.0\neach = "device*"\nto = "host{NINES}"',
        "is not a member",
    ),
    "no TOML": (HEAD + "=", "not TOML"),
    "nested deeply": ("a = " + "[" * 5000, "not TOML"),
    "unknown key": (HEAD + "colour = 1", r"hosts\[0\].colour: this key is unknown"),
    "no devices": (
        'name = "x"\nbackend = "cpu"\nkinds = {}\ndevices = []\nhosts = []',
        "at least one device",
    ),
    "kind not described": (HEAD.replace('kind = "small"', 'kind = "large"'), r"\[kinds.large\]"),
    "size without unit": (HEAD.replace("1GiB", "1 apple"), "is not a size"),
    "no memory": (HEAD.replace("1GiB", "0"), "at least one byte"),
    "endless count": (HEAD.replace("count = 3", "count = 1000000000"), "from 1 to 4096"),
    "no count": (HEAD.replace("count = 3", "count = 0"), "from 1 to 4096"),
    "a count in quotes": (HEAD.replace("count = 3", 'count = "3"'), r"devices\[0\].count.*integer"),
    "infinite rate": (HEAD.replace("1e12", "inf"), r"kinds\.small\.\S+: a number must be finite"),
    "a rate that is too large": (
        HEAD.replace("1e12", "1e400"),
        r"kinds\.small\.\S+: a number must be finite",
    ),
    "a rate that is too small": (HEAD.replace("1e12", "1e-400"), r"kinds\.small: "),
    "memory below a byte": (HEAD.replace('"1GiB"', "-1"), r"devices\[0\]: "),
    "a date": (HEAD.replace("count = 3", "count = 2020-01-01"), r"devices\[0\].count"),
    "backend unknown": (HEAD.replace("cuda", "abacus"), "'emulated', 'cpu' or 'cuda'"),
    "a link of nobody": (
        HEAD + "[[links]]\nbytes_per_second = 1.0",
        "one of: members, pairs, or both each and to",
    ),
    "a link of both": (
        HEAD + '[[links]]\nbytes_per_second = 1.0\nmembers = ["device*"]\npairs = ["0-1"]',
        "one of: members, pairs, or both each and to",
    ),
    "each without to": (
        HEAD + '[[links]]\nbytes_per_second = 1.0\neach = "device*"',
        "both each and to",
    ),
    "a pair of words": (HEAD + '[[links]]\nbytes_per_second = 1.0\npairs = ["a-b"]', "'a-b' is not a pair"),
    "a member unknown": (
        HEAD + '[[links]]\nbytes_per_second = 1.0\nmembers = ["gpu0", "gpu1"]',
        "'gpu0' does not name members",
    ),
    "a member too many": (
        HEAD + '[[links]]\nbytes_per_second = 1.0\nmembers = ["device0-7"]',
        "has 3 devices",
    ),
    "a pair too many": (HEAD + '[[links]]\nbytes_per_second = 1.0\npairs = ["0-7"]', "names device7"),
}


@pytest.mark.parametrize(("text", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_named_in_one_sentence(text: str, words: str) -> None:
    """The message names the file and its mistake on one line."""
    with pytest.raises(FileError, match=words) as refused:
        Cluster.parse(text, "mine.toml")
    assert str(refused.value).startswith("mine.toml ")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_several_machines_are_as_many_with_a_network_between_them() -> None:
    """Within a machine and to its hosts everything equals one machine; between machines each device has a
    separate route over the network, and transfers on one machine's wires do not wait for another's.
    """
    one, several = load_cluster("dgx2-a100"), load_cluster("3xdgx2-a100@25GB/s")
    assert load_cluster("2xhgx-h100@50GB/s").name == "2xhgx-h100@50GB/s"
    assert is_cluster("3xdgx2-a100@25GB/s") and not is_cluster("plan.json")
    assert len(several.devices) == 24 and len(several.hosts) == 3 and several.target == "cuda"
    for machine in range(3):
        first = 8 * machine
        for inner in range(1, 8):
            here, there = (one.route(Member.device(0), Member.device(inner)), Member.device(first + inner))
            found = several.route(Member.device(first), there)
            assert (found.bytes_per_second, found.latency_seconds) == (
                here.bytes_per_second,
                here.latency_seconds,
            )
            assert several.route(there, Member.host(machine)).seconds(10**9) == pytest.approx(
                one.route(Member.device(inner), Member.host(0)).seconds(10**9)
            )
            assert several.devices[first + inner].host == machine
    assert several.route(Member.device(7), Member.device(8)).bytes_per_second == 25e9
    both = [(Member.device(0), Member.host(0), 10**9), (Member.device(8), Member.host(1), 10**9)]
    assert several.seconds(both) == pytest.approx(several.seconds(both[:1]))
    across = [(Member.device(0), Member.device(8), 10**9), (Member.device(1), Member.device(9), 10**9)]
    assert several.seconds(across) == pytest.approx(several.seconds(across[:1]))
    assert several.tier(16, Member.host(2)).capacity_bytes == one.hosts[0].memory_bytes
    assert several.capacity(Member(MemberKind.DISK, 2)) == one.hosts[0].disk_bytes


@pytest.mark.parametrize(
    ("name", "words"),
    [("0xdgx-a100@25GB/s", "number of machines"), ("9999xdgx-a100@25GB/s", "number of machines"),
     ("2xdgx@25GB/s", "did you mean dgx"), ("2xdgx-a100@fast", "not a size"), ("2xdgx-a100@200Gb/s", "write 25GB/s")],
)  # fmt: skip
def test_impossible_machines_are_refused(name: str, words: str) -> None:
    """The message names the invalid part."""
    with pytest.raises(UsageError, match=words):
        load_cluster(name)
