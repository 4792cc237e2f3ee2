from collections.abc import Iterator

import pytest

from tests.serving.harness import Server, make_model, make_publisher


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Server]:
    """A server of a model that does not change, with small limits."""
    root = tmp_path_factory.mktemp("artifacts")
    make_publisher(root).publish_snapshot(make_model().state_dict(), step=0)
    with Server(root, "--max-body-bytes", "100000", "--max-candidates", "64") as server:
        yield server
