import pytest
from comparison import ask_for_no_gpu


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_for_no_gpu(monkeypatch)
