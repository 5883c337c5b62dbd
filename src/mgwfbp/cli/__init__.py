"""The command line: one subcommand per verb. Only here are errors caught and shown."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import mgwfbp
from mgwfbp.cli.bench import bench
from mgwfbp.cli.compare import compare
from mgwfbp.cli.cost import cost
from mgwfbp.cli.demo import demo
from mgwfbp.cli.doctor import doctor
from mgwfbp.cli.lab import lab
from mgwfbp.cli.measure import measure
from mgwfbp.cli.output import talk
from mgwfbp.cli.paper import paper
from mgwfbp.cli.plan import plan
from mgwfbp.cli.report import report
from mgwfbp.cli.simulate import simulate
from mgwfbp.cli.traces import traces
from mgwfbp.cli.train import train
from mgwfbp.errors import MgwfbpError
from mgwfbp.units import quote

__all__ = ["app", "run"]

app = typer.Typer(
    name="mgwfbp",
    help="Find which gradients to merge into one message so that a data-parallel training step is shortest.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: in narrow terminals the boxes cut the names of options
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (compare, plan, cost, simulate, bench, train, paper, report, traces, demo, doctor):
    app.command()(command)
# What follows the program's name is its own, options too.
app.command(context_settings={"allow_interspersed_args": False})(lab)
app.add_typer(measure, name="measure")


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


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C."""
    try:
        status = typer.main.get_command(app).main(list(arguments), prog_name="mgwfbp", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "mgwfbp"
        talk(f"{where}: {error.format_message()} (see `{where} --help`)")
        return error.exit_code
    except MgwfbpError as error:
        speaker = f"mgwfbp, rank {os.environ['RANK']}" if "RANK" in os.environ else "mgwfbp"
        talk(f"{speaker}: {error}")
        return 1
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        talk("mgwfbp: this command needs torch, which is not installed: pip install torch (see `mgwfbp doctor`)")
        return 1
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        _close_stdout()  # whoever read our output has enough of it
        return 1
    except OSError as error:
        if error.filename is not None:  # a name that the system does not take, be it only to look whether it is there
            talk(f"mgwfbp: {quote(error.filename)}: {error.strerror}")
            return 1
        _close_stdout()
        talk(f"mgwfbp: the output cannot be written: {error.strerror or error}")
        return 1
    return status if isinstance(status, int) else 0


def _close_stdout() -> None:
    """Send what is still in the buffer nowhere: Python would complain about it again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
