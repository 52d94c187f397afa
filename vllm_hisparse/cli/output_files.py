"""Files that commands write: refused before any work if they cannot be written."""

from __future__ import annotations

from pathlib import Path

import typer


def check_writable(path: Path, option: str) -> None:
    """Refuse a file that cannot be written.

    Raises:
        BadParameter: names the option.
    """
    try:
        is_new = not path.exists()
        if path.is_fifo():  # opening it waits for a reader
            raise typer.BadParameter(f"got {path}, a FIFO, expected a file", param_hint=option)
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise typer.BadParameter(f"got {path}: {error.strerror}", param_hint=option) from None


def check_new_file(path: Path, option: str) -> None:
    """Make the folder of a file, and refuse a file that cannot be written.

    Raises:
        BadParameter: names the option.
    """
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
    except OSError as error:
        raise typer.BadParameter(f"got {path}: {error.strerror}", param_hint=option) from None
    check_writable(path, option)


def check_picture(path: Path, option: str) -> None:
    """Make the folder of a picture, and refuse a picture that matplotlib cannot write.

    Raises:
        BadParameter: names the option.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError:
        raise typer.BadParameter("needs matplotlib: pip install matplotlib", param_hint=option) from None
    known = FigureCanvasBase.get_supported_filetypes().keys() - {"pgf"}  # which needs LaTeX
    if path.suffix[1:].lower() not in known:
        message = f"got {path}, expected a name that ends with one of .{', .'.join(sorted(known))}"
        raise typer.BadParameter(message, param_hint=option)
    check_new_file(path, option)
