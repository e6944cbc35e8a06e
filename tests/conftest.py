"""What must be settled before other modules are imported: where the Hub is, and how kernels run without a GPU."""

import os
from collections.abc import Iterator

import hub_server  # the Hub of all tests; sets HF_ENDPOINT, which huggingface_hub reads when it is imported
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def hub() -> Iterator[hub_server.Hub]:
    """The Hub, empty."""
    hub_server.HUB.clear()
    yield hub_server.HUB
    hub_server.HUB.clear()
