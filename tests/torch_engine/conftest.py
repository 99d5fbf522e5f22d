"""Leave out the tests of torch's engine under releases of torch with which it is refused."""

from importlib.metadata import version

collect_ignore_glob = ["test_*.py"] if [*map(int, version("torch").split(".")[:2])] < [2, 13] else []
