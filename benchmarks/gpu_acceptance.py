"""Proves and measures on a GPU what no other machine can, within minutes: every test that computes
on one, in processes that share it; then, alone on the GPU, how fast products and decoding are.

    python -m benchmarks.gpu_acceptance --out FOLDER [--seconds 560] [--workers N] [--commit HASH]
        [--tests PATH...] [--only STEP...] [--scratch FOLDER]

pytest-xdist goes on behind a test that ends its process, or hangs, and reports it. Tests that
failed run once more, alone: some may have lacked memory beside others. A step that would last too
long is ended; what it had found is in the folder, where acceptance.json tells of all steps. The
exit status is 1 unless all tests passed in the end, and all steps ended well.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent

LONGEST_TEST: Final = 180
"""Seconds after which a test hangs."""

TESTS_SHARE: Final = 0.58
"""Of the time, for the tests at most: the steps behind them take about 270 s."""

FIRST: Final = [
    "tests/inference/test_linear_compiled_gpu.py", "tests/inference/test_experts_gpu.py",
    "tests/inference/test_moe_sharding.py", "tests/run/test_bare_cuda.py",
    "tests/sources/test_lora.py", "tests/commands/test_spread.py", "tests",
]  # fmt: skip
"""What takes longest begins first."""

PYTEST: Final = [
    sys.executable, "-m", "pytest", "-m", "(gpu or device) and not browser and not architectures",
    "-q", "--no-header", "--tb=short", "-rfEs", "--durations=8", "-o",
    f"faulthandler_timeout={LONGEST_TEST}", "-o", "faulthandler_exit_on_timeout=true",
]  # fmt: skip

RECORDED: Final = ["--json", "{out}", "--commit", "{commit}"]

STEPS: Final = {
    "linear_models": (["benchmarks.linear_models", *RECORDED], 150),
    "linear_rows": (["benchmarks.linear_rows", *RECORDED], 150),
    "encoded": (
        ["benchmarks.encoded", "gguf Q6_K", "gguf Q8_0", "--runs", "2", "--folder", "{scratch}",
         *RECORDED],
        110,
    ),
}  # fmt: skip
"""What is measured, in order of priority: the module with its options, and seconds at most."""


def run(command: list[str], log: Path, seconds: float, **environment: str) -> str:
    """Runs a process, and ends it with all that it started when the time has passed.

    Returns:
        How it ended.
    """
    if seconds < 5:
        return "no time was left"
    paths = [str(ROOT), str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    with log.open("a") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
    try:
        return f"exit {process.wait(seconds)}"
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest then tells what it has found
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        return "took too long"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def prove(chosen: argparse.Namespace, ends: float) -> str:
    """Runs all tests, and those that failed once more, alone. Returns how that ended."""
    scratch = tempfile.mkdtemp(dir=chosen.scratch)
    log = chosen.out / "tests.log"
    # as many processes as cores: none may have a thread for each core
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment["KERNEL_CACHE"] = f"{scratch}/kernels"
    kept = ["-o", f"cache_dir={scratch}/pytest"]
    spread = ["-n", str(chosen.workers), "--dist", "load", "--maxschedchunk", "1"]
    command = [*PYTEST, *kept, *spread, f"--junitxml={chosen.out}/tests.xml", *chosen.tests]
    how = run(command, log, TESTS_SHARE * chosen.seconds, **environment)
    if how == "exit 1":
        alone = ["-n", "1", "--last-failed", f"--junitxml={chosen.out}/again.xml"]
        seconds = min(60, ends - time.time())
        how = run([*PYTEST, *kept, *alone, *chosen.tests], log, seconds, **environment)
    return how


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for what was found")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--workers", type=int, default=max(2, min(16, (os.cpu_count() or 2) - 1)))
    parser.add_argument("--commit", default="unknown", help="recorded")
    parser.add_argument("--tests", nargs="*", default=FIRST, help="files; by default all")
    parser.add_argument("--only", nargs="*", default=["tests", *STEPS], help="steps to run")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    ends = time.time() + chosen.seconds
    steps: dict[str, dict[str, object]] = {}
    for name in ("tests", *STEPS):
        if name not in chosen.only:
            continue
        start = time.time()
        if name == "tests":
            how = prove(chosen, ends)
        else:
            words, most = STEPS[name]
            places = {"out": chosen.out / f"{name}.json", "commit": chosen.commit}
            filled = [word.format(**places, scratch=chosen.scratch) for word in words]
            seconds = min(most, ends - time.time())
            command = [sys.executable, "-m", *filled]
            how = run(command, chosen.out / f"{name}.log", seconds, CUDA_VISIBLE_DEVICES="0")
        steps[name] = {"how": how, "seconds": round(time.time() - start, 1)}
        (chosen.out / "acceptance.json").write_text(json.dumps(steps, indent=1) + "\n")
        log = chosen.out / f"{name}.log"
        print(log.read_text(errors="replace")[-2400:] if log.exists() else "", flush=True)
        print(name, steps[name], flush=True)
    sys.exit(any(step["how"] != "exit 0" for step in steps.values()))


if __name__ == "__main__":
    main()
