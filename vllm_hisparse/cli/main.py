"""The `vllm-hisparse` command. Each sub-command imports its modules only when it runs."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperCommand

from vllm_hisparse.cli.tiny_model import make_model_command

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Hierarchical sparse attention for vLLM.")
trace_app = typer.Typer(no_args_is_help=True, help="Traces of selections.")
app.add_typer(trace_app, name="trace")
FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


PYDANTIC_MESSAGE = "Input should be "  # begins the messages of newer releases of typer, which leave out the value


class CheckedCommand(TyperCommand):
    """A command whose errors name the value that it got. It refuses infinite numbers and NaN, which click accepts."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.param is None or not error.message.startswith(PYDANTIC_MESSAGE):
                raise
            expected = error.message.removeprefix(PYDANTIC_MESSAGE).partition(", unable")[0]
            if expected.startswith(("less", "greater")):
                expected = f"a number {expected}"
            got = _values(given, error.param.opts)
            raise typer.BadParameter(f"got {got}, expected {expected}", error.ctx, error.param) from None

    def invoke(self, ctx: Any) -> Any:
        for name, values in ctx.params.items():
            for value in values if isinstance(values, list | tuple) else [values]:
                if isinstance(value, float) and not math.isfinite(value):
                    option = f"--{name.replace('_', '-')}"
                    raise typer.BadParameter(f"got {value}, expected a finite number", param_hint=option)
        return super().invoke(ctx)


def _values(args: list[str], names: list[str]) -> str:
    """Return the values that an option with these names has among the arguments."""
    found = [value for name, value in pairwise(args) if name in names]
    found += [value for word in args for name, is_joined, value in [word.partition("=")] if is_joined and name in names]
    return ", ".join(map(repr, found)) or "another value"


def forward(ctx: typer.Context, command: Callable[..., None]) -> None:
    """Pass the arguments of `ctx` to a sub-command, which has its own options and help."""
    target = typer.Typer(add_completion=False)
    target.command(cls=CheckedCommand)(command)
    target(args=ctx.args, prog_name=ctx.command_path)


@app.callback()
def main() -> None:
    """Do nothing: this callback makes `vllm-hisparse` a group of sub-commands."""


@app.command(context_settings=FORWARDED)
def replay(ctx: typer.Context) -> None:
    """Simulate hot buffers over a trace of selections: hit rates, and time on the link to host memory."""
    from vllm_hisparse.cli.replay import replay_command

    forward(ctx, replay_command)


@app.command(context_settings=FORWARDED)
def plan(ctx: typer.Context) -> None:
    """Predict requests at once, latency and tokens/s of a model on given GPUs, and print the commands to start it."""
    from vllm_hisparse.cli.plan.command import plan_command

    forward(ctx, plan_command)


@app.command(context_settings=FORWARDED)
def doctor(ctx: typer.Context) -> None:
    """Check this machine: versions, GPU, memory, network; measure its links. Exits with 1 after an error."""
    from vllm_hisparse.cli.doctor.command import doctor_command

    forward(ctx, doctor_command)


@app.command("check-algorithm", context_settings=FORWARDED)
def check_algorithm(ctx: typer.Context) -> None:
    """Check a selection algorithm of your own on random keys, in seconds, without an engine."""
    from vllm_hisparse.cli.check_algorithm import check_algorithm_command

    forward(ctx, check_algorithm_command)


@trace_app.command(context_settings=FORWARDED)
def record(ctx: typer.Context) -> None:
    """Let a DSA model continue some texts and record which positions it selects."""
    from vllm_hisparse.cli.trace import record_command

    forward(ctx, record_command)


app.command("make-model", cls=CheckedCommand)(make_model_command)
