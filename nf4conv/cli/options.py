"""Declares the options that say what a command shows, which are those of the command line alone."""

from collections.abc import Callable
from typing import TypeAlias

from nf4conv.cli.help import option
from nf4conv.cli.log import show_log
from nf4conv.declaring import Group

Declaration: TypeAlias = Callable[[Callable[..., None]], Callable[..., None]]


def several(*declarations: Declaration) -> Declaration:
    """Declares several options in the order given."""

    def declare(command: Callable[..., None]) -> Callable[..., None]:
        for declaration in reversed(declarations):
            command = declaration(command)
        return command

    return declare


_dry_run_option = option(
    "--dry-run",
    group=Group.DISPLAY,
    is_flag=True,
    help="Show what would become of SRC, and write nothing.",
)


json_option = option(
    "--json",
    "as_json",
    group=Group.DISPLAY,
    is_flag=True,
    help="Print the result as JSON (docs/json.md).",
)


def quiet_option(help: str) -> Declaration:
    return option("-q", "--quiet", group=Group.DISPLAY, is_flag=True, help=help)


def verbose_option(help: str) -> Declaration:
    return option(
        "-v",
        "--verbose",
        group=Group.DISPLAY,
        is_flag=True,
        callback=show_log,
        help=help,
    )


verbose_log_option = verbose_option("Say what is done and how long it takes, on stderr.")


# The options of a command that writes a checkpoint. They fill Display, as do all of this group.
writing_display_options = several(
    _dry_run_option,
    json_option,
    quiet_option("Show no progress and no summary."),
    verbose_log_option,
)
