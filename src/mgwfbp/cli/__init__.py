"""The command line: one subcommand per verb. Only here are errors caught and shown."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import mgwfbp
from mgwfbp.cli.compare import compare
from mgwfbp.cli.cost import cost
from mgwfbp.cli.demo import demo
from mgwfbp.cli.lab import lab
from mgwfbp.cli.plan import plan
from mgwfbp.errors import MgwfbpError

__all__ = ["app", "main"]

app = typer.Typer(
    name="mgwfbp",
    help="Find which gradients to merge into one message so that a data-parallel training step is shortest.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (compare, plan, cost, demo):
    app.command()(command)
# What follows the program's name is its own, options too.
app.command(context_settings={"allow_interspersed_args": False})(lab)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and leave.")] = False,
) -> None:
    if version:
        typer.echo(f"mgwfbp {mgwfbp.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def main() -> None:
    """Run the command line; the entry point of ``mgwfbp``."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C."""
    try:
        status = typer.main.get_command(app).main(list(arguments), prog_name="mgwfbp", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "mgwfbp"
        typer.echo(f"{where}: {error.format_message()} (see `{where} --help`)", err=True)
        return error.exit_code
    except MgwfbpError as error:
        typer.echo(f"mgwfbp: {error}", err=True)
        return 1
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # Whoever read our output has enough of it. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status if isinstance(status, int) else 0
