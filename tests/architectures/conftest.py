"""The sweep needs a second Python for the last transformers 4, which cannot be installed beside
transformers 5.
"""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--transformers-4", type=Path, metavar="PYTHON", help="a Python that has transformers 4.57"
    )


@pytest.fixture(scope="session")
def python_with_transformers_4(request: pytest.FixtureRequest) -> Path:
    python = request.config.getoption("--transformers-4")
    if python is None:
        pytest.fail("give --transformers-4 PYTHON, as `make test-others` does")
    return python
