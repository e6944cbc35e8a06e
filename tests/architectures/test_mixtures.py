"""For every mixture: its packed experts load in plain transformers 5, and compute what decoded ones
do.

CI runs FAST; `make test-others` runs all.
"""

import pytest
import torch
import transformers
from cases import (
    EVERY,
    FAST,
    FORWARD_UNKNOWN,
    GENERATE_UNKNOWN,
    MIXTURE_EXCEPTIONS,
    MIXTURES,
)
from expert_roundtrip import (
    can_generate,
    decode_experts,
    each_implementation,
    expert_weights,
    generate,
    load_mixture,
)
from roundtrip import resemblance
from tiny import first_output, tiny_config

import nf4conv.inference.moe  # noqa: F401
from nf4conv.inference.moe.tensor import Experts4bit


def in_ci(name):
    marks = () if name in FAST else pytest.mark.architectures
    return pytest.param(name, marks=marks)


ALL = [in_ci(name) for name in MIXTURES if name not in MIXTURE_EXCEPTIONS]

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),  # of transformers about models made of random numbers
]


@pytest.fixture(autouse=True, scope="module")
def quiet():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("architecture", ALL)
def test_packed_experts_compute_what_decoded_experts_do(architecture, tmp_path):
    mixture = load_mixture(architecture, tmp_path)
    packed, decoded = expert_weights(mixture.packed), expert_weights(mixture.decoded)
    original = expert_weights(mixture.original)
    assert packed
    assert packed.keys() == decoded.keys()
    for name, weight in packed.items():
        assert isinstance(weight, Experts4bit), name
        assert torch.equal(weight.decoded(), decoded[name]), name
        assert resemblance(decoded[name], original[name]) > 0.99, name
    expected = outputs(architecture, mixture.packed)
    decode_experts(mixture)
    assert not any(isinstance(p, Experts4bit) for p in mixture.packed.parameters())
    found = outputs(architecture, mixture.packed)
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.architectures
def test_exceptions_are_what_their_reasons_say(tmp_path):
    mixture = load_mixture("OpenAIPrivacyFilterModel", tmp_path)
    found = first_output(mixture.packed)
    decode_experts(mixture)
    expected = first_output(mixture.packed)
    assert not torch.equal(found, expected)
    assert resemblance(found, expected) > 0.9999


@pytest.mark.architectures
def test_every_mixture_of_the_sweep_is_listed():
    found = set()
    for name in EVERY:
        with torch.device("meta"):
            model = getattr(transformers, name)(tiny_config(name))
        if expert_weights(model) and not name.startswith("JetMoe"):  # its experts stay in 16 bits
            found.add(name)
    assert found == set(MIXTURES)


def outputs(architecture, model):
    """What a model says in each implementation of experts, and what it writes."""
    if architecture in FORWARD_UNKNOWN:
        return {}
    found = {}
    for implementation in each_implementation(model):
        found["logits", implementation] = first_output(model)
        if architecture not in GENERATE_UNKNOWN and can_generate(model):
            found["words", implementation] = generate(model)
    return found
