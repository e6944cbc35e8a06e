"""Reads the command line, calls one function of the public API and prints what it returned."""

from nf4conv.cli.main import main as main
