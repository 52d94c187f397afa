"""Python sources of installed packages as training text, and the tokenizer made of them.

Only packages whose metadata names a permissive licence are read (`PERMISSIVE`), and CPython's own library. Files of a
package stay in the order of their paths, so that a long window holds definitions and their uses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|HPND)\b", re.IGNORECASE)
NOT_PERMISSIVE = re.compile(r"GPL|MPL|Mozilla|Proprietary|NVIDIA|Commercial|LicenseRef", re.IGNORECASE)
END_OF_FILE = "<|end_of_file|>"
SPECIAL_TOKENS = ["<|begin|>", END_OF_FILE]
MIN_FILE_BYTES, MAX_FILE_BYTES = 512, 400_000
HELD_OUT_EVERY = 40  # of the packages by name, one in so many is kept for evaluation
TOKENIZER_SAMPLE_BYTES = 24 << 20


@dataclass(frozen=True)
class Package:
    """A package's sources.

    Attributes:
        name: name of the distribution.
        licence: licence that its metadata states.
        files: Python files, sorted by path.
    """

    name: str
    licence: str
    files: tuple[Path, ...]

    def texts(self) -> Iterator[str]:
        """Contents of the files that are UTF-8 and of a usable size."""
        for path in self.files:
            if MIN_FILE_BYTES <= path.stat().st_size <= MAX_FILE_BYTES:
                try:
                    yield path.read_text(encoding="utf-8")
                except UnicodeDecodeError:
                    continue


def licence_of(distribution: Distribution) -> str:
    """The licence that a distribution's metadata names, in one line; empty where it names none."""
    metadata = distribution.metadata
    classifiers = [line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier", []) if "License ::" in line]
    field = (metadata.get("License-Expression") or metadata.get("License") or "").strip().split("\n")[0][:80]
    return "; ".join(part for part in (field, *classifiers) if part)


def is_permissive(licence: str) -> bool:
    return bool(PERMISSIVE.search(licence)) and not NOT_PERMISSIVE.search(licence)


def permissive_packages(max_bytes: int) -> list[Package]:
    """Installed packages with a permissive licence, by name; a package gives at most a quarter of `max_bytes`."""
    found: dict[str, Package] = {}
    for distribution in distributions():
        name, licence = distribution.metadata["Name"], licence_of(distribution)
        if name in found or not is_permissive(licence):
            continue
        paths = (Path(distribution.locate_file(path)) for path in distribution.files or () if path.suffix == ".py")
        files, num_bytes = [], 0
        for path in sorted(path for path in paths if path.is_file()):
            num_bytes += path.stat().st_size
            if num_bytes > max_bytes // 4:
                break
            files.append(path)
        if files:
            found[name] = Package(name, licence, tuple(files))
    library = Path(re.__file__).resolve().parents[1]
    stdlib = sorted(path for path in library.rglob("*.py") if not {"site-packages", "dist-packages"} & set(path.parts))
    found["CPython"] = Package("CPython", "PSF-2.0", tuple(stdlib))
    return [found[name] for name in sorted(found)]


def split(packages: list[Package]) -> tuple[list[Package], list[Package]]:
    """Packages to train on, and those held out."""
    held_out = [package for index, package in enumerate(packages) if index % HELD_OUT_EVERY == HELD_OUT_EVERY // 2]
    return [package for package in packages if package not in held_out], held_out


def unseen(packages: list[Package], model_dir: Path) -> list[Package]:
    """Packages that the model in a directory was not trained on, according to its training.json."""
    listed = json.loads((model_dir / "training.json").read_text())["packages"]
    trained = {package["package"] for package in listed if not package["held_out"]}
    return [package for package in packages if package.name not in trained]


def make_tokenizer(packages: list[Package], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of the packages' text; every text survives encode and decode."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_sample(packages), trainer)
    return tokenizer


def _sample(packages: list[Package]) -> Iterator[str]:
    """Files of all packages in turn, up to `TOKENIZER_SAMPLE_BYTES`."""
    num_bytes, readers = 0, [package.texts() for package in packages]
    while readers and num_bytes < TOKENIZER_SAMPLE_BYTES:
        for reader in list(readers):
            text = next(reader, None)
            if text is None:
                readers.remove(reader)
                continue
            num_bytes += len(text)
            yield text


def encode(packages: list[Package], tokenizer: Tokenizer, max_bytes: int) -> np.ndarray:
    """Tokens of the packages' files in order, each file followed by `END_OF_FILE`: [tokens] uint16."""
    end, parts, num_bytes = tokenizer.token_to_id(END_OF_FILE), [], 0
    for package in packages:
        texts = list(package.texts())
        num_bytes += sum(len(text) for text in texts)
        for encoding in tokenizer.encode_batch_fast(texts):
            parts.append(np.array([*encoding.ids, end], dtype=np.uint16))
        if num_bytes > max_bytes:
            break
    return np.concatenate(parts)
