"""The `vllm-hisparse` command: plan, doctor, tiny models, traces and their replay. A server never imports it."""


def run() -> None:
    """Entry point of the command; exits with a message if the extra `cli` is not installed."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"vllm-hisparse: the package {error.name} is not installed. Install the command with "
            "pip install 'vllm-hisparse[cli]'."
        ) from None
    from vllm_hisparse.cli.main import app

    app()
