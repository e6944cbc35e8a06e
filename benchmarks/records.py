"""What benchmarks on a GPU ask of the command line, and write beside their figures."""

import argparse
import json
import subprocess
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import triton


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the options that every benchmark on a GPU has."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--json", type=Path, help="where to write what is found")
    found.add_argument("--commit", help="recorded; by default what git says")
    return found


def save(record: object, file: Path | None) -> None:
    """Writes a record, if a file is asked for: after each part, since a lent GPU may be taken back.

    Args:
        record: what was found so far.
        file: where to write it, or None.
    """
    if file:
        file.write_text(json.dumps(record, indent=1) + "\n")


def versions(commit: str | None) -> dict[str, str]:
    """Returns where, when and with what this runs; without a GPU, nothing about one.

    Args:
        commit: of nf4conv; None asks git.
    """
    found = {}
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        found |= {"gpu": torch.cuda.get_device_name(), "driver": told.split()[0]}
    found |= {"torch": torch.__version__, "triton": triton.__version__}
    with suppress(PackageNotFoundError):
        found["bitsandbytes"] = version("bitsandbytes")
    return found | {"commit": commit or _commit_of_git(), "date": time.strftime("%Y-%m-%d")}


def _commit_of_git() -> str:
    """Returns the commit that is checked out, or nothing where git cannot say it."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
