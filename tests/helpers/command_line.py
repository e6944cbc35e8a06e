"""Calls the command line in this process, as tests do."""

from click.testing import CliRunner, Result

from nf4conv.cli import main


def run(*arguments: object) -> Result:
    """Returns what a command answers."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def done(*arguments: object) -> Result:
    """Returns what a command answers that must succeed."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result
