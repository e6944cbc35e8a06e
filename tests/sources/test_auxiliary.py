"""The files beside the weights: which are copied, and which must not be."""

from pathlib import Path

import pytest

from nf4conv.sources.files import (
    QUANTIZATION_LEFTOVERS,
    WEIGHT_SUFFIXES,
    auxiliary_names,
    files_below,
)


def found(folder: Path, *names: str) -> list[str]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if not (folder / name).exists():
            (folder / name).write_text("")
    return [str(name) for name in auxiliary_names(files_below(folder))]


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
        "vocab.txt", "merges.txt", "generation_config.json", "preprocessor_config.json",
        "processor_config.json", "chat_template.jinja", "modeling_own.py", "LICENSE",
        "USE_POLICY.md", "modules.json", "additional_chat_templates/tool_use.jinja",
        "vision/encoder/layers.py", "tekken.json", "spiece.model", "spk_dict.pt",
    ],
)  # fmt: skip
def test_comes_along(tmp_path, name):
    assert found(tmp_path, name) == [name]


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "README.md", "SHA256SUMS", "params.json", ".gitattributes",
        ".cache/huggingface/x.py", "model.safetensors.index.json", "pytorch_model.bin.index.json",
        "__pycache__/modeling.py", "notes/thoughts.md", "original/tokenizer.model",
        "original/code.py", "onnx/export.py", "metal/model.py", "assets/logo.png",
        *sorted(QUANTIZATION_LEFTOVERS),
        *(f"weights{suffix}" for suffix in sorted(WEIGHT_SUFFIXES)),
    ],
)  # fmt: skip
def test_stays_behind(tmp_path, name):
    assert found(tmp_path, name) == []


def test_modules_of_sentence_transformers_come_along_whole(tmp_path):
    names = ("1_Pooling/config.json", "2_Dense/inner/model.safetensors")
    assert found(tmp_path, *names, "other/config.json") == []
    assert found(tmp_path, "modules.json") == [*names, "modules.json"]


def test_they_are_sorted_and_folders_links_and_fifos_are_none(tmp_path):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "linked.json").symlink_to(tmp_path / "b.json")
    assert found(tmp_path, "b.json", "a.json", "c/d.py") == [
        "a.json",
        "b.json",
        "c/d.py",
        "linked.json",
    ]
