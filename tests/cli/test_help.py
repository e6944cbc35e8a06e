"""What --help shows in 80 columns: nothing is wider or cut, and every command has an example."""

import re
import shlex

import click
import pytest
from click.testing import CliRunner

from nf4conv.cli import main

COLUMNS = 80
NAMES = sorted(main.commands)
CONTEXT = click.Context(main, info_name="nf4conv", **main.context_settings)


def help_of(*command: str) -> str:
    shown = CliRunner().invoke(
        main, [*command, "--help"], prog_name="nf4conv", terminal_width=COLUMNS
    )
    assert shown.exit_code == 0
    return shown.stdout


def options_of(name: str) -> list[click.Option]:
    return [one for one in main.commands[name].params if isinstance(one, click.Option)]


def examples_of(text: str) -> list[str]:
    """Returns the command lines below "Examples:"."""
    return [line.strip() for line in text.partition("Examples:\n")[2].splitlines() if line.strip()]


@pytest.mark.parametrize("command", [(), *((name,) for name in NAMES)], ids=lambda one: one or "-")
def test_no_line_is_wider_and_none_is_cut(command: tuple[str, ...]):
    text = help_of(*command)
    assert [line for line in text.splitlines() if len(line) > COLUMNS] == []
    assert not re.search(r"\w\.\.\.", text.replace("OUT...", ""))


def test_summaries_are_the_first_sentences_of_commands():
    listed = dict(re.findall(r"^  (\w+) +(.+)$", help_of().partition("Commands:")[2], re.MULTILINE))
    assert listed.keys() >= set(NAMES)
    for name in NAMES:
        sentence = " ".join(str(main.commands[name].help).split("\n\n")[0].split())
        assert listed[name] == sentence, name


@pytest.mark.parametrize("command", [(), *((name,) for name in NAMES)], ids=lambda one: one or "-")
def test_examples_can_be_copied(command: tuple[str, ...]):
    """They are read as a shell reads them, and have options that exist and all arguments."""
    lines = examples_of(help_of(*command))
    assert lines
    for line in lines:
        program, name, *arguments = shlex.split(line.partition(" >> ")[0], comments=True)
        assert program == "nf4conv"
        assert name in command or not command
        main.commands[name].make_context(name, list(arguments), parent=CONTEXT).close()


@pytest.mark.parametrize("name", NAMES)
def test_an_option_speaks_of_its_own_command_only(name: str):
    """It names options that the command has, and arguments that it or the option has."""
    options = options_of(name)
    spelled = set()
    for option in options:
        spelled |= {*option.opts, *option.secondary_opts}
    command = main.commands[name]
    arguments = set()
    for parameter in command.params:
        shown = parameter.make_metavar(click.Context(command))
        arguments |= set(re.findall(r"[A-Z]+", shown))
    for option in options:
        words = str(option.help)
        assert set(re.findall(r"(?<![\w-])--[a-z-]+", words)) <= spelled, option.name
        placeholders = set(re.findall(r"\b(?:SRC|OUT|PATH|REPO|TEXT|ADAPTER|A|B)\b", words))
        assert placeholders <= arguments, option.name


def test_the_help_of_quantize_fits_on_two_screens_with_the_usual_options_first():
    lines = help_of("quantize").splitlines()
    assert len(lines) <= 100
    usual = "\n".join(lines).partition("Usual:\n")[2].partition("\n\n")[0]
    assert len(re.findall(r"^  --", usual, re.MULTILINE)) == 6
