"""The documentation runs: Python blocks, `pipefit` lines with their shown output, and clusters in TOML."""

from __future__ import annotations

import pydoc
import re
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

import pipefit
from pipefit.cli import (
    certify,
    checkpoint,
    clusters,
    compare,
    demo,
    diff,
    doctor,
    export,
    fit,
    main,
    models,
    plan,
    profile,
    report,
    show,
    simulate,
    train,
)
from pipefit.schema.cluster import Cluster
from pipefit.schema.presets import card_names, machine_names
from record import recorded
from support.gallery_samples import sampled

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
COMMANDS = (
    certify, checkpoint, clusters, compare, demo, diff, doctor, export, fit, models, plan, profile, report, show,
    simulate, train,
)  # fmt: skip
# Pages of 5 to 20 seconds, run in the gallery: other pages run their commands with other models
SLOW = (
    "docs/reports/index.md",
    "docs/planners/joint.md",
    "docs/planners/additive.md",
    "docs/planners/mcap_bf.md",
    "docs/models.md",
    "docs/choosing.md",
    "docs/export.md",
    "docs/sharding.md",
    "docs/fit.md",
    "docs/tutorial.md",
    "docs/your_own_loop.md",
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = ("sh", "console")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)#?([^)\s]*)\)")
# Values that differ between machines or runs: times, and the processor's name
VARYING = re.compile(r"in \d\S* (s|ms|us)\b|(?<=Peaks are for ).*(?= and \d+ threads?:)")
# Times of a run; a Python release; losses, which after some steps depend on a processor's last bits
RATES = (
    r"[0-9.,]+ (s|ms|us|tokens/s|TFLOP/s|samples/s)\b|python +3[0-9.]+|(?<=loss )[0-9.]+|[0-9.]+ in the last"
)
# Python warnings as errors, except ignored ones; warnings of workers, and of C++, are read on stderr
QUIETLY = pytest.mark.filterwarnings(
    "error",
    "default::pipefit.errors.PipefitWarning",
    "ignore::DeprecationWarning",
    "ignore::PendingDeprecationWarning",
    "ignore::ImportWarning",
    "ignore::ResourceWarning",
)
STRANGE = re.compile(r"^\[[WE]\d|(?<!Pipefit)Warning\b")


def named(page: Path) -> str:
    """Return a page by its path in the project."""
    return str(page.relative_to(ROOT))


def is_slow(line: str) -> bool:
    """Return whether the comment of a line says that it takes some seconds or minutes."""
    return re.search("seconds|minute", line.partition("#")[2]) is not None


class Ran(NamedTuple):
    """What a line printed and the files that it made."""

    out: str
    err: str
    files: dict[str, bytes]


RAN: dict[tuple[str, ...], Ran] = {}  # lines that read no file, for pages with the same line


