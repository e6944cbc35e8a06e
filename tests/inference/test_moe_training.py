"""Trains LoRA on packed experts through PEFT. The oracle is the same model with decoded experts."""

import pytest
import torch
from adapters import INPUT, load
from expert_training import (
    IMPLEMENTATIONS,
    KINDS,
    LiveMemory,
    adapt,
    decode_experts,
    load_mixture,
    make_mixture,
    packed_experts,
    prepare,
    saved_for_backward,
    train,
)
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from transformers import Trainer, TrainingArguments

import nf4conv
import nf4conv.inference.moe
from nf4conv.errors import Nf4convError

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),  # of PEFT about models made of random numbers
]


@pytest.fixture(scope="module", params=KINDS)
def mixture(request, tmp_path_factory):
    """A checkpoint with packed experts."""
    return make_mixture(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_training_in_float32_is_that_of_decoded_experts(mixture, implementation, checkpointing):
    found = []
    for is_decoded in (False, True):
        model = prepare(load_mixture(mixture, implementation), True, checkpointing)
        if is_decoded:
            decode_experts(model)
        adapted = adapt(model)
        assert bool(packed_experts(adapted)) != is_decoded
        found.append(train(adapted))
    (losses, gradients), (expected_losses, expected_gradients) = found
    assert losses[:2] == pytest.approx(expected_losses[:2], rel=1e-5)
    assert losses == pytest.approx(expected_losses, rel=1e-4)  # AdamW magnifies small gradients
    assert losses[-1] < losses[0]
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        largest = gradient.abs().max()
        assert largest > 0, name
        # the layers of attention, which bitsandbytes packs, round to bfloat16
        assert (gradient - expected_gradients[name]).abs().max() < 2e-3 * largest, name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_training_in_bfloat16_lowers_the_loss_as_decoded_experts_do(mixture, implementation):
    losses = []
    for is_decoded in (False, True):
        model = load_mixture(mixture, implementation)
        if is_decoded:
            decode_experts(model)
        losses.append(train(adapt(model), steps=8)[0])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0][-1] < losses[0][0] - 0.3


def test_a_saved_adapter_loads_again_to_equal_logits(mixture, tmp_path):
    adapted = adapt(load_mixture(mixture))
    train(adapted)
    adapted.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(load_mixture(mixture), tmp_path)
    with torch.no_grad():
        expected, found = adapted.eval()(INPUT).logits, again.eval()(INPUT).logits
    assert torch.equal(found, expected)


def test_dequantize_merges_what_peft_adds(mixture, tmp_path):
    adapted = adapt(prepare(load_mixture(mixture), True, False))
    train(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    options = {"dtype": "bfloat16", "lora": (str(tmp_path / "adapter"),)}
    nf4conv.dequantize(mixture, tmp_path / "merged", **options)
    merged = dict(load(tmp_path / "merged", dtype=torch.bfloat16).named_parameters())
    wrappers = [part for part in adapted.modules() if isinstance(part, ParamWrapper)]
    assert len(wrappers) == 2 * 2
    weights = packed_experts(adapted)
    for wrapper in wrappers:
        name = next(name for name, weight in weights.items() if weight is wrapper.get_param())
        with torch.no_grad():
            delta = wrapper.get_delta_weight("default")
            base = weights[name].decoded().bfloat16()
            expected = base.float() + delta
        assert delta.dtype == torch.float32
        assert delta.abs().mean() > 1e-4
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        # the merged file is bfloat16
        torch.testing.assert_close(merged[name].float(), expected, rtol=2**-8, atol=1e-6)


def test_merging_in_memory_points_to_dequantize(mixture):
    adapted = adapt(load_mixture(mixture))
    with pytest.raises(Nf4convError, match=r"nf4conv dequantize .* --lora") as refused:
        adapted.merge_and_unload()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_decoded_expert_is_kept_for_the_backward_pass(implementation, tmp_path):
    folder = make_mixture(
        "qwen3_moe",
        tmp_path,
        hidden_size=256,
        moe_intermediate_size=256,
        num_experts=16,
        num_hidden_layers=4,
        num_experts_per_tok=4,
    )
    matrix, expert = 256 * 256, 3 * 256 * 256 * 2
    adapted = adapt(load_mixture(folder, implementation))
    train(adapted, steps=1)
    with LiveMemory() as memory, saved_for_backward() as kept:
        loss = adapted(input_ids=INPUT, labels=INPUT).loss
        loss.backward()
    assert not [t.shape for t in kept if not t.is_leaf and t.shape[-2:].numel() >= matrix]
    # all four layers are 64 experts; two layers and some activations are far less
    assert memory.peak < 2 * 16 * expert + 4_000_000


def test_two_adapters_at_a_time_are_added_up(mixture):
    found = []
    for is_decoded in (False, True):
        model = prepare(load_mixture(mixture), True, False)
        if is_decoded:
            decode_experts(model)
        adapted = adapt(model)
        torch.manual_seed(3)
        adapted.add_adapter("other", adapted.peft_config["default"])
        adapted.base_model.set_adapter(["default", "other"])
        found.append(train(adapted)[0])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_trainer_of_transformers_with_checkpointing(mixture, tmp_path):
    settings = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        learning_rate=0.01,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in INPUT] * 4
    found = []
    for is_decoded in (False, True):
        model = prepare(load_mixture(mixture), True, False)
        if is_decoded:
            decode_experts(model)
        trainer = Trainer(model=adapt(model), args=settings, train_dataset=rows)
        trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(found[0]) == 3
    assert found[0] == pytest.approx(found[1], rel=1e-4)
