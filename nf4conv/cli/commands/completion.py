"""`nf4conv completion`: prints the script with which a shell completes commands."""

import click
from click.shell_completion import get_completion_class

from nf4conv.cli.help import Command, examples


@click.command(cls=Command, epilog=examples("completion bash >> ~/.bashrc"))
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes commands and paths in a shell."""
    program = get_completion_class(shell)
    assert program is not None
    main = context.find_root().command
    click.echo(program(main, {}, "nf4conv", "_NF4CONV_COMPLETE").source())
