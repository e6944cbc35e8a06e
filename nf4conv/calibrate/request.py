"""Plans what --calibrate asks for, and refuses what cannot be by names, headers and small files.

Neither torch nor transformers is imported: what cannot be is refused within a second.
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from nf4conv.calibrate.text import Text, read_texts, require_known
from nf4conv.errors import PlanError
from nf4conv.options import QuantizeOptions
from nf4conv.plan.quantization import QuantizationPlan, plan_source
from nf4conv.sources.files import has_tokenizer
from nf4conv.sources.source import Source

_FEWEST_TOKENS: Final = 512


def plan_calibrated(source: Source, options: QuantizeOptions) -> QuantizationPlan:
    """Plans a checkpoint whose weights are calibrated; the plan carries the calibration out.

    This is how the rest of nf4conv gets here.

    Raises:
        PlanError: the request cannot be met.
    """
    # --scales is checked here, because the plan below no longer has what was asked for
    texts = check_request(source, options)
    plan = plan_source(source, replace(options, scales="search"))
    from nf4conv.calibrate.planning import plan_calibration  # importing torch takes seconds

    return plan_calibration(plan, texts)


def check_request(source: Source, options: QuantizeOptions) -> list[Text]:
    """Returns the text that calibrates, once everything is refused that can be known so early."""
    if options.scales == "absmax":
        raise PlanError("--scales absmax does not go with --calibrate, which chooses all scales")
    config = source.config
    if (config or {}).get("_class_name"):
        raise PlanError(
            f"{source}: --calibrate is for models of transformers; --scales search needs no text"
        )
    if config is None:
        raise PlanError(f"{source}: --calibrate needs the config.json that says what model it is")
    if source.fetched is not None and source.fetched.absent:
        raise PlanError(
            "--calibrate reads each weight twice, so it does not go with --stream; leave --stream "
            "out to download the model first"
        )
    tokens = options.calibration_tokens
    if tokens is not None and tokens < _FEWEST_TOKENS:
        raise PlanError(f"--calibration-tokens {tokens}: expected at least {_FEWEST_TOKENS}")
    _require_transformers()
    assert options.calibrate is not None
    texts = read_texts(options.calibrate)
    if any(text.ids is None for text in texts):
        _require_tokenizer(source)
    vocabulary = _text_config(config).get("vocab_size")
    for text in texts:
        if text.ids is not None and isinstance(vocabulary, int):
            require_known(text.ids, vocabulary, text.name, str(source))
    return texts


def _require_transformers() -> None:
    """Raises a PlanError if transformers is missing or older than 5; it is not imported."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        found = ""
    if not found or int(found.partition(".")[0]) < 5:
        raise PlanError(
            f"--calibrate needs transformers 5: pip install 'nf4conv[calibrate]' "
            f"({found or 'it is not installed'})"
        )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a config that describes the model that reads text."""
    found = config.get("text_config")
    return found if isinstance(found, dict) else config


def _require_tokenizer(source: Source) -> None:
    if source.made is not None and source.made.makers:
        return
    if not has_tokenizer(source.folder):
        raise PlanError(
            f"{source.folder}: has no tokenizer; give token ids instead: --calibrate ids.npy",
            path=source.folder,
        )