def run_line(line: str, capfd: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Run a shell line if it is a pipefit command without GPUs; slow lines have a separate test.

    Returns stdout and stderr. A line that reads no file runs once for all pages.
    """
    words = tuple(shlex.split(line, comments=True))
    if words[:1] != ("pipefit",) or is_slow(line) or "# needs GPUs" in line:
        return "", ""
    if words not in RAN:
        capfd.readouterr()
        before = set(Path().iterdir())
        assert main(words[1:]) == 0, line
        made = {
            path.name: path.read_bytes() for path in Path().iterdir() if path not in before and path.is_file()
        }
        result = Ran(*capfd.readouterr(), made)
        if before.isdisjoint(map(Path, words)) and words[1] in ("fit", "profile"):
            RAN[words] = result
        return result.out, result.err
    for name, content in RAN[words].files.items():
        Path(name).write_bytes(content)
    return RAN[words].out, RAN[words].err


def comparable(text: str) -> str:
    """Return a text on one line without varying parts."""
    return VARYING.sub("...", re.sub(r"\s*\n", " ", text)).strip()


def is_shown(shown: str, printed: str) -> bool:
    """Return whether a page shows the printed output; a line of three dots stands for omitted lines."""
    parts = [re.escape(comparable(part)) for part in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE)]
    return re.fullmatch(r"\s*.*?\s*".join(parts), comparable(printed)) is not None


def sessions(block: str) -> list[tuple[str, str]]:
    """Return the lines after a `$`, with backslash continuations, each with the output that follows it."""
    parts = re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]
    return [(line, shown) for part in parts for line, _, shown in [part.partition("\n")]]


def run_console(block: str, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Check that a session's output is printed, except for times and the processor. Slow lines are left out.

    Returns stderr.
    """
    errors = []
    for line, shown in sessions(block):
        out, err = run_line(line, capfd)
        errors.append(err)
        if shown.strip() and not is_slow(line):
            assert is_shown(shown, out), line
    return errors


@QUIETLY
@pytest.mark.parametrize(
    "page", sampled(PAGES, [page for page in PAGES if named(page) not in SLOW]), ids=named
)
def test_the_blocks_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Blocks run from top to bottom, in an empty folder, with the Python blocks of a page in one namespace.

    Only pipefit itself warns: neither the program nor its workers do, including torch's C++.
    """
    monkeypatch.chdir(tmp_path)
    printed: list[str] = []
    namespace: dict[str, object] = {"__name__": "documentation"}
    for language, block in BLOCK.findall(page.read_text()):
        match language:
            case "python":
                exec(compile(block, named(page), "exec"), namespace)
            case "toml":
                assert Cluster.parse(block, named(page)).devices
            case "console":
                printed += [capfd.readouterr().err, *run_console(block, capfd)]
            case "sh":
                printed.append(capfd.readouterr().err)
                printed += [run_line(line, capfd)[1] for line in block.replace("\\\n", " ").splitlines()]
    printed.append(capfd.readouterr().err)
    assert [line for text in printed for line in text.splitlines() if STRANGE.search(line)] == []


@QUIETLY
@pytest.mark.gallery
@pytest.mark.timeout(1800)
def test_the_slow_lines_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Lines that take seconds or minutes, by their own words, run: the demo, a fit, a refusal and a plan."""
    monkeypatch.chdir(tmp_path)
    blocks = [block for page in PAGES for block in BLOCK.findall(page.read_text())]
    shell = [(line, "") for language, block in blocks if language == "sh" for line in block.splitlines()]
    consoles = [one for language, block in blocks if language == "console" for one in sessions(block)]
    slow = [
        (line, shown) for line, shown in (*shell, *consoles) if line.startswith("pipefit ") and is_slow(line)
    ]
    assert {line.split()[1] for line, _ in slow} >= {"demo", "plan", "fit"}
    for line, shown in slow:
        capfd.readouterr()
        code = main(shlex.split(line, comments=True)[1:])
        printed = capfd.readouterr()
        assert code == (3 if shown.startswith("pipefit: ") else 0), line
        assert "<Plan" not in printed.out, line  # a repr in place of the plan
        told = [said for said in printed.err.splitlines() if "planning" not in said]
        assert not shown or is_shown(shown, printed.out if code == 0 else "\n".join(told)), line


@pytest.mark.gallery
@pytest.mark.timeout(1800)
def test_the_recording_is_what_the_commands_print_today() -> None:
    """The recording matches except for times and rates, which differ from run to run, and the machine's
    names.
    """
    page = (ROOT / "docs" / "first_ten_minutes.md").read_text()
    assert re.sub(RATES, "...", comparable(recorded())) == re.sub(RATES, "...", comparable(page))


def test_every_command_is_shown_in_a_line_that_the_tests_run() -> None:
    """Every command is on some page; only lines that train need GPUs, and those of the README name its
    plan.
    """
    blocks = [
        block for page in PAGES for language, block in BLOCK.findall(page.read_text()) if language in SHELL
    ]
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    ours = [line for line in lines if line.startswith("pipefit ")]
    shown = {line.split()[1] for line in ours if "# needs GPUs" not in line}
    assert {module.__name__.rpartition(".")[2] for module in COMMANDS} <= shown
    assert {line.split()[1] for line in ours if "# needs GPUs" in line} == {"train"}


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [("a b\n...\nc d\n", "a b\nx y\nz\nc d\n", True), ("a\n...\nc\n", "a\nc\nd\n", False), ("a (b)\n", "a (b)\n", True),
     ("a\n...\n", "b\n", False), ("took 3 s\nb\n", "took 3 s b", True)],
)  # fmt: skip
def test_dots_stand_for_lines_that_are_left_out(shown: str, printed: str, *, same: bool) -> None:
    """Lines before and after the dots must be printed, in order, up to the end."""
    assert is_shown(shown, printed) == same


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    """Every relative link names an existing file or folder, or one that the page's commands create, and an
    existing heading.
    """
    text = page.read_text()
    links = LINK.findall(text)
    assert [
        link for link, _ in links if not (page.parent / link).exists() and f" -o {link}\n" not in text
    ] == []
    places = [(page.parent / link if link else page, heading) for link, heading in links if heading]
    assert [
        (named(there.resolve()), heading) for there, heading in places if heading not in headings(there)
    ] == []


def headings(page: Path) -> set[str]:
    """Return the headings of a page as link anchors."""
    texts = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower()) for text in texts}


def test_the_site_has_every_page() -> None:
    """The site's navigation contains each page under docs once, and nothing more."""
    text = (ROOT / "mkdocs.yml").read_text()
    named_there = re.findall(r"[\w/]+\.md", text.partition("\nnav:\n")[2])
    assert sorted(named_there) == sorted(
        str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")
    )


def test_the_reference_names_what_the_package_offers() -> None:
    """Every object of the reference exists and has a docstring."""
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert len(names) > 10
    assert [name for name in names if not (pydoc.locate(name) or object()).__doc__] == []


def test_the_version_is_the_same_everywhere() -> None:
    """The package, its metadata, the citation and the changelog agree on the version."""
    assert version("pipefit") == pipefit.__version__
    for name, text in {
        "CITATION.cff": f"version: {pipefit.__version__}",
        "CHANGELOG.md": f"## {pipefit.__version__}",
    }.items():
        assert text in (ROOT / name).read_text(), name


def test_the_page_on_clusters_names_every_preset() -> None:
    """The page contains every preset."""
    text = (ROOT / "docs" / "clusters.md").read_text()
    assert [name for name in (*machine_names(), *card_names()) if f"`{name}`" not in text] == []


def test_a_word_has_one_meaning() -> None:
    """The glossary explains every word once."""
    rows = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    words = [row.split(" | ")[0] for row in rows if row.startswith("| ")]
    assert len(words) == len(set(words)) > 50
