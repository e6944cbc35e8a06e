"""Plans what --calibrate asks for, and refuses what cannot be by names and small files.

Neither torch nor transformers is imported before: that is refused within a second.
"""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from nf4conv.calibrate.text import read_texts
from nf4conv.errors import PlanError
from nf4conv.options import QuantizeOptions
from nf4conv.plan.quantization import plan_source
from nf4conv.plan.writing import WritingPlan
from nf4conv.sources.source import Source


def plan_calibrated(source: Source, options: QuantizeOptions) -> WritingPlan:
    """Plans a checkpoint whose weights are calibrated; the plan carries the calibration out.

    This is how the rest of nf4conv gets here.

    Raises:
        PlanError: the request cannot be met.
    """
    if options.scales == "absmax":
        raise PlanError("--scales absmax does not go with --calibrate, which chooses all scales")
    if source.config is None:
        raise PlanError(f"{source}: --calibrate needs the config.json that says what model it is")
    if source.config.get("_class_name"):
        raise PlanError(
            f"{source}: --calibrate is for models of transformers; --scales search needs no text"
        )
    if source.absent:
        raise PlanError(
            "--calibrate reads each weight twice, so it does not go with --stream; leave --stream "
            "out to download the model first"
        )
    try:
        found = version("transformers")
    except PackageNotFoundError:
        found = "none"
    if found == "none" or int(found.partition(".")[0]) < 5:
        raise PlanError(
            f"--calibrate needs transformers 5, and {found} is installed: pip install "
            f"'nf4conv[calibrate]'"
        )
    assert options.calibrate is not None
    texts = read_texts(options.calibrate)
    # the plan no longer has what was asked for
    plan = plan_source(source, replace(options, scales="search"))
    from nf4conv.calibrate.planning import plan_calibration  # importing torch takes seconds

    return plan_calibration(plan, texts, options)
