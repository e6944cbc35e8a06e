"""Skip lists and the three loaders' rules, against the loaders' own code where it can be installed
beside ours.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pace import units_of

from nf4conv.choose.loader_rules import (
    RULES,
    transformers_4,
    transformers_5,
    transformers_5_0,
    vllm,
)
from nf4conv.choose.skip_list import Paths, build_skip_modules, fused_modules, without_base
from nf4conv.errors import PlanError

LLAMA = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 10, 11)
    for module in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
]
DOWN = [path for path in LLAMA if path.endswith("down_proj")]
MLP = [path for path in LLAMA if ".mlp." in path]
LAYER_1 = [path for path in LLAMA if path.startswith("model.layers.1.")]
LAYERS_1 = [path for path in LLAMA if path.startswith("model.layers.1")]
Q = [path for path in LLAMA if path.endswith("q_proj")]
PROJ = LLAMA


@pytest.mark.parametrize(
    ("entry", "in_4", "in_5", "in_5_0", "in_vllm"),
    [
        ("down_proj", DOWN, DOWN, DOWN, DOWN),
        ("mlp", MLP, [], [], MLP),
        ("model.layers.1", LAYER_1, LAYER_1, LAYERS_1, LAYER_1),
        ("layers.0", [path for path in LLAMA if ".0." in path], [], [], []),
        ("model.layers.0.mlp", MLP[:3], MLP[:3], MLP[:3], MLP[:3]),
        ("self_attn.q_proj", [], Q, Q, []),
        ("proj", [], PROJ, PROJ, []),
        ("lm_head.weight", [], [], [], []),
    ],
)
def test_what_an_entry_hits(entry, in_4, in_5, in_5_0, in_vllm):
    for rule, expected in (
        (transformers_4, in_4),
        (transformers_5, in_5),
        (transformers_5_0, in_5_0),
        (vllm, in_vllm),
    ):
        assert [path for path in LLAMA if rule([entry])(path)] == expected, rule.__name__


@pytest.mark.parametrize(
    "name", ["a[0", "(1", "x\\", "a{99999999999}", "*", "(" * 5000 + ")" * 5000],
    ids=["bracket", "parenthesis", "backslash", "repetition", "star", "nested"],
)  # fmt: skip
def test_a_module_whose_name_transformers_5_cannot_take_is_refused_by_name(name):
    with pytest.raises(
        PlanError, match=r"^llm_int8_skip_modules cannot name .+: transformers 5 takes it for a"
    ) as caught:
        build_skip_modules(["model.layers.0.q_proj"], ["model.embed", name])
    assert name[:100] in str(caught.value)


def test_an_empty_list_hits_nothing():
    for rule in RULES.values():
        assert not any(rule([])(path) for path in LLAMA)


COMPONENT = st.sampled_from(
    ["model", "layers", "0", "1", "11", "mlp", "gate", "gate_proj", "shared_expert_gate", "lm_head"]
)
PATH = st.lists(COMPONENT, min_size=1, max_size=5).map(".".join)


@pytest.mark.oracle
@settings(deadline=None)  # the first call imports transformers
@given(entries=st.lists(PATH, max_size=4), path=PATH)
def test_our_rule_is_that_of_the_installed_transformers_5(entries, path):
    from transformers.quantizers.quantizers_utils import should_convert_module

    assert transformers_5(entries)(path) is not should_convert_module(path, entries)


SHORT = st.lists(st.text("ab1", min_size=1, max_size=3), min_size=1, max_size=4).map(".".join)


@settings(max_examples=500)
@given(entries=st.lists(SHORT, min_size=1, max_size=4), path=SHORT)
def test_names_are_looked_up_by_their_ends_and_beginnings(entries, path):
    ends_so = path.endswith(tuple(entries))
    starts_so = any(f"{path}.".startswith(f"{entry}.") for entry in entries)
    assert transformers_5(entries)(path) == (ends_so or starts_so)
    assert transformers_5_0(entries)(path) == (ends_so or path.startswith(tuple(entries)))


@given(packed=st.sets(PATH, max_size=12), kept=st.sets(PATH, max_size=12))
def test_a_list_that_passes_the_check_parts_packed_from_kept_for_every_loader(packed, kept):
    entries, mistaken = build_skip_modules(packed, kept)
    for rule in RULES.values():
        is_skipped = rule(entries)
        assert {path for path in packed if is_skipped(path)} <= mistaken
        assert all(map(is_skipped, kept))
    if mistaken:
        assert mistaken <= packed
        assert any(rule(entries)(path) for rule in RULES.values() for path in mistaken)


def test_a_module_with_nothing_packed_below_is_named_once():
    kept = ["lm_head", *(f"model.vision_tower.layers.{layer}.fc1" for layer in range(27))]
    entries, _ = build_skip_modules(["model.layers.0.mlp.up_proj"], kept, absent=())
    assert entries == ("lm_head", "model.vision_tower", "vision_tower")


def test_a_skipped_layer_is_named_by_its_modules_where_an_old_rule_would_hit_its_neighbours():
    packed = [path for path in LLAMA if path not in LAYER_1]
    entries, _ = build_skip_modules(packed, LAYER_1, absent=())
    assert set(entries) == {*LAYER_1, *(path.removeprefix("model.") for path in LAYER_1)}


def test_heads_that_a_loader_may_add_are_listed_unless_they_hit_a_packed_module():
    assert "classifier" in build_skip_modules(["encoder.layer.0.dense"], [])[0]
    assert "classifier" not in build_skip_modules(["pre_classifier"], [])[0]


@pytest.mark.parametrize(
    ("entries", "packed", "added"),
    [
        pytest.param(
            ["lm_head", "model.layers.0.mlp.gate"],
            ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"],
            {"layers.0.mlp.gate"},
            id="what AutoModel calls a module of a decoder",
        ),
        pytest.param(
            ["classifier"],
            ["bert.encoder.layer.0.output.dense"],
            {"bert.pooler"},
            id="an encoder's pooler",
        ),
        pytest.param(
            ["lm_head"],
            ["bert.encoder.layer.0.dense", "bert.pooler.dense"],
            set(),
            id="a packed pooler",
        ),
        pytest.param(
            ["model.gate"],
            ["model.layers.0.mlp.gate"],
            set(),
            id="a name that hits a packed module",
        ),
        pytest.param(
            ["layers.0.gate"], ["layers.0.up", "layers.1.up"], set(), id="no base: a list of layers"
        ),
        pytest.param(
            ["encoder.gate"], ["encoder.up", "decoder.up"], set(), id="no base: two parts"
        ),
        pytest.param(["gate"], ["up"], set(), id="no base: a single component"),
        pytest.param(
            ["wavlm.gate"],
            ["wavlm.up", "wavlm.down", "projector"],
            {"gate", "wavlm.pooler"},
            id="most",
        ),
        pytest.param(["lm_head"], [], set(), id="nothing packed"),
    ],
)
def test_a_list_is_completed_for_the_model_without_its_head(entries, packed, added):
    assert without_base(set(entries), Paths(packed), entries) - set(entries) == added


def test_an_entry_that_is_too_wide_without_the_base_gives_way_to_its_modules():
    packed = [f"model.layers.{layer}.mlp.up_proj" for layer in (0, 1)]
    kept = ["lm_head", "model.mlp.fc9"]
    assert without_base({"lm_head", "model.mlp"}, Paths(packed), kept) == {"mlp.fc9"}


@settings(max_examples=300)
@given(
    st.lists(st.text("ab", min_size=1, max_size=2), min_size=1, max_size=3).map(".".join),
    st.sets(
        st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=4).map(".".join),
        max_size=6,
    ),
)
def test_a_tree_finds_the_paths_that_a_loader_would_skip(entry, paths):
    """All rules at once: an entry before a dot, or at the beginning."""
    expected = set()
    for path in paths:
        if f"{entry}." in f"{path}." or path.startswith(entry):
            expected.add(path)
    assert {*Paths(paths).hit_by(entry)} == expected


def test_many_entries_and_many_modules_that_some_of_them_hit_take_no_time():
    packed = [f"model.layers.{layer}.mlp.up_proj" for layer in range(4000)]
    kept = [
        f"model.layers.{layer}.mlp.{name}" for layer in range(4000) for name in ("proj", "gate")
    ]

    def build() -> None:
        assert len(build_skip_modules(packed, [*kept, "proj"])[1]) == 4000
        assert not build_skip_modules(packed, kept)[1]

    assert units_of(build, 40) < 40  # 12 to 14 were measured


def test_entries_are_in_natural_order():
    kept = [f"layers.{layer}.mlp.gate" for layer in (10, 2, 1)]
    packed = [f"layers.{layer}.mlp.up_proj" for layer in (10, 2, 1)]
    entries, _ = build_skip_modules(packed, kept, absent=())
    assert entries == tuple(f"layers.{layer}.mlp.gate" for layer in (1, 2, 10))


ATTENTION = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]


@pytest.mark.parametrize(
    ("kept", "fused", "split"),
    [
        ([], [], []),
        (["o"], [], []),
        (["q", "k", "v"], ["model.layers.0.self_attn.qkv_proj"], []),
        (["q"], [], ["model.layers.0.self_attn.qkv_proj"]),
        (["k", "v", "o"], [], ["model.layers.0.self_attn.qkv_proj"]),
    ],
    ids=["none", "not fused", "all parts", "one part", "two parts"],
)
def test_modules_that_vllm_fuses(kept: list[str], fused: list[str], split: list[str]):
    names = [f"model.layers.0.self_attn.{name}_proj" for name in kept]
    packed = [name for name in ATTENTION if name not in names]
    assert fused_modules(packed, names) == (list(fused), list(split))


def test_experts_are_not_fused_one_by_one():
    assert fused_modules([], ["model.layers.0.mlp.experts.3.gate_proj", "gate_proj"]) == ([], [])
