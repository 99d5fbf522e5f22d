"""The browser of the page's tests."""

from collections.abc import Iterator

import pytest

from support.browser import Opener, browsing


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opener]:
    """Start one browser for all pages, and return a function that opens a page."""
    with browsing(tmp_path_factory.mktemp("browser")) as opener:
        yield opener
