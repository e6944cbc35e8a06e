"""Each promise of docs/security.md has a test, and this module names it."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs/security.md"

PROMISES = {
    # not trusted
    "pickles": "test_hostile_files.py",
    "names of tensors, files and submodels": "test_hostile_names.py",
    "sizes in headers": "test_limits.py",
    "links in a source": "test_links.py",
    "pipes, sockets, devices in a source": "test_hostile_files.py",
    "links in OUT": "test_others_files.py test_work_folders_that_are_links_are_refused",
    "records in OUT/.nf4conv": "test_others_files.py test_a_record_that_was_changed_counts_for_n",
    "the front matter of README.md": "test_card.py",
    "kernels in ~/.cache/nf4conv": "test_kernel_cache.py",
    "the source, while it is read": "test_resume.py",
    "finished shards of an interrupted run": "test_resume.py",
    "regular expressions in adapter_config.json": "test_adapter_patterns.py test_they_are_matched",
    "answers of a Hub": "test_hub_faults.py test_answers_that_make_no_sense",
    # bounds
    "a safetensors header": "test_header.py",
    "tensors of a checkpoint": "test_limits.py",
    "the name of a tensor": "test_hostile_names.py",
    "dimensions": "test_header.py",
    "a quant state": "test_quant_state.py",
    "any other small tensor": "test_hostile_files.py",
    "config.json and other JSON": "test_limits.py",
    "a tensor of a pickle": "test_pickle_header.py",
    "files open at a time": "test_source.py",
    "weights that are packed with double quantization": "test_non_finite.py",
    "`--tolerance`": "test_verify.py",
    # the rest of the page
    "## Requests to the Hub": "test_hub_faults.py test_a_silent_hub_is_given_up",
    "## Being stopped": "test_resume.py test_signals_end_a_run_and_the_next_goes_on",
    "OUT must be on a file system with locks": "test_file_systems.py test_a_folder_that_cannot_be",
    "A write, a rename or a sync that fails": "test_file_systems.py test_an_operation_that_fails",
    "## Errors": "test_fuzz.py test_mutated_inputs",
    "fetches whole with the size and hash": "test_hub_faults.py test_other_bytes_of_the_same_size",
    "keys of config.json by which transformers would fetch": "test_fetched_code.py",
}


def read_test(name: str) -> str:
    (file,) = TESTS.rglob(name)
    return file.read_text(encoding="utf-8")


def test_each_promise_has_a_test():
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    for promise, where in PROMISES.items():
        assert promise in page, promise
        file, _, test = where.partition(" ")
        assert f"def {test or 'test_'}" in read_test(file), where


def test_each_row_of_the_page_is_a_promise():
    rows = re.findall(r"^\| (?!input |---)([^|]+) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(rows) > 20
    for row in rows:
        assert any(row.startswith(promise) for promise in PROMISES), row
