"""What a stranger types first, and what the answer says to do next."""

from pathlib import Path

import pytest
from checkpoints import write_source
from click.testing import Result
from command_line import run

from nf4conv.choose.decisions import PackedMatrix
from nf4conv.choose.evidence import Why
from nf4conv.errors import Nf4convError, SourceError
from nf4conv.format.layout import Format
from nf4conv.options import SourceOptions
from nf4conv.plan.jobs import CopyJob, Job, PackJob
from nf4conv.report.advice import advice
from nf4conv.sources.places import from_address
from nf4conv.sources.tensors import TensorInfo


def command(*arguments: object) -> Result:
    done = run(*[str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit | Nf4convError)
    return done


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("https://huggingface.co/org/name", ("org/name", None, None)),
        ("https://huggingface.co/org/name/", ("org/name", None, None)),
        ("https://hf.co/org/name", ("org/name", None, None)),
        ("http://huggingface.co/org/name/tree/v2", ("org/name", "v2", None)),
        ("https://huggingface.co/org/name/tree/main/a/b", ("org/name", "main", "a/b")),
        ("https://huggingface.co/org/name/blob/main/config.json", ("org/name", "main", None)),
        ("https://huggingface.co/org/name/blob/v1/a/config.json", ("org/name", "v1", "a")),
        ("https://huggingface.co/org/name?library=x#use", ("org/name", None, None)),
        ("hf://org/name", ("org/name", None, None)),
        ("hf://models/org/name@v3/sub", ("org/name", "v3", "sub")),
        ("org/name", ("org/name", None, None)),
        ("./folder", ("./folder", None, None)),
    ],
)
def test_addresses_of_the_hub(address: str, expected: tuple[str, str | None, str | None]):
    name, where = from_address(address, SourceOptions())
    assert (name, where.revision, where.subfolder) == expected


def test_options_win_over_what_an_address_says():
    asked = SourceOptions(revision="mine", subfolder="here")
    assert from_address("https://hf.co/org/name/tree/v2/there", asked) == ("org/name", asked)


def test_the_endpoint_of_the_environment_is_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.company.example:8080")
    name, _ = from_address("https://hub.company.example:8080/org/name", SourceOptions())
    assert name == "org/name"


@pytest.mark.parametrize(
    "address",
    [
        "https://example.com/org/name",
        "https://huggingface.co/datasets/org/name",
        "https://huggingface.co/org",
        "https://huggingface.co/org/name/discussions/1",
        "hf://spaces/org/name",
        "hf://org/..",
        "https://huggingface.co/../etc",
    ],
)
def test_other_addresses_are_refused_in_one_line(address: str):
    with pytest.raises(SourceError, match=r"address.*"):
        from_address(address, SourceOptions())


# --- files ----------------------------------------------------------------------------------------


def test_a_pointer_of_git_lfs_is_named(source: Path, tmp_path: Path):
    shard = next(source.glob("*.safetensors"))
    shard.write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 4976698672\n"
    )
    error = command("quantize", source, tmp_path / "out").stderr
    assert (
        f"{shard}: a git-lfs pointer, not the file that it stands for; run `git lfs pull`" in error
    )


# --- advice ---------------------------------------------------------------------------------------


def job(name: str, reason: str, bits: float, after: float, action: str = "copy") -> Job:
    """Of a tensor of a million elements that has so many bits before, and after."""
    shape = (10**6,)
    tensor = TensorInfo(name, "BF16", shape, Path("x"), 0, int(bits * shape[0] / 8))
    nbytes = int(after * shape[0] / 8)
    if action == "copy":
        kept = CopyJob(tensor, "BF16", reason)
        kept.nbytes = nbytes
        return kept
    packed = PackJob(tensor, PackedMatrix(name, shape), reason, Format("nf4", 64, True, "bfloat16"))
    packed.nbytes = nbytes
    return packed


def test_a_run_that_saves_little_says_why():
    experts = [job(f"expert.{number}", Why.EXPERT, 16, 16) for number in range(4)]
    packed = job("q", "linear", 16, 4.5, "pack")
    assert "".join(advice([packed, *experts])) == (
        f"this saves little, 10.00 MB → 8.56 MB: 8.00 MB are not packed, 8.00 MB of it {Why.EXPERT}"
    )
    assert not [*advice([packed, packed, experts[0]])]


def test_a_source_of_few_bits_is_no_alarm():
    embedding = job("embed", "an embedding", 16, 16)
    assert not [*advice([job("q", "linear", 4.5, 4.5, "stay"), embedding])]
    assert not [*advice([job("q", "linear", 4.25, 4.5, "pack"), embedding])]
    assert not [*advice([job("q", "linear", 2.5, 4.5, "pack")])]


def test_the_line_stands_first(tmp_path: Path):
    """On stderr before the work of a run, and with --dry-run of the notes."""
    source = write_source(tmp_path / "model")
    arguments = ("quantize", source, tmp_path / "out", "--include", "*.q_proj.*")
    planned = command(*arguments, "--dry-run").stdout.splitlines()
    note = next(line for line in planned if line.startswith("Note: "))
    assert note.startswith("Note: this saves little, 869.12 kB → ")
    assert note.endswith("by the user")
    assert len([line for line in planned if "saves little" in line]) == 1
    done = command(*arguments, "--device", "cpu")
    assert done.stderr.splitlines()[0] == note
    again = command("quantize", tmp_path / "out", tmp_path / "again", "--dry-run").stdout
    assert "saves little" not in again
