"""Calibrated weights are byte for byte what cd7b292 made, where torch adds as it did there.

Their bytes depend on the order in which float32 numbers are added, and so on torch and the CPU.
"""

import hashlib
from pathlib import Path

import pytest
import torch

# how torch computed, and the shards of the model: without these the digests say nothing
KNOWN = ("2.13", "AVX512")
SOURCE = "8eed740afa43d8183c9c5154843e09ec1a2cdcb4d0a0c1191b92f3113e6e1e6e"

DIGESTS = {
    "made": "ec792c9e5d2c74d2ed41bcc5512e2a073aacab8bd398311b09aa6815eabae932",
    "with_outputs": "419462295000fbccf0322fa927e5f090ff3602a9fd1f484d2b3c8b666cc4db13",
}


def digest_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@pytest.mark.parametrize("kind", DIGESTS)
def test_weights(model: Path, kind: str, request: pytest.FixtureRequest):
    version = ".".join(torch.__version__.split(".")[:2])
    here = (version, torch.backends.cpu.get_cpu_capability())
    if here != KNOWN:
        pytest.skip(f"recorded with {KNOWN}, and this is {here}")
    if digest_of(model) != SOURCE:
        pytest.skip("this release of transformers makes a model of other weights")
    assert digest_of(request.getfixturevalue(kind)) == DIGESTS[kind]
