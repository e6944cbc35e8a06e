"""What every benchmark asks of the command line, and writes beside its figures."""

import argparse
import json
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

LIBRARIES = ("torch", "triton", "transformers", "bitsandbytes", "compressed-tensors", "peft")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the options that every benchmark has."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--json", type=Path, help="where to write what is found")
    found.add_argument("--commit", help="recorded; by default what git says")
    return found


def save(chosen: argparse.Namespace, **found: object) -> None:
    """Writes figures with the versions, if a file is asked for: after each part, since a lent GPU
    may be taken back.
    """
    if chosen.json:
        record = {"versions": versions(chosen.commit), **found}
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")


def versions(commit: str | None) -> dict[str, object]:
    """Returns where, when and with what this runs; without a GPU, nothing about one.

    Args:
        commit: of nf4conv; None asks git.
    """
    found: dict[str, object] = {}
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        found |= {"gpu": torch.cuda.get_device_name(), "driver": told.split()[0]}
    found |= {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found | {"commit": commit or _commit_of_git(), "date": time.strftime("%Y-%m-%d")}


def _commit_of_git() -> str:
    """Returns the commit that is checked out, or nothing where git cannot say it."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
