"""Commands with their options as keywords do what they do with classes. tests/typed.py shows what
type checkers say of them.
"""

import inspect
import pydoc
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from checkpoints import contents, write_source

import nf4conv
from nf4conv.commands import keywords
from nf4conv.options import (
    CompareOptions,
    DequantizeOptions,
    PushOptions,
    QuantizeOptions,
    RunOptions,
    SourceOptions,
    VerifyOptions,
)

MACHINE = ("device", "workers", "buffer_size")
WRITING = (*MACHINE, "overwrite", "checksum", "part", "ray")
PLACE = tuple(field.name for field in fields(SourceOptions))
READING = tuple(name for name in PLACE if name != "stream")


def names_of(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


# what each function takes: the keywords, and the fields of each class of options
FUNCTIONS = {
    "quantize": (
        keywords.Quantizing,
        {
            QuantizeOptions: names_of(QuantizeOptions),
            RunOptions: names_of(RunOptions),
            SourceOptions: PLACE,
            PushOptions: names_of(PushOptions),
        },
    ),
    "dequantize": (
        keywords.Dequantizing,
        {
            DequantizeOptions: names_of(DequantizeOptions),
            RunOptions: WRITING,
            SourceOptions: PLACE,
        },
    ),
    "verify": (
        keywords.Verifying,
        {VerifyOptions: names_of(VerifyOptions), RunOptions: MACHINE, SourceOptions: READING},
    ),
    "compare": (
        keywords.Comparing,
        {CompareOptions: names_of(CompareOptions), RunOptions: MACHINE, SourceOptions: READING},
    ),
    "inspect": (keywords.Place, {SourceOptions: READING}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_keywords_are_the_fields_of_the_option_classes(name: str):
    typed, taken = FUNCTIONS[name]
    hints = get_type_hints(typed)
    expected = {}
    for kind, names in taken.items():
        of_class = get_type_hints(kind)
        expected |= {field: of_class[field] for field in names if field != "token"}
    assert {*hints} - {"token"} == {*expected}
    for field, hint in expected.items():
        if hint == tuple[str, ...]:
            assert get_args(hints[field]) == (tuple[str, ...], list[str]), field
        else:
            assert hints[field] == hint, field


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_signature_names_each_with_its_default(name: str):
    _, taken = FUNCTIONS[name]
    shown = inspect.signature(getattr(nf4conv, name)).parameters
    for kind, names in taken.items():
        made = kind()
        for field in names:
            assert shown[field].kind is inspect.Parameter.KEYWORD_ONLY
            assert shown[field].default == getattr(made, field), field


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_explains_each_keyword_on_lines_of_100_columns(name: str):
    text = pydoc.plain(pydoc.render_doc(getattr(nf4conv, name)))
    lines = text.splitlines()[3:]  # below the signature
    assert max(map(len, lines)) <= 104  # pydoc indents them by 4
    for field in get_type_hints(FUNCTIONS[name][0]):
        (line,) = [line for line in lines if line.startswith(f"        {field}: ")]
        assert len(line.split()) > 4
    assert "    Example:" in lines
    assert "    Returns:" in lines


def test_help_of_the_package_begins_with_what_to_do():
    summary = inspect.getdoc(nf4conv) or ""
    for name in ("quantize(", "verify(", "compare(", "inspect(", "dequantize(", "Nf4convError"):
        assert name in summary
    for name in re.findall(r"nf4conv\.(\w+)", summary):
        assert hasattr(nf4conv, name), name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_misspelt_keyword_is_refused_with_the_one_that_was_meant(name: str, tmp_path: Path):
    arguments = inspect.signature(getattr(nf4conv, name)).parameters.values()
    places = [tmp_path / "x" for one in arguments if one.default is inspect.Parameter.empty]
    with pytest.raises(TypeError) as refused:
        getattr(nf4conv, name)(*places, revison="main")
    assert str(refused.value) == (
        f"{name}() got an unexpected keyword argument 'revison'; did you mean 'revision'?"
    )


def test_what_has_no_effect_is_no_keyword(tmp_path: Path):
    for name in ("dequantize", "verify", "compare"):
        with pytest.raises(TypeError, match="unexpected keyword argument 'verify'"):
            getattr(nf4conv, name)(tmp_path, tmp_path, verify=True)


def test_the_commands_one_after_the_other(tmp_path: Path):
    source = write_source(tmp_path / "source")
    done: list[int] = []
    report = nf4conv.quantize(
        source,
        tmp_path / "out",
        done.append,
        scales="search",
        exclude=["*.layers.0.*"],
        device="cpu",
        workers=1,
        verify=True,
    )
    options = QuantizeOptions(scales="search", exclude=("*.layers.0.*",))
    run = RunOptions(device="cpu", workers=1, verify=True)
    nf4conv.quantize_checkpoint(source, tmp_path / "same", options, run)
    assert contents(tmp_path / "out") == contents(tmp_path / "same")
    assert sum(done)
    assert report.packed == 10
    checked = nf4conv.verify(tmp_path / "out", source, tolerance=0.2, device="cpu")
    assert checked.passed
    assert checked.settings.tolerance == 0.2
    assert not nf4conv.verify(tmp_path / "out", source, tolerance=0.01, device="cpu").passed
    found = nf4conv.inspect(tmp_path / "out")
    assert found.totals.packed == 10
    again = nf4conv.dequantize(tmp_path / "out", tmp_path / "again", dtype="float32", device="cpu")
    assert again.decoded == 10
    near = nf4conv.compare(source, tmp_path / "again", tolerance=0.2, device="cpu")
    assert near.passed
    assert not nf4conv.compare(source, tmp_path / "again", tolerance=0, device="cpu").passed


def test_a_wrong_value_is_refused_before_anything_is_opened(tmp_path: Path):
    with pytest.raises(nf4conv.OptionError, match="quant_type='nf5': expected one of nf4, fp4"):
        nf4conv.quantize(tmp_path / "nowhere", tmp_path / "out", quant_type="nf5")
