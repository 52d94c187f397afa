"""`python -m tools.demo`."""

import typer

from tools.demo.demo import demo_command

app = typer.Typer(add_completion=False)
app.command()(demo_command)

if __name__ == "__main__":
    app(prog_name="python -m tools.demo")
